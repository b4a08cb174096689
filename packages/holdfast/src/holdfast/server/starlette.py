"""Starlette and FastAPI: install the guard, find its routes, hand handlers what they write in."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount

from holdfast.core.error_formats import render_error
from holdfast.core.policy import ErrorFormat
from holdfast.errors import (
    NoTransactionError,
    RequestError,
    StoreUnavailableError,
    StreamingResponseError,
)
from holdfast.ports import Transaction
from holdfast.server.asgi import SCOPE_KEY, log_outage
from holdfast.server.execution import Execution
from holdfast.server.guarded_request import Principal
from holdfast.server.route_table import SAFE_METHODS, GuardedRoute, OpenRoute, guard_of

if TYPE_CHECKING:
    from holdfast.server.app import Holdfast
    from holdfast.server.request_head import RequestHead

__all__ = ["install", "the_execution", "the_principal", "the_transaction"]


# Dependencies are coroutines although they wait for nothing: FastAPI sends plain functions through
# a thread pool, which costs as much as the rest of the guard together.


async def the_execution(request: Request) -> Execution:
    """Return the execution of the guarded request being served."""
    return _execution(request)


async def the_transaction(request: Request) -> Any:
    """Return the transaction the handler must write in."""
    return _execution(request).transaction


async def the_principal(request: Request) -> Principal:
    """Return who is calling the guarded operation."""
    return _execution(request).call.principal


def _execution(request: Request) -> Execution:
    execution = request.scope.get(SCOPE_KEY)
    if not isinstance(execution, Execution):
        raise NoTransactionError(
            f"{request.method} {request.url.path} asks for Holdfast's transaction but is not "
            "guarded: put @holdfast.guard() below its route decorator"
        )
    return execution


def install(holdfast: "Holdfast", app: Any) -> None:
    """Put the guard into a Starlette or FastAPI app."""
    app.add_middleware(_guarding, holdfast=holdfast)
    app.add_exception_handler(RequestError, _answer)
    app.add_exception_handler(StoreUnavailableError, _answer)
    holdfast.read_routes_with(lambda: list(_routes(app.routes, "")))
    if hasattr(app, "openapi"):
        from holdfast.server.openapi import document  # noqa: PLC0415 - FastAPI only

        document(holdfast, app)


def _guarding(app: Any, holdfast: "Holdfast") -> Any:
    """Add the guard with the lifespan, in the shape ``add_middleware`` wants."""
    return holdfast.wrap(app)


async def _answer(request: Request, error: Exception) -> Response:
    """Answer with a Holdfast error that a handler raised."""
    if not isinstance(error, RequestError | StoreUnavailableError):
        raise error
    head: RequestHead | None = request.scope.get("holdfast.head")
    execution = request.scope.get(SCOPE_KEY)
    if isinstance(error, StoreUnavailableError):
        log_outage(error, head)
    request_id = head.request_id if head else ""
    if isinstance(execution, Execution):
        policy = execution.call.policy
        ietf = policy.ietf_statuses
        reply = render_error(error, policy.error_format, request_id, ietf_statuses=ietf)
    else:
        reply = render_error(error, dialect_of(request), request_id)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reply.headers}
    return Response(reply.body, reply.status, headers)


def dialect_of(request: Request) -> ErrorFormat:
    """Return the dialect of a route that is not guarded; an app may set it on its state."""
    chosen = request.scope.get("holdfast.error_format")
    return chosen if isinstance(chosen, ErrorFormat) else ErrorFormat.PROBLEM


def _routes(routes: Any, prefix: str) -> Iterator[GuardedRoute | OpenRoute]:
    for route in _contexts(routes):
        if isinstance(route, Mount):
            _teach_to_answer(route.app)
            yield from _routes(route.routes or (), prefix + route.path)
            continue
        guard = guard_of(getattr(route, "endpoint", None))
        methods = sorted(getattr(route, "methods", None) or ())
        if not methods:
            continue
        path = prefix + route.path
        if guard is not None:
            _refuse_streaming(path, getattr(route, "response_class", None))
        for method in methods:
            if guard is not None and (method not in SAFE_METHODS or method == "GET"):
                yield GuardedRoute(method, path, guard)
            elif guard is None and method not in SAFE_METHODS:
                yield OpenRoute(method, path)


def _teach_to_answer(app: Any) -> None:
    """Let a mounted app answer our errors itself: its own 500 would come before ours."""
    handlers = getattr(app, "exception_handlers", None)
    if isinstance(handlers, dict):
        handlers.setdefault(RequestError, _answer)
        handlers.setdefault(StoreUnavailableError, _answer)


def _contexts(routes: Any) -> Iterator[Any]:
    """Walk the routes, included routers too, which newer FastAPI keeps as branches of a tree."""
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
            f"{path} is guarded and streams ({chosen.__name__}): a guarded answer is stored with "
            "the transaction and must be complete. Use a plain response class."
        )


try:
    from fastapi import Depends
except ImportError:  # Starlette alone: handlers call the functions above
    pass
else:
    # For FastAPI handlers: ``async def create(order: Order, tx: Tx)``.
    Tx = Annotated[Transaction, Depends(the_transaction)]
    Caller = Annotated[Principal, Depends(the_principal)]
    Run = Annotated[Execution, Depends(the_execution)]
    __all__ += ["Caller", "Run", "Tx"]
