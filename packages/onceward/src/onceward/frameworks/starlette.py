"""Starlette and FastAPI: install the guard, list the guarded routes, provide dependencies."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from inspect import isawaitable
from typing import Annotated, Any, cast

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount

from onceward.batch.options import BatchOptions
from onceward.errors import (
    ConfigurationError,
    NoTransactionError,
    RequestError,
    StoreUnavailableError,
    StreamingResponseError,
)
from onceward.frameworks.asgi import ERROR_FORMAT_KEY, SCOPE_KEY, RequestIdMiddleware
from onceward.guard.error_formats import ErrorFormatter, render_error
from onceward.guard.execution import Exchange, Execution, PendingExecution, exchange_of
from onceward.guard.pipeline import log_outage, render
from onceward.guard.request import Principal
from onceward.guard.route_table import (
    SAFE_METHODS,
    Guard,
    GuardedRoute,
    GuardTable,
    OpenRoute,
    guard_of,
)
from onceward.ports import Transaction
from onceward_protocol.error_codes import ErrorFormat

__all__ = ["error_format_of", "install", "the_execution", "the_principal", "the_transaction"]


# Dependencies are coroutines although they await nothing: FastAPI runs plain functions in a thread
# pool, which costs as much as the rest of the guard together.


async def the_execution(request: Request) -> Execution:
    """Return the execution of the guarded request being served.

    Where the key is claimed after the dependencies, the handler gets it; a dependency gets an
    object that raises ``NoTransactionError`` until then.
    """
    execution = request.scope.get(SCOPE_KEY)
    if isinstance(execution, Execution):
        return execution
    exchange = exchange_of(request.scope)
    if exchange is not None and exchange.is_claimed_late:
        return cast("Execution", PendingExecution(exchange))
    raise NoTransactionError(
        f"{request.method} {request.url.path} uses Onceward's execution but is not guarded: put "
        "@onceward.guard() below its route decorator"
    )


async def the_transaction(request: Request) -> Any:
    """Return the transaction, or the app's session, to write in.

    In a guarded handler it commits with the record. In a route without a guard, plain SQL commits
    before a response below 400 is sent and rolls back otherwise; a session is the app's to commit.
    """
    execution = request.scope.get(SCOPE_KEY)
    if isinstance(execution, Execution):
        return execution.transaction
    exchange = _exchange(request)
    return await exchange.pipeline.transaction_of(exchange)


async def the_principal(request: Request) -> Principal:
    """Return the caller: what ``identify`` returned, in guarded and unguarded routes."""
    execution = request.scope.get(SCOPE_KEY)
    if isinstance(execution, Execution):
        return execution.request.principal
    exchange = _exchange(request)
    found = exchange.identify(exchange.head)
    return await found if isawaitable(found) else found


def _exchange(request: Request) -> Exchange:
    exchange = exchange_of(request.scope)
    if exchange is None:
        raise NoTransactionError(
            f"{request.method} {request.url.path} uses a dependency of Onceward, but did not pass "
            "through it: write onceward.install(app)"
        )
    return exchange


def install(
    app: Any,
    *,
    wrap: Callable[[Any], Any],
    table: Callable[[], GuardTable],
    optional_kinds: Iterable[str] = (),
    batch: BatchOptions | None = None,
    error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM,
) -> Callable[[], Sequence[GuardedRoute | OpenRoute]]:
    """Add the guard to a Starlette or FastAPI app; return a function that lists its routes.

    ``wrap`` puts the guard around an ASGI app; ``table`` returns the guarded routes;
    ``optional_kinds`` are the errors that this configuration adds to the OpenAPI document, and
    ``batch`` the batch endpoint, with errors in ``error_format``.
    """
    app.add_middleware(wrap)
    # Starlette sends the 500 of an unhandled error outside all middleware.
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: RequestIdMiddleware(build())
    app.add_exception_handler(RequestError, _respond)
    app.add_exception_handler(StoreUnavailableError, _respond)
    if hasattr(app, "openapi"):
        from onceward.frameworks.openapi import document  # noqa: PLC0415 - FastAPI only

        document(app, table, optional_kinds=optional_kinds, batch=batch, error_format=error_format)
    return lambda: list(_routes(app.routes, ""))


async def _respond(request: Request, error: Exception) -> Response:
    """Respond with a Onceward error that a handler raised."""
    if not isinstance(error, RequestError | StoreUnavailableError):
        raise error
    exchange = exchange_of(request.scope)
    if exchange is not None and exchange.outcome is error:
        return Response(status_code=500)  # never sent: the guard renders the error
    if isinstance(error, StoreUnavailableError):
        log_outage(error, exchange)
    # Before the claim, the app responds by itself: in its own format.
    is_unguarded = (
        exchange is None
        or exchange.match is None
        or (exchange.is_claimed_late and exchange.outcome is None)
    )
    if exchange is None or is_unguarded:
        request_id = "" if exchange is None else exchange.head.request_id
        rendered = render_error(error, error_format_of(request), request_id)
    else:
        rendered = render(error, exchange)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in rendered.headers}
    return Response(rendered.body, rendered.status, headers)


def error_format_of(request: Request) -> ErrorFormat | ErrorFormatter:
    """Return the format of the policy while a guarded request runs.

    Otherwise ``scope["onceward.error_format"]``, which an app may set, or that of its Onceward.
    """
    execution = request.scope.get(SCOPE_KEY)
    if isinstance(execution, Execution):
        return execution.request.policy.error_format
    exchange = exchange_of(request.scope)
    of_guard = ErrorFormat.PROBLEM if exchange is None else exchange.error_format
    chosen: ErrorFormat | ErrorFormatter = request.scope.get(ERROR_FORMAT_KEY, of_guard)
    return chosen


def _routes(routes: Any, prefix: str) -> Iterator[GuardedRoute | OpenRoute]:
    for route in _contexts(routes):
        if isinstance(route, Mount):
            _add_handlers(route.app)
            yield from _routes(route.routes or (), prefix + route.path)
            continue
        endpoint = getattr(route, "endpoint", None)
        if isinstance(endpoint, type) and issubclass(endpoint, HTTPEndpoint):
            yield from _routes_of_class(endpoint, prefix + route.path, route.methods)
            continue
        guard = guard_of(endpoint)
        methods = sorted(getattr(route, "methods", None) or ())
        path = prefix + (getattr(route, "path", None) or "")  # Host has none
        if guard is not None:
            _refuse_websocket(path, methods)
            _refuse_streaming(path, getattr(route, "response_class", None))
            if not hasattr(route, "response_class"):
                _refuse_late(path, guard)
        for method in methods:
            if guard is not None and (method not in SAFE_METHODS or method == "GET"):
                # Routes of mounted apps are called by these.
                yield GuardedRoute(method, path, guard, None if prefix else route)
            elif guard is None and method not in SAFE_METHODS:
                yield OpenRoute(method, path)


def _routes_of_class(
    endpoint: type[HTTPEndpoint], path: str, methods: Collection[str] | None
) -> Iterator[GuardedRoute | OpenRoute]:
    """Iterate over the methods of a class. The guard is on the class, or on some of its methods."""
    for method in methods or ("POST", "PUT", "PATCH", "DELETE", *SAFE_METHODS):
        handler = getattr(endpoint, method.lower(), None)
        guard = guard_of(handler)
        if guard is None and handler is not None and method not in SAFE_METHODS:
            guard = guard_of(endpoint)
        if guard is not None:
            _refuse_late(path, guard)
            yield GuardedRoute(method, path, guard)
        elif method not in SAFE_METHODS:
            yield OpenRoute(method, path)


def _refuse_websocket(path: str, methods: Sequence[str]) -> None:
    if not methods:
        raise ConfigurationError(
            f"{path} is guarded, but it is no HTTP route with methods: messages of a websocket "
            "have no idempotency key. Take the guard off"
        )


def _refuse_late(path: str, guard: Guard) -> None:
    if guard.is_claimed_late:
        raise ConfigurationError(
            f"{path} is guarded with a principal dependency, but it is a route of Starlette, "
            "which has no dependencies: give Onceward identify=…, or make it a route of FastAPI"
        )


def _add_handlers(app: Any) -> None:
    """Let a mounted app handle Onceward's errors: else it would turn them into a 500."""
    handlers = getattr(app, "exception_handlers", None)
    if isinstance(handlers, dict):
        handlers.setdefault(RequestError, _respond)
        handlers.setdefault(StoreUnavailableError, _respond)


def _contexts(routes: Any) -> Iterator[Any]:
    """Iterate over all routes; newer FastAPI keeps those of included routers as a tree."""
    try:
        from fastapi.routing import iter_route_contexts  # noqa: PLC0415
    except ImportError:
        yield from routes
    else:
        for context in iter_route_contexts(routes):
            original = getattr(context, "original_route", context)
            yield original if isinstance(original, Mount) else context


def _refuse_streaming(path: str, response_class: Any) -> None:
    chosen = getattr(response_class, "value", response_class)
    if isinstance(chosen, type) and issubclass(chosen, StreamingResponse):
        raise StreamingResponseError(
            f"{path} is guarded and streams ({chosen.__name__}): the response of a guarded "
            "operation is stored with the transaction and must be complete. Use a plain response "
            "class."
        )


try:
    from fastapi import Depends
except ImportError:  # Starlette alone: handlers call the functions above
    pass
else:
    # For FastAPI handlers: ``async def create(order: Order, tx: Tx)``.
    Tx = Annotated[Transaction, Depends(the_transaction)]
    # The caller of the request.
    Caller = Annotated[Principal, Depends(the_principal)]
    # The guarded request being served.
    Run = Annotated[Execution, Depends(the_execution)]
    __all__ += ["Caller", "Run", "Tx"]
