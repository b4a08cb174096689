"""Flask: ``@guard(…)`` decides around the view, after the app's own sign-in and hooks.

::

    guard = FlaskGuard(Onceward("sqlite:///shop.db"), app)  # the caller is Flask-Login's user

    @app.post("/orders")
    @login_required
    @guard("orders.create")
    def create_order():
        guard.transaction.execute("INSERT …", {…})
        return {"ordered": True}, 201
"""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, Final, TypeVar, Unpack
from weakref import WeakKeyDictionary, ref

from onceward_protocol.extras import needs_extra

with needs_extra("flask"):
    import flask
    from flask import current_app, request
    from werkzeug.exceptions import HTTPException, RequestEntityTooLarge
    from werkzeug.routing import RoutingException

from onceward.app import Onceward
from onceward.batch.options import BatchOptions
from onceward.errors import (
    ConfigurationError,
    NotAuthenticatedError,
    RequestError,
    ResponseTooLargeError,
    StoreUnavailableError,
    StreamingResponseError,
)
from onceward.frameworks.sync_bridge import (
    Bridge,
    Served,
    SyncBatch,
    SyncExecution,
    SyncRequest,
    batch_options,
)
from onceward.frameworks.views import (
    EndpointNames,
    check_endpoint,
    check_policy,
    check_rate_limit,
    name_of_view,
    no_caller,
    refuse_generator,
    with_route,
)
from onceward.frameworks.wsgi import (
    collect,
    head_of,
    parsed_form,
    read_body,
    send_served,
    with_content_type,
)
from onceward.guard.pipeline import ADDED_HEADERS
from onceward.guard.policy import Policy
from onceward.guard.request import Principal, RequestHead
from onceward.guard.route_table import SAFE_METHODS, Guard, Match, guard_of, mark_guarded
from onceward.jobs.job import EnqueueOptions, EnqueueOutcome
from onceward.ports import BlockingGate
from onceward.records import Response
from onceward.stores.errors import unstorable_error
from onceward.stores.sessions.gate import end_visit

__all__ = ["FlaskGuard", "login_principal"]

View = TypeVar("View", bound=Callable[..., Any])
GetPrincipal = Callable[[], Principal]


_FILE_WRAPPER: Final = "wsgi.file_wrapper"
_GUARDED_METHODS: Final = ("dispatch_request", "post", "put", "patch", "delete")


class _Installed:
    """A Onceward, and what runs it for the apps that use it."""

    def __init__(
        self,
        onceward: Onceward,
        principal: GetPrincipal | None,
        batch: str | BatchOptions | None = None,
    ) -> None:
        # ``onceward worker --app`` looks for this name.
        self.onceward = onceward
        if principal is not None and onceward.runtime.callers.is_single_tenant:
            raise ConfigurationError(
                "FlaskGuard(principal=…) says who callers are, but Onceward(tenants=SINGLE_TENANT) "
                "that they are not kept apart: give one of them"
            )
        self.principal: GetPrincipal | None = principal or getattr(onceward, "principal", None)
        self.bridge = Bridge(onceward)
        options = batch_options(batch)
        # The batch endpoint; its items are signed in by the app, each in its own request.
        self.batch = None if options is None else SyncBatch(self.bridge, options)
        # By guarded view.
        self.guards: dict[Callable[..., Any], Guard] = {}

    def check_caller(self, app: flask.Flask, view: str) -> None:
        """Raise ``ConfigurationError`` if nothing says who calls a view without a principal."""
        if not (
            self.principal is not None
            or self.onceward.runtime.callers.has_identify
            or hasattr(app, "login_manager")
        ):
            raise no_caller(
                f"{view} is guarded",
                "FlaskGuard(onceward, app, principal=…) with a function that returns "
                "Principal(tenant=…, actor=…), or set up Flask-Login",
                "Onceward(…, tenants=SINGLE_TENANT)",
            )


class _AppState:
    """What a ``FlaskGuard`` knows about one app."""

    __slots__ = ("checked", "first_routes", "guarded_endpoints", "installed")

    def __init__(self) -> None:
        # Given to ``init_app``.
        self.installed: _Installed | None = None
        # The first route of each view and guard.
        self.first_routes: dict[tuple[str, int], str] = {}
        # Whether the view of an endpoint is seen to be guarded.
        self.guarded_endpoints: dict[str, bool] = {}
        # How many guards were checked.
        self.checked = -1


class FlaskGuard:
    """Guards views of a Flask app: functions, methods of a ``MethodView``, views of blueprints.

    ``principal`` returns the caller, from ``g``, the session or ``current_user``. Without it, the
    caller is what ``Onceward(identify=…)`` finds, else the user of Flask-Login. An app that has
    none of these, and not ``Onceward(tenants=SINGLE_TENANT)``, is refused at its first request.

    In an app factory, write ``guard = FlaskGuard()`` at module level, and in the factory
    ``guard.init_app(app, Onceward(…))``. Each app then has its own Onceward.
    """

    def __init__(
        self,
        onceward: Onceward | None = None,
        app: flask.Flask | None = None,
        *,
        principal: GetPrincipal | None = None,
        batch: str | BatchOptions | None = None,
    ) -> None:
        """Open nothing yet: the store is opened at the first guarded request of each process.

        ``batch`` is the path of an endpoint that takes many guarded requests in one, such as
        ``/batch``, or its options. Each of them passes through the whole app, one by one.
        """
        if onceward is not None and not isinstance(onceward, Onceward):
            raise ConfigurationError(
                f"FlaskGuard needs a Onceward, not {onceward!r}: write "
                "FlaskGuard(Onceward(store), app)"
            )
        self._principal = principal
        self._batch = batch
        self._default = None if onceward is None else _Installed(onceward, principal, batch)
        self._states: WeakKeyDictionary[flask.Flask, _AppState] = WeakKeyDictionary()
        # The app of the last request: nearly always the only one.
        self._last: tuple[Callable[[], flask.Flask | None], _AppState | None] = (_no_app, None)
        self._names = EndpointNames()
        # Guarded functions, what they guard, and whether they have their own principal.
        self._guarded: list[tuple[Callable[..., Any], Callable[..., Any], bool]] = []
        # How to make the guard of a guarded function, for one Onceward.
        self._guards: dict[Callable[..., Any], Callable[[_Installed], Guard]] = {}
        if app is not None:
            self.init_app(app)

    def init_app(self, app: flask.Flask, onceward: Onceward | None = None) -> None:
        """Turn Onceward's errors into responses in all views of an app.

        ``onceward`` is used for this app, in place of the one given to ``FlaskGuard``.
        """
        if onceward is not None:
            self._state_of(app).installed = _Installed(onceward, self._principal, self._batch)
        app.register_error_handler(RequestError, self._respond)
        app.register_error_handler(StoreUnavailableError, self._respond)
        state = self._state_of(app)
        installed = state.installed or self._default
        gate = None if installed is None else installed.bridge.gate
        if gate is None:

            def check_routes() -> None:
                if state.checked != len(self._guarded):
                    self._check_routes()

            app.before_request(check_routes)
        else:
            self._admit_before_hooks(app, state, gate)
        # Where ``onceward worker --app`` finds it.
        app.extensions["onceward"] = state.installed or self
        if self._batch is not None:
            app.wsgi_app = self._with_batch(app, app.wsgi_app)  # type: ignore[method-assign]

    def _with_batch(self, app: flask.Flask, wsgi_app: Any) -> Any:
        """Return a WSGI app that serves batches, and everything else by ``wsgi_app``."""

        def serve(environ: dict[str, Any], start_response: Any) -> Any:
            batch = self._installed(self._state_of(app)).batch
            path = environ.get("PATH_INFO", "")
            if (
                batch is None
                or environ["REQUEST_METHOD"].upper() != "POST"
                or path != batch.options.path
            ):
                return wsgi_app(environ, start_response)
            served = batch.serve(
                head_of(environ, "POST", path),
                environ,
                read=lambda limit: read_body(environ, limit),
                find=partial(self._find, app, environ),
                run=lambda item: collect(wsgi_app, item),
            )
            return send_served(served, start_response)

        return serve

    def _find(
        self, app: flask.Flask, environ: dict[str, Any], method: str, path: str
    ) -> Match | None:
        """Return what guards a request; None if nothing certainly does."""
        routes = app.url_map.bind_to_environ(environ, server_name=app.config["SERVER_NAME"])
        try:
            rule, params = routes.match(path, method=method, return_rule=True)
        except (HTTPException, RoutingException):
            return None
        view = app.view_functions.get(rule.endpoint)
        owner = getattr(view, "view_class", None)
        handlers = [view]
        if owner is not None:
            handlers += [getattr(owner, "dispatch_request", None)]
            handlers += [getattr(owner, method.lower(), None)]
        installed = self._installed(self._state_of(app))
        for one in (inner for handler in handlers for inner in _unwrapped(handler)):
            if one in self._guards:
                guard = self._guards[one](installed)
                return Match(guard.endpoint or f"{method} {rule.rule}", guard.policy, dict(params))
        return None

    @property
    def onceward(self) -> Onceward:
        """The Onceward of the current app. Raises ``ConfigurationError`` if it has none."""
        return self._installed().onceward

    def _state_of(self, app: flask.Flask) -> _AppState:
        last_app, last_state = self._last
        if last_app() is app and last_state is not None:
            return last_state
        found = self._states.get(app)
        if found is None:
            found = self._states.setdefault(app, _AppState())
        self._last = ref(app), found
        return found

    def _installed(self, state: _AppState | None = None) -> _Installed:
        """Return what was installed in the current app, whose state may be given."""
        if state is None and flask.has_app_context():
            state = self._state_of(_app())
        found = self._default if state is None else state.installed or self._default
        if found is None:
            own = [one.installed for one in self._states.values() if one.installed is not None]
            found = own[0] if len(own) == 1 else None
        if found is None:
            raise ConfigurationError(
                "this FlaskGuard has no Onceward: write FlaskGuard(Onceward(store), app), or in an "
                "app factory guard.init_app(app, Onceward(store))"
            )
        return found

    def __call__(
        self,
        endpoint: str | None = None,
        *,
        policy: Policy | None = None,
        principal: GetPrincipal | None = None,
    ) -> Callable[[View], View]:
        """Guard a view, for all methods except GET, HEAD, OPTIONS and TRACE.

        Goes below the route decorator, and below decorators that check the caller; or on a
        ``MethodView``, on its methods or into its ``decorators``. A name covers all routes of a
        view; a key that was used on one of them is refused on the others.
        """
        check_endpoint(endpoint)
        check_policy(policy)

        def decorate(view: View) -> View:
            if isinstance(view, type):
                name = f"{view.__module__}.{view.__qualname__}"
                setattr(view, "dispatch_request", guard_function(_dispatch_of(view, name), name))  # noqa: B010
                return view
            refuse_generator(view)
            guarded: View = guard_function(view, name_of_view(view))
            return guarded

        def guard_function(view: Any, name: str) -> Any:
            # Flask's ``ensure_sync`` inspects a function at each call.
            is_async = iscoroutinefunction(view)

            def guard_for(installed: _Installed) -> Guard:
                chosen = installed.onceward.runtime.policy_or_default(policy)
                check_rate_limit(installed.onceward.runtime.config.limiter, chosen, name)
                return Guard(chosen, endpoint)

            @wraps(view)
            def guarded(*args: Any, **kwargs: Any) -> Any:
                app = _app()
                state = self._state_of(app)
                installed = self._installed(state)
                chosen = installed.guards.get(guarded)
                if chosen is None:
                    chosen = installed.guards[guarded] = guard_for(installed)
                run = partial(app.ensure_sync(view) if is_async else view, *args, **kwargs)
                return self._serve(app, state, installed, chosen, principal, guarded, view, run)

            if self._default is not None:  # refuses a rate limit without a limiter
                self._default.guards[guarded] = guard_for(self._default)
            if endpoint is not None:
                self._names.add(endpoint, name)
            mark_guarded(guarded, Guard(policy or Policy(), endpoint))
            self._guarded.append((guarded, view, principal is not None))
            self._guards[guarded] = guard_for
            return guarded

        return decorate

    @property
    def execution(self) -> SyncExecution:
        """The guarded request being served: caller, ids, audit fields."""
        return self._installed().bridge.execution

    @property
    def transaction(self) -> Any:
        """The transaction the guarded view must write in. It commits with the response."""
        return self.execution.transaction

    def enqueue(
        self, job_type: str, payload: Any = None, **options: Unpack[EnqueueOptions]
    ) -> EnqueueOutcome:
        """Enqueue a job in the transaction. Takes the options of ``Onceward.enqueue``."""
        return self.execution.enqueue(job_type, payload, **options)

    def close(self) -> None:
        """Close the store, of all apps. Call it when the process ends."""
        of_apps = (state.installed for state in self._states.values())
        for installed in (self._default, *of_apps):
            if installed is not None:
                installed.bridge.close()

    def _admit_before_hooks(self, app: flask.Flask, state: _AppState, gate: BlockingGate) -> None:
        """Wait, before other hooks take a connection, until the view may take a second one."""

        def enter() -> None:
            if state.checked != len(self._guarded):
                self._check_routes()
            current = _request()
            endpoint = current.endpoint
            if endpoint is None or current.method in SAFE_METHODS:
                return
            is_guarded = state.guarded_endpoints.get(endpoint)
            if is_guarded is None:
                view = app.view_functions.get(endpoint)
                is_guarded = any(guard_of(one) is not None for one in _inside(view))
                state.guarded_endpoints[endpoint] = is_guarded
            gate.enter(endpoint, is_guarded=is_guarded)

        def leave(_error: BaseException | None) -> None:
            end_visit()

        app.before_request_funcs.setdefault(None, []).insert(0, enter)
        app.teardown_request(leave)

    # -- one request --------------------------------------------------------------------------

    def _serve(  # noqa: PLR0917
        self,
        app: flask.Flask,
        state: _AppState,
        installed: _Installed,
        guard: Guard,
        principal: GetPrincipal | None,
        guarded: Callable[..., Any],
        view: Callable[..., Any],
        run: Callable[[], Any],
    ) -> Any:
        # The object behind Flask's proxy, which costs a look-up per attribute.
        current = _request()
        rule = current.url_rule
        if current.method in SAFE_METHODS:
            if rule is not None and SAFE_METHODS.issuperset(rule.methods or ()):
                raise ConfigurationError(
                    f"{rule.rule} is guarded, but a {current.method} must not write: guard POST, "
                    "PUT, PATCH or DELETE"
                )
            return run()
        if installed.bridge.is_serving:  # called by a guarded view, whose guard counts
            return run()
        if state.checked != len(self._guarded):
            self._check_routes()
        own: list[flask.Response] = []

        def handle() -> Response:
            response = _response_of(app, current, run)
            own.append(response)
            return _collected(response, current.path, guard.policy.max_response_bytes)

        path = rule.rule if rule is not None else current.path
        views = current.view_args
        params = {name: str(value) for name, value in views.items()} if views else {}
        if guard.endpoint is not None and rule is not None:
            params = with_route(params, self._later_route(app, state, rule, guarded))
        head, body = _head_and_body(current, guard.policy.max_body_bytes)
        prefix = current.environ.get("SCRIPT_NAME", "")
        served = installed.bridge.serve(
            SyncRequest(
                head=head,
                match=Match(guard.endpoint or f"{current.method} {path}", guard.policy, params),
                body=body,
                handle=handle,
                principal=principal or installed.principal or _default_principal(installed, view),
                added_headers=()
                if installed.batch is None
                else (installed.batch.options.header(prefix),),
            )
        )
        return _flask_response(served, own[-1] if served.is_own else None)

    @staticmethod
    def _later_route(
        app: flask.Flask, state: _AppState, rule: Any, guarded: Callable[..., Any]
    ) -> str | None:
        """Return the route of the request, or None if it is the first that leads to its view.

        The first one is None so that a route added to a view changes nothing for those before it.
        """
        firsts = state.first_routes
        key = (rule.endpoint, id(guarded))
        if key not in firsts:
            views = app.view_functions
            own = views.get(rule.endpoint)
            firsts[key] = next(
                _text(other)
                for other in app.url_map.iter_rules()
                if (view := views.get(other.endpoint)) is own
                or any(one is guarded for one in _inside(view))
            )
        route = _text(rule)
        return None if route == firsts[key] else route

    def _check_routes(self) -> None:
        """Raise ``ConfigurationError`` for a guard that guards nothing, or has no caller."""
        app = _app()
        state = self._state_of(app)
        served = {id(one): one for view in app.view_functions.values() for one in _inside(view)}
        for guarded, view, has_principal in self._guarded:
            if id(guarded) in served and not has_principal:
                self._installed().check_caller(app, name_of_view(view))
            # Only what certainly is unguarded: a view may be in another app, or below a decorator
            # that hides it.
            if id(guarded) not in served and any(id(one) in served for one in _unwrapped(view)):
                raise ConfigurationError(
                    f"{name_of_view(view)} is guarded above its route decorator, so its route is "
                    "not guarded: put @guard(…) below @app.post(…)"
                )
        state.checked = len(self._guarded)

    def _respond(self, error: Exception) -> Any:
        """Respond with a Onceward error that a view raised."""
        installed = self._installed()
        if (
            not isinstance(error, RequestError | StoreUnavailableError)
            or installed.bridge.is_serving
        ):
            raise error  # in a guarded view, the guard rolls back and renders it
        head = head_of(request.environ, request.method, request.path)
        return _flask_response(installed.bridge.refuse(error, head), None)


def _no_app() -> flask.Flask | None:
    return None


def _app() -> flask.Flask:
    app: flask.Flask = current_app._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001
    return app


def _request() -> flask.Request:
    found: flask.Request = request._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001
    return found


def _default_principal(installed: _Installed, view: Callable[..., Any]) -> GetPrincipal | None:
    """Return how the caller is found if no function was given: ``identify``, or Flask-Login."""
    if installed.onceward.runtime.callers.has_identify:
        return None
    installed.check_caller(current_app, name_of_view(view))
    return login_principal


def _dispatch_of(view: type, name: str) -> Callable[..., Any]:
    """Return what calls the methods of a class, inside all of its ``decorators``."""
    inherited: Any = getattr(view, "dispatch_request", None)
    if inherited is None:
        raise ConfigurationError(
            f"{name} is guarded, but is no view: guard a function, or a class that derives from "
            "Flask's MethodView or View"
        )

    def dispatch_request(instance: Any, **kwargs: Any) -> Any:
        return current_app.ensure_sync(inherited)(instance, **kwargs)

    return dispatch_request


def _inside(view: Any) -> Iterator[Any]:
    """Yield a view function, the methods of its class, and what all of them wrap."""
    owner = getattr(view, "view_class", None)
    methods = (getattr(owner, name, None) for name in _GUARDED_METHODS) if owner else ()
    for one in (view, *methods):
        yield from _unwrapped(one)


def _unwrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _text(rule: Any) -> str:
    return f"{rule.host or rule.subdomain or ''}{rule.rule}"


def login_principal() -> Principal:
    """Return Flask-Login's user: its id is tenant and actor. Raises if the user is anonymous."""
    from flask_login import current_user  # noqa: PLC0415 - an optional dependency

    if not current_user.is_authenticated:
        raise NotAuthenticatedError("sign in first")
    user_id = current_user.get_id()
    if user_id is None:  # str(None) would be one tenant for all such users
        raise ConfigurationError("the user of Flask-Login has no id: give FlaskGuard principal=…")
    return Principal(tenant=str(user_id), actor=str(user_id))


def _response_of(
    app: flask.Flask,
    current: flask.Request,
    run: Callable[[], Any],
) -> flask.Response:
    """Run the view. An exception for which the app has a handler becomes its response."""
    # Without the server's way to send files, ``send_file`` gives one that can be read.
    wrapper = current.environ.pop(_FILE_WRAPPER, None)
    try:
        try:
            result = run()
        except Exception as error:  # noqa: BLE001 - raised again unless the app handles it
            try:
                result = app.handle_user_exception(error)
            except Exception as unhandled:
                refused = unstorable_error(unhandled)
                if refused is None:
                    raise
                result = app.handle_user_exception(refused)
            if isinstance(result, HTTPException):
                result = result.get_response(current.environ)
        return app.make_response(result)
    finally:
        if wrapper is not None:  # servers look at it after the response, too
            current.environ[_FILE_WRAPPER] = wrapper


def _collected(response: flask.Response, path: str, max_bytes: int) -> Response:
    """Return a complete response. Reads the content of a file, whose length is known."""
    if response.is_streamed or response.direct_passthrough:
        length = response.content_length
        if length is None or length > max_bytes:
            response.close()  # the file
        if length is None:
            raise StreamingResponseError(
                "a guarded view streams its response, which is stored with the transaction and "
                "must be complete: return a plain response"
            )
        if length > max_bytes:
            raise ResponseTooLargeError(
                f"{path} sent a file of more than {max_bytes} bytes, which cannot be "
                "stored for a replay: respond with a link to it"
            )
        response.direct_passthrough = False
        file: Any = response.response
        response.make_sequence()
        if hasattr(file, "close"):
            file.close()
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.headers.items()
    ]
    return Response(response.status_code, tuple(headers), response.get_data())


def _flask_response(served: Served, own: flask.Response | None) -> flask.Response:
    if own is not None:
        # The view's own object: it may have callbacks, and extensions look at its type.
        for name, value in served.headers:
            if name in ADDED_HEADERS:
                own.headers.set(name.decode("latin-1"), value.decode("latin-1"))
        return own
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in served.headers]
    return current_app.response_class(served.body, served.status, headers)


def _head_and_body(current: flask.Request, limit: int) -> tuple[RequestHead, bytes]:
    """Return the head of the request, and its body."""
    head = head_of(current.environ, current.method, current.path)
    length = current.content_length
    if length is not None and length > limit:
        return head, b""  # refused by its length
    if "form" in vars(current) and (current.form or current.files):
        # A hook has read the form, e.g. to check a CSRF token: the bytes are gone.
        fields = current.form.items(multi=True)
        files = (
            (field, file.filename or "", file.stream)
            for field, file in current.files.items(multi=True)
        )
        return with_content_type(head, b"application/x-www-form-urlencoded"), parsed_form(
            fields, files
        )
    own_limit = current.max_content_length
    is_limited_here = length is None and _lower_limit(current, limit)
    try:
        body = current.get_data(cache=True)
        if own_limit is not None and len(body) > own_limit:
            raise RequestEntityTooLarge  # noqa: TRY301 - as Werkzeug does for a body with a length
    except RequestEntityTooLarge:
        if not is_limited_here:
            raise  # the app's own limit, and its own response
        too_long = (b"content-length", str(limit + 1).encode())
        headers = [*head.headers, too_long]
        return RequestHead(head.method, head.path, head.query, headers), b""
    if length and not body:
        raise ConfigurationError(
            f"the body of {current.method} {current.path} was read before its guard: read "
            "request.get_data() in hooks, which keeps it, not request.stream"
        )
    return head, body


def _lower_limit(current: flask.Request, limit: int) -> bool:
    """Limit a body without a length; return False if the app's own limit is as low.

    Werkzeug cuts such a body off at the limit, without an error. So one byte more is read, by which
    it is seen to be too long.
    """
    own_limit = current.max_content_length
    is_own = own_limit is not None and own_limit <= limit
    current.max_content_length = (own_limit if own_limit is not None and is_own else limit) + 1
    return not is_own
