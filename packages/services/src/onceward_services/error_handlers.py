"""Error responses in the format of each service: invalid bodies, unknown paths, internal errors."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from onceward import ErrorFormat
from onceward.batch.options import ItemReport
from onceward.errors import (
    BodyInvalidError,
    FieldNotAllowedError,
    RequestError,
    ServiceError,
    StoreUnavailableError,
)
from onceward.frameworks.starlette import error_format_of
from onceward.guard.error_formats import ErrorFormatter, render_error
from onceward.guard.execution import Exchange, exchange_of
from onceward.guard.request import client_times
from onceward.records import Response as StoredResponse
from onceward_services.registry import service_for_path

__all__ = ["ErrorMiddleware", "install_error_handlers", "log_item"]

_log = logging.getLogger("onceward.request")

# Pydantic's error types for a value of the right type that is not allowed (422). Every other type
# of error means a malformed body (400).
_NOT_ALLOWED: Final = frozenset(
    {
        "assertion_error",
        "enum",
        "finite_number",
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "literal_error",
        "multiple_of",
        "string_pattern_mismatch",
        "string_too_long",
        "string_too_short",
        "too_long",
        "too_short",
        "value_error",
    }
)
_REASONS: Final = {
    "missing": "is missing",
    "extra_forbidden": "is not a field of this request",
    "model_type": "should be a JSON object",
    "model_attributes_type": "should be a JSON object",
}
_SUBJECTS: Final = frozenset({"Input", "List", "String", "Value"})
_MAX_FIELDS: Final = 20
_MAX_NAME_CHARS: Final = 100
# The request may have been committing: what it did is known when it is sent again.
_SHUTTING_DOWN: Final = StoreUnavailableError(
    "the server is shutting down; send it again", is_for_callers=True, reason="outcome_unknown"
)


def install_error_handlers(app: FastAPI) -> None:
    """Replace FastAPI's handlers of validation and HTTP errors."""
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_error)


class ErrorMiddleware:
    """The outermost middleware: logs each request and turns unhandled exceptions into a 500.

    A request that the server cuts off at shutdown gets a 503.

    Sets ``scope["onceward.error_format"]`` to the format of the service that has the path.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        problem_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM,
    ) -> None:
        self._app = app
        self._problem_format = problem_format

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Handle one ASGI connection; other types than HTTP are passed on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service = service_for_path(scope["path"])
        is_envelope = service is not None and service.error_format is ErrorFormat.ENVELOPE
        scope["onceward.error_format"] = (
            ErrorFormat.ENVELOPE if is_envelope else self._problem_format
        )
        if not scope["path"].isprintable():
            # Starlette's routes ignore a trailing newline. No path here contains one.
            scope["path"] = "/%"
        started = time.perf_counter()
        status = 0

        async def send_and_note_status(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        except asyncio.CancelledError:
            # The server shuts down. Without a response, it would send a 500 of its own.
            if status:
                raise
            exchange = exchange_of(scope)
            _log.warning("cut off", extra={"path": scope["path"], **_log_fields(exchange)})
            await _send_error(_SHUTTING_DOWN, scope, exchange, send_and_note_status)
        except Exception:
            exchange = exchange_of(scope)
            _log.exception("unhandled", extra={"path": scope["path"], **_log_fields(exchange)})
            if status:  # the response has begun, so the connection can only be closed
                raise
            await _send_error("internal", scope, exchange, send_and_note_status)
        if _log.isEnabledFor(logging.INFO):
            seconds = time.perf_counter() - started
            log_item(
                ItemReport(exchange_of(scope), scope["method"], scope["path"], status, seconds)
            )


def log_item(report: ItemReport) -> None:
    """Log a request, also one that came in a batch and did not pass the middleware."""
    if not _log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "method": report.method,
        "path": report.path,
        "status": report.status,
        "milliseconds": round(report.seconds * 1000, 3),
    }
    service = service_for_path(report.path)
    if service is not None and service.has_client_times:
        fields |= _client_times(report.exchange)
    _log.info("request", extra=fields | _log_fields(report.exchange))


async def _handle_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for nothing else
    found = error.errors()
    if any(tuple(e["loc"]) == ("body",) for e in found) and not _has_json_content_type(request):
        return _error_response(
            BodyInvalidError("the body must be JSON: send it with Content-Type: application/json"),
            request,
        )
    fields = [{"field": _name(e["loc"]), "reason": _reason(e)} for e in found[:_MAX_FIELDS]]
    kind = (
        FieldNotAllowedError if all(e["type"] in _NOT_ALLOWED for e in found) else BodyInvalidError
    )
    first = fields[0]
    message = f"{first['field']}: {first['reason']}"
    return _error_response(kind(message, details={"fields": fields}), request)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    """Render the framework's own errors: unknown path, wrong method, unreadable body."""
    assert isinstance(error, HTTPException)  # noqa: S101
    found: RequestError | str
    match error.status_code:
        case 400:
            found = BodyInvalidError(str(error.detail))
        case 404:
            found = "not_found"
        case 405:
            found = "method_not_allowed"
        case status:
            found = ServiceError(status, "request.refused", str(error.detail))
    response = _error_response(found, request)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    if found == "method_not_allowed":
        response.headers["allow"] = ", ".join(_allowed_methods(request))
    return response


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of a path, for the Allow header (RFC 9110 §15.5.6).

    Starlette lists only the methods of the first matching route, and each route here has one.
    """
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is Match.PARTIAL:
            found |= route.methods
    return sorted(found)


def _error_response(error: RequestError | str, request: Request) -> Response:
    return _response(
        render_error(error, error_format_of(request), _request_id(exchange_of(request.scope)))
    )


def _response(reply: StoredResponse) -> Response:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reply.headers}
    return Response(reply.body, reply.status, headers)


async def _send_error(
    error: StoreUnavailableError | str,
    scope: MutableMapping[str, Any],
    exchange: Exchange | None,
    send: Callable[[Any], Awaitable[None]],
) -> None:
    """Send an error that names the request id and reveals nothing about the cause."""
    reply = render_error(error, scope["onceward.error_format"], _request_id(exchange))
    headers = [*reply.headers, (b"content-length", str(len(reply.body)).encode())]
    if exchange is not None:
        head = exchange.head
        headers.append((b"x-request-id", head.request_id.encode("latin-1")))
        headers.append((b"x-correlation-id", head.correlation_id.encode("latin-1")))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


def _request_id(exchange: Exchange | None) -> str:
    return "" if exchange is None else exchange.head.request_id


def _log_fields(exchange: Exchange | None) -> dict[str, str | bool]:
    return {} if exchange is None else exchange.facts()


def _client_times(exchange: Exchange | None) -> dict[str, str]:
    """Return when the person acted and when this attempt was sent, by the device's clock."""
    if exchange is None or exchange.request is None:
        return {}
    times = client_times(exchange.request)
    names = {"client_generated_at": "clientGeneratedAt", "client_submitted_at": "clientSubmittedAt"}
    return {field: times[name] for field, name in names.items() if name in times}


def _has_json_content_type(request: Request) -> bool:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def _name(loc: Sequence[int | str]) -> str:
    """Write ``("body", "interests", 2)`` as ``interests[2]``."""
    parts = loc[1:] if loc and loc[0] in ("body", "path", "query", "header") else loc
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return (name.removeprefix(".") or "body")[:_MAX_NAME_CHARS]


def _reason(error: Any) -> str:
    """Describe the error without the value that was sent: responses end up in logs."""
    if error["type"] in _REASONS:
        return _REASONS[error["type"]]
    message: str = error["msg"].removeprefix("Value error, ")
    subject, should, rest = message.partition(" should ")
    return f"should {rest}" if should and subject in _SUBJECTS else message
