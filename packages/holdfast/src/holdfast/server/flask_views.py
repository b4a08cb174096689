"""Flask: ``@guard(…)`` decides around the view, after the app's own sign-in and hooks.

::

    guard = FlaskGuard(Holdfast("sqlite:///shop.db"), app)

    @app.post("/orders")
    @login_required
    @guard("orders.create")
    def create_order():
        guard.transaction.execute("INSERT …", {…})
        return {"ordered": True}, 201
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, Unpack

from holdfast.extras import needs_extra

with needs_extra("flask"):
    import flask
    from flask import current_app, request
    from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from holdfast.core.idempotency_record import Response
from holdfast.core.job import EnqueueOutcome
from holdfast.core.policy import Policy
from holdfast.errors import (
    ConfigurationError,
    NotAuthenticatedError,
    RequestError,
    StoreUnavailableError,
    StreamingResponseError,
)
from holdfast.jobs.enqueue import EnqueueOptions
from holdfast.server.app import Holdfast
from holdfast.server.guarded_request import Principal
from holdfast.server.request_head import anonymous
from holdfast.server.route_table import SAFE_METHODS, Guard, Match, mark_guarded
from holdfast.server.sync_bridge import Bridge, Served, SyncExecution, SyncRequest
from holdfast.server.view_guard import (
    EndpointNames,
    check_endpoint,
    check_rate_limit,
    name_of_view,
    render_unguarded,
)
from holdfast.server.wsgi import parsed_form, scope_of, with_content_type

__all__ = ["FlaskGuard", "login_principal"]

View = TypeVar("View", bound=Callable[..., Any])
GetPrincipal = Callable[[], Principal]


class FlaskGuard:
    """Guards views of a Flask app: functions, methods of a ``MethodView``, views of blueprints.

    ``principal`` returns the caller, from ``g``, the session or ``current_user``. Without it, the
    caller is what ``Holdfast(identify=…)`` finds, else the user of Flask-Login, if the app has it.
    """

    def __init__(
        self,
        holdfast: Holdfast,
        app: flask.Flask | None = None,
        *,
        principal: GetPrincipal | None = None,
    ) -> None:
        """Open nothing yet: the store is opened at the first guarded request of each process."""
        # The object that was given.
        self.holdfast = holdfast
        self._principal: GetPrincipal | None = principal or getattr(holdfast, "principal", None)
        self._bridge = Bridge(holdfast)
        self._names = EndpointNames()
        if app is not None:
            self.init_app(app)

    def init_app(self, app: flask.Flask) -> None:
        """Turn Holdfast's errors into responses in all views. Guards work without it."""
        app.register_error_handler(RequestError, self._respond)
        app.register_error_handler(StoreUnavailableError, self._respond)
        app.extensions["holdfast"] = self  # where ``holdfast worker --app`` finds it

    def __call__(
        self,
        endpoint: str | None = None,
        *,
        policy: Policy | None = None,
        principal: GetPrincipal | None = None,
    ) -> Callable[[View], View]:
        """Guard a view, for all methods except GET, HEAD, OPTIONS and TRACE.

        Goes below the route decorator, and below decorators that check the caller.
        """
        check_endpoint(endpoint)
        chosen = Guard(self.holdfast.policy_or_default(policy), endpoint)

        def decorate(view: View) -> View:
            name = name_of_view(view)
            check_rate_limit(self.holdfast.limiter, chosen.policy, name)
            if endpoint is not None:
                self._names.add(endpoint, name)

            @wraps(view)
            def guarded(*args: Any, **kwargs: Any) -> Any:
                return self._serve(chosen, principal or self._principal, view, args, kwargs)

            mark_guarded(guarded, chosen)
            return guarded  # type: ignore[return-value]

        return decorate

    @property
    def execution(self) -> SyncExecution:
        """The guarded request being served: caller, ids, audit fields."""
        return self._bridge.execution

    @property
    def transaction(self) -> Any:
        """The transaction the guarded view must write in. It commits with the response."""
        return self.execution.transaction

    def enqueue(
        self, job_type: str, payload: Any = None, **options: Unpack[EnqueueOptions]
    ) -> EnqueueOutcome:
        """Enqueue a job in the transaction. Takes the options of ``Holdfast.enqueue``."""
        return self.execution.enqueue(job_type, payload, **options)

    def close(self) -> None:
        """Close the store. Call it when the process ends."""
        self._bridge.close()

    # -- one request --------------------------------------------------------------------------

    def _serve(
        self,
        guard: Guard,
        principal: GetPrincipal | None,
        view: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        run = current_app.ensure_sync(view)
        rule = request.url_rule
        if request.method in SAFE_METHODS:
            if rule is not None and SAFE_METHODS.issuperset(rule.methods or ()):
                raise ConfigurationError(
                    f"{rule.rule} is guarded, but a {request.method} must not write: guard POST, "
                    "PUT, PATCH or DELETE"
                )
            return run(*args, **kwargs)
        if self._bridge.is_serving:  # called by a guarded view, whose guard counts
            return run(*args, **kwargs)
        own: list[flask.Response] = []

        def handle() -> Response:
            response = _response_of(run, args, kwargs)
            own.append(response)
            return _collected(response)

        path = rule.rule if rule is not None else request.path
        scope, body = _scope_and_body(guard.policy.max_body_bytes)
        served = self._bridge.serve(
            SyncRequest(
                scope=scope,
                match=Match(
                    guard.endpoint or f"{request.method} {path}",
                    guard.policy,
                    {name: str(value) for name, value in (request.view_args or {}).items()},
                ),
                body=body,
                handle=handle,
                principal=principal or self._default_principal(),
            )
        )
        return _flask_response(served, own[-1] if served.is_own else None)

    def _default_principal(self) -> GetPrincipal | None:
        has_login = hasattr(current_app, "login_manager")
        return login_principal if self.holdfast.identify is anonymous and has_login else None

    def _respond(self, error: Exception) -> Any:
        """Respond with a Holdfast error that a view raised."""
        if not isinstance(error, RequestError | StoreUnavailableError) or self._bridge.is_serving:
            raise error  # in a guarded view, the guard rolls back and renders it
        scope = scope_of(request.environ, request.method, request.path)
        rendered = render_unguarded(error, self.holdfast.error_format, scope)
        return _flask_response(
            Served(rendered.status, list(rendered.headers), rendered.body, is_own=False), None
        )


def login_principal() -> Principal:
    """Return Flask-Login's user: its id is tenant and actor. Raises if nobody is signed in."""
    from flask_login import current_user  # noqa: PLC0415 - an optional dependency

    if not current_user.is_authenticated:
        raise NotAuthenticatedError("sign in first")
    user_id = str(current_user.get_id())
    return Principal(tenant=user_id, actor=user_id)


def _response_of(
    view: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> flask.Response:
    """Run the view. An exception for which the app has a handler becomes its response."""
    try:
        result = view(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - raised again unless the app handles it
        result = current_app.handle_user_exception(error)
        if isinstance(result, HTTPException):
            result = result.get_response(request.environ)
    return current_app.make_response(result)


def _collected(response: flask.Response) -> Response:
    if response.is_streamed or response.direct_passthrough:
        raise StreamingResponseError(
            "a guarded view streams its response, which is stored with the transaction and must "
            "be complete: return a plain response"
        )
    headers = tuple(
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.headers.items()
    )
    return Response(response.status_code, headers, response.get_data())


def _flask_response(served: Served, own: flask.Response | None) -> flask.Response:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in served.headers]
    if own is not None:
        # The view's own object: it may have callbacks, and extensions look at its type.
        for name, value in headers:
            if name in ("x-request-id", "x-correlation-id"):
                own.headers[name] = value
        return own
    return current_app.response_class(served.body, served.status, headers)


def _scope_and_body(limit: int) -> tuple[dict[str, Any], bytes]:
    """Return the head of the request as an ASGI scope, and its body."""
    scope = scope_of(request.environ, request.method, request.path)
    length = request.content_length
    if length is not None and length > limit:
        return scope, b""  # refused by its length
    if "form" in vars(request) and (request.form or request.files):
        # A hook has read the form, e.g. to check a CSRF token: the bytes are gone.
        fields = request.form.items(multi=True)
        files = (
            (field, file.filename or "", file.stream)
            for field, file in request.files.items(multi=True)
        )
        return with_content_type(scope, b"application/x-www-form-urlencoded"), parsed_form(
            fields, files
        )
    own_limit = request.max_content_length
    if length is None and (own_limit is None or own_limit > limit):
        request.max_content_length = limit
    try:
        body = request.get_data(cache=True)
    except RequestEntityTooLarge:
        if request.max_content_length == own_limit:
            raise  # the app's own limit, and its own response
        too_long = (b"content-length", str(limit + 1).encode())
        return {**scope, "headers": [*scope["headers"], too_long]}, b""
    if length and not body:
        raise ConfigurationError(
            f"the body of {request.method} {request.path} was read before its guard: read "
            "request.get_data() in hooks, which keeps it, not request.stream"
        )
    return scope, body
