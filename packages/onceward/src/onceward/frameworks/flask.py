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

import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, Final, NamedTuple, TypeVar, Unpack
from weakref import WeakKeyDictionary

from onceward.guard.pipeline import id_headers
from onceward.guard.policy import Policy
from onceward.jobs.job import EnqueueOptions, EnqueueOutcome
from onceward.records import Response
from onceward_protocol.extras import needs_extra

with needs_extra("flask"):
    import flask
    from flask import current_app, request
    from werkzeug.exceptions import ClientDisconnected, HTTPException, RequestEntityTooLarge
    from werkzeug.routing import RoutingException

from onceward.app import Onceward
from onceward.batch.options import BatchOptions
from onceward.errors import (
    ConfigurationError,
    LengthRequiredError,
    NotAuthenticatedError,
    RequestError,
    StoreUnavailableError,
)
from onceward.frameworks.views import (
    EndpointNames,
    check_endpoint,
    check_policy,
    name_of_view,
    no_caller,
    refuse_generator,
    with_route,
)
from onceward.frameworks.wsgi import (
    NO_POLICY,
    Bridge,
    ChunkedInput,
    Served,
    SyncBatch,
    SyncExecution,
    batch_options,
    broken_off,
    check_end,
    check_file,
    encoded_headers,
    head_of,
    parsed_form,
    refused_body,
    with_header,
)
from onceward.guard.request import Principal, RequestHead
from onceward.guard.route_table import SAFE_METHODS, Guard, Match, guard_of, mark_guarded
from onceward.stores.errors import refusal_of
from onceward.stores.sessions.gate import end_visit

View = TypeVar("View", bound=Callable[..., Any])
GetPrincipal = Callable[[], Principal]

_HEAD: Final = "onceward.head"
_FILE_WRAPPER: Final = "wsgi.file_wrapper"
_GUARDED_METHODS: Final = ("dispatch_request", "post", "put", "patch", "delete")


class _View(NamedTuple):
    """The guard of a view, and its options."""

    guarded: Callable[..., Any]
    name: str
    guard: Guard
    principal: GetPrincipal | None


class _App:
    """State of a ``FlaskGuard`` for one app."""

    __slots__ = ("batch", "bridge", "checked", "first_routes", "guarded_endpoints")

    def __init__(self, bridge: Bridge | None, batch: BatchOptions | None) -> None:
        # What serves it; None if the guard has no Onceward for it.
        self.bridge = bridge
        # Items are signed in by the app, each in its own request.
        self.batch = None if bridge is None or batch is None else SyncBatch(bridge, batch)
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
        self._batch = batch_options(batch)
        self._default = None if onceward is None else Bridge(onceward, principal)
        self._apps: WeakKeyDictionary[flask.Flask, _App] = WeakKeyDictionary()
        self._names = EndpointNames()
        # By guarded function.
        self._views: dict[Callable[..., Any], _View] = {}
        if app is not None:
            self.init_app(app)

    def init_app(self, app: flask.Flask, onceward: Onceward | None = None) -> None:
        """Turn Onceward's errors into responses in all views of an app.

        ``onceward`` is used for this app, in place of the one given to ``FlaskGuard``.
        """
        if onceward is not None:
            self._apps[app] = _App(Bridge(onceward, self._principal), self._batch)
        installed = self._app(app)
        app.register_error_handler(RequestError, self._respond)
        app.register_error_handler(StoreUnavailableError, self._respond)
        app.after_request(_with_ids)
        # Before other hooks.
        app.before_request_funcs.setdefault(None, []).insert(0, self._before_request)
        if installed.bridge is not None and installed.bridge.gate is not None:
            app.teardown_request(lambda _error: end_visit())
        # Where ``onceward worker --app`` finds it.
        app.extensions["onceward"] = installed.bridge or self
        if installed.batch is not None:
            app.wsgi_app = self._with_batch(app, installed.batch)  # type: ignore[method-assign]

    def _with_batch(self, app: flask.Flask, batch: SyncBatch) -> Any:
        """Return a WSGI app that serves batches, and everything else by the app."""
        wsgi_app = app.wsgi_app

        def serve(environ: dict[str, Any], start_response: Any) -> Any:
            if not batch.is_for(environ):
                return wsgi_app(environ, start_response)
            find = partial(self._find, app, environ)
            return batch.serve_wsgi(environ, start_response, wsgi_app, find)

        return serve

    def _find(
        self, app: flask.Flask, environ: dict[str, Any], method: str, path: str
    ) -> Match | None:
        """Return the match of a request; None if it is not certain that a guard serves it."""
        routes = app.url_map.bind_to_environ(environ, server_name=app.config["SERVER_NAME"])
        try:
            rule, params = routes.match(path, method=method, return_rule=True)
        except (HTTPException, RoutingException):
            return None
        view = app.view_functions.get(rule.endpoint)
        for one in _inside(view, ("dispatch_request", method.lower())):
            if one in self._views:
                found = self._views[one]
                guard = self._bridge(self._app(app)).guard_for(found.guard, found.name)
                return Match(guard.endpoint or f"{method} {rule.rule}", guard.policy, dict(params))
        return None

    @property
    def onceward(self) -> Onceward:
        """The Onceward of the current app. Raises ``ConfigurationError`` if it has none."""
        return self._bridge().onceward

    def _app(self, app: flask.Flask) -> _App:
        return self._apps.get(app) or self._apps.setdefault(app, _App(self._default, self._batch))

    def _bridge(self, app: _App | None = None) -> Bridge:
        """Return the bridge of an app, by default the current one."""
        if app is None and flask.has_app_context():
            app = self._app(_flask_app())
        found = self._default if app is None else app.bridge
        if found is None:
            own = [one.bridge for one in self._apps.values() if one.bridge is not None]
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

        def decorate(view: Any) -> Any:
            if isinstance(view, type):
                name = f"{view.__module__}.{view.__qualname__}"
                setattr(view, "dispatch_request", guard_function(_dispatch_of(view, name), name))  # noqa: B010
                return view
            refuse_generator(view)
            return guard_function(view, name_of_view(view))

        def guard_function(view: Any, name: str) -> Any:
            # Flask's ``ensure_sync`` inspects a function at each call.
            is_async = iscoroutinefunction(view)

            @wraps(view)
            def guarded(*args: Any, **kwargs: Any) -> Any:
                function = current_app.ensure_sync(view) if is_async else view
                return self._serve(registered, partial(function, *args, **kwargs))

            given = Guard(policy or NO_POLICY, endpoint)
            if self._default is not None:  # refuses a rate limit without a limiter
                self._default.guard_for(given, name)
            if endpoint is not None:
                self._names.add(endpoint, name)
            mark_guarded(guarded, given)
            registered = _View(guarded, name, given, principal)
            self._views[guarded] = registered
            return guarded

        return decorate

    @property
    def execution(self) -> SyncExecution:
        """The guarded request being served: caller, ids, audit fields."""
        return self._bridge().execution

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
        for bridge in {self._default, *(app.bridge for app in self._apps.values())}:
            if bridge is not None:
                bridge.close()

    # -- one request --------------------------------------------------------------------------

    def _before_request(self) -> None:
        """Check the routes. Wait, before other hooks take a connection, until the view may, too."""
        flask_app, current = _flask_app(), _request()
        app = self._app(flask_app)
        if app.checked != len(self._views):
            self._check_routes(flask_app, app)
        endpoint = current.endpoint
        if endpoint is None or current.method in SAFE_METHODS:
            return
        _expect_whole_body(current)
        gate = None if app.bridge is None else app.bridge.gate
        if gate is None:
            return
        is_guarded = app.guarded_endpoints.get(endpoint)
        if is_guarded is None:
            view = flask_app.view_functions.get(endpoint)
            is_guarded = any(guard_of(one) is not None for one in _inside(view))
            app.guarded_endpoints[endpoint] = is_guarded
        gate.enter(endpoint, is_guarded=is_guarded)

    def _serve(self, view: _View, run: Callable[[], Any]) -> Any:
        flask_app, current = _flask_app(), _request()
        app = self._app(flask_app)
        bridge = self._bridge(app)
        guard = bridge.guard_for(view.guard, view.name)
        rule = current.url_rule
        if current.method in SAFE_METHODS:
            if rule is not None and SAFE_METHODS.issuperset(rule.methods or ()):
                raise ConfigurationError(
                    f"{rule.rule} is guarded, but a {current.method} must not write: guard POST, "
                    "PUT, PATCH or DELETE"
                )
            return run()
        if bridge.is_serving:  # called by a guarded view, whose guard counts
            return run()
        if app.checked != len(self._views):
            self._check_routes(flask_app, app)
        policy = guard.policy

        def handle() -> tuple[Response, Any]:
            own = _response_of(flask_app, current, run)
            return _complete(own, view.name, policy.max_response_bytes), own

        path = rule.rule if rule is not None else current.path
        params = {name: str(value) for name, value in (current.view_args or {}).items()}
        if guard.endpoint is not None and rule is not None:
            params = with_route(params, _later_route(flask_app, app, rule, view.guarded))
        principal = view.principal or bridge.principal
        if principal is None and not bridge.onceward.runtime.callers.has_identify:
            _check_caller(flask_app, bridge, view.name)
            principal = login_principal
        head, body = _head_and_body(current, policy.max_body_bytes)
        current.environ[_HEAD] = head
        prefix = current.environ.get("SCRIPT_NAME", "")
        served = bridge.serve(
            head,
            Match(guard.endpoint or f"{current.method} {path}", policy, params),
            body,
            handle,
            principal=principal,
            added_headers=() if app.batch is None else (app.batch.options.header(prefix),),
        )
        return _flask_response(served)

    def _check_routes(self, flask_app: flask.Flask, app: _App) -> None:
        """Raise ``ConfigurationError`` for a guard that guards nothing, or has no caller."""
        views = flask_app.view_functions.values()
        served = {id(one) for view in views for one in _inside(view)}
        for guarded in self._views.values():
            if id(guarded.guarded) in served:
                if guarded.principal is None:
                    _check_caller(flask_app, self._bridge(app), guarded.name)
            # Only what certainly is unguarded: a view may be in another app, or below a decorator
            # that hides it.
            elif any(id(one) in served for one in _unwrapped(guarded.guarded)):
                raise ConfigurationError(
                    f"{guarded.name} is guarded above its route decorator, so its route is "
                    "not guarded: put @guard(…) below @app.post(…)"
                )
        app.checked = len(self._views)

    def _respond(self, error: Exception) -> Any:
        """Respond with a Onceward error that a view raised."""
        bridge = self._bridge()
        if not isinstance(error, RequestError | StoreUnavailableError) or bridge.is_serving:
            raise error  # in a guarded view, the guard rolls back and renders it
        head = head_of(request.environ, request.method, request.path)
        return _flask_response(bridge.refuse(error, head))


def login_principal() -> Principal:
    """Return Flask-Login's user: its id is tenant and actor. Raises if the user is anonymous."""
    from flask_login import current_user  # noqa: PLC0415 - an optional dependency

    if not current_user.is_authenticated:
        raise NotAuthenticatedError("sign in first")
    user_id = current_user.get_id()
    if user_id is None:  # str(None) would be one tenant for all such users
        raise ConfigurationError("the user of Flask-Login has no id: give FlaskGuard principal=…")
    return Principal(tenant=str(user_id), actor=str(user_id))


def _check_caller(app: flask.Flask, bridge: Bridge, view: str) -> None:
    """Raise ``ConfigurationError`` if nothing says who calls a view without a principal."""
    has_identify = bridge.onceward.runtime.callers.has_identify
    if not (bridge.principal is not None or has_identify or hasattr(app, "login_manager")):
        raise no_caller(
            f"{view} is guarded",
            "FlaskGuard(onceward, app, principal=…) with a function that returns "
            "Principal(tenant=…, actor=…), or set up Flask-Login",
            "Onceward(…, tenants=SINGLE_TENANT)",
        )


# The objects behind Flask's proxies, which cost a look-up per attribute.


def _flask_app() -> flask.Flask:
    app: flask.Flask = current_app._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001
    return app


def _request() -> flask.Request:
    found: flask.Request = request._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001
    return found


# -- views and routes ------------------------------------------------------------------------------


def _dispatch_of(view: type, name: str) -> Callable[..., Any]:
    """Return the function that calls the methods of a class, inside all of its ``decorators``."""
    inherited: Any = getattr(view, "dispatch_request", None)
    if inherited is None:
        raise ConfigurationError(
            f"{name} is guarded, but is no view: guard a function, or a class that derives from "
            "Flask's MethodView or View"
        )

    def dispatch_request(instance: Any, **kwargs: Any) -> Any:
        return current_app.ensure_sync(inherited)(instance, **kwargs)

    return dispatch_request


def _inside(view: Any, methods: tuple[str, ...] = _GUARDED_METHODS) -> Iterator[Any]:
    """Yield a view function, methods of its class, and what all of them wrap."""
    owner = getattr(view, "view_class", None)
    for one in (view, *(getattr(owner, name, None) for name in methods)):
        yield from _unwrapped(one)


def _unwrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _later_route(
    flask_app: flask.Flask, app: _App, rule: Any, guarded: Callable[..., Any]
) -> str | None:
    """Return the route of the request, or None if it is the first that leads to its view.

    The first one is None so that a route added to a view changes nothing for those before it.
    """
    key = (rule.endpoint, id(guarded))
    if key not in app.first_routes:
        views = flask_app.view_functions
        own = views.get(rule.endpoint)
        app.first_routes[key] = next(
            _text(other)
            for other in flask_app.url_map.iter_rules()
            if (view := views.get(other.endpoint)) is own
            or any(one is guarded for one in _inside(view))
        )
    route = _text(rule)
    return None if route == app.first_routes[key] else route


def _text(rule: Any) -> str:
    return f"{rule.host or rule.subdomain or ''}{rule.rule}"


# -- requests and responses ------------------------------------------------------------------------


def _response_of(
    app: flask.Flask, current: flask.Request, run: Callable[[], Any]
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
                refused = refusal_of(unhandled)
                if refused is None:
                    raise
                result = app.handle_user_exception(refused)
            if isinstance(result, HTTPException):
                result = result.get_response(current.environ)
        return app.make_response(result)
    finally:
        if wrapper is not None:  # servers look at it after the response, too
            current.environ[_FILE_WRAPPER] = wrapper


def _complete(response: flask.Response, view: str, max_bytes: int) -> Response:
    """Return a complete response. Reads the content of a file, whose length is known."""
    if response.is_streamed or response.direct_passthrough:
        check_file(response.content_length, max_bytes, view, response.close)
        response.direct_passthrough = False
        file: Any = response.response
        response.make_sequence()
        if hasattr(file, "close"):
            file.close()
    headers = encoded_headers(response.headers.items())
    return Response(response.status_code, headers, response.get_data())


def _flask_response(served: Served) -> flask.Response:
    if served.own is not None:
        own: flask.Response = served.add_to_own()
        return own
    return current_app.response_class(served.body, served.status, served.text_headers)


def _with_ids(response: flask.Response) -> flask.Response:
    """Add the ids of a guarded request to its response, which may be Flask's own 500."""
    head = request.environ.get(_HEAD)
    for name, value in () if head is None else id_headers(head):
        response.headers.setdefault(name.decode(), value.decode("latin-1"))
    return response


def _expect_whole_body(current: flask.Request) -> None:
    """Let Werkzeug raise ``ClientDisconnected`` for a body that breaks off, in hooks, too.

    It trusts servers that end the input, and some of them end it where the connection broke.
    """
    if current.content_length is not None:
        current.environ.pop("wsgi.input_terminated", None)
    elif "HTTP_TRANSFER_ENCODING" in current.environ:
        source = current.environ["wsgi.input"]
        if not isinstance(source, ChunkedInput):
            current.environ["wsgi.input"] = ChunkedInput(source)
        if current.max_content_length is None:
            current.max_content_length = sys.maxsize


def _head_and_body(
    current: flask.Request, limit: int
) -> tuple[RequestHead, bytes | Callable[[], bytes]]:
    """Return the head of the request, and its body."""
    head = head_of(current.environ, current.method, current.path)
    try:
        check_end(current.environ)
    except LengthRequiredError as error:
        return head, refused_body(error)
    length = current.content_length
    if length is not None and length > limit:
        return head, b""  # refused by its length
    if "form" in vars(current) and (current.form or current.files):
        # A hook has read the form, e.g. to check a CSRF token: the bytes are gone.
        files = current.files.items(multi=True)
        contents = ((field, file.filename or "", file.stream) for field, file in files)
        return parsed_form(head, current.form.items(multi=True), contents)
    _expect_whole_body(current)
    own_limit = current.max_content_length
    is_own = own_limit is not None and own_limit <= limit
    if length is None:
        # Werkzeug cuts such a body off at the limit, without an error. So one byte more is read, by
        # which it is seen to be too long.
        current.max_content_length = (own_limit if own_limit is not None and is_own else limit) + 1
    try:
        body = current.get_data(cache=True)
        if own_limit is not None and len(body) > own_limit:
            raise RequestEntityTooLarge  # noqa: TRY301 - as Werkzeug does for a body with a length
    except RequestEntityTooLarge:
        if length is not None or is_own:
            raise  # the app's own limit, and its own response
        return with_header(head, b"content-length", str(limit + 1).encode()), b""
    except ClientDisconnected as error:
        return head, refused_body(broken_off(error))
    if length and not body:
        raise ConfigurationError(
            f"the body of {current.method} {current.path} was read before its guard: read "
            "request.get_data() in hooks, which keeps it, not request.stream"
        )
    return head, body
