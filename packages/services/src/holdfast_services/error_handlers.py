"""Every error in the right dialect: bad bodies, unknown paths, and what nobody foresaw."""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from holdfast import ErrorFormat
from holdfast.core.error_formats import render_error
from holdfast.core.idempotency_record import Response as StoredResponse
from holdfast.errors import BodyInvalidError, FieldNotAllowedError, RequestError, ServiceError
from holdfast.server.request_head import RequestHead
from holdfast.server.starlette import error_format_of
from holdfast_services.registry import service_for_path

__all__ = ["ErrorMiddleware", "install_error_handlers"]

_log = logging.getLogger("holdfast.request")

# What pydantic calls a value of the right type that is not allowed. All else is malformed.
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
_INTERNAL: Final = 500


def install_error_handlers(app: FastAPI) -> None:
    """Replace FastAPI's own error answers."""
    app.add_exception_handler(RequestValidationError, _refuse_invalid)
    app.add_exception_handler(HTTPException, _refuse_http)


class ErrorMiddleware:
    """The outermost layer: names the dialect, logs the request, answers what nobody caught."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        """Wrap everything, the guard included."""
        self._app = app

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service = service_for_path(scope["path"])
        scope["holdfast.error_format"] = service.error_format if service else ErrorFormat.PROBLEM
        if not scope["path"].isprintable():
            # The framework's routes overlook a newline at the end; nothing here has one.
            scope["path"] = "/%"
        started = time.perf_counter()
        status = 0

        async def note_status(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except Exception:
            head = _head(scope)
            _log.exception("unhandled", extra={"path": scope["path"], **_facts(head)})
            if status:  # begun already: all that is left is to cut it off
                raise
            await _send_internal(scope, head, note_status)
        if _log.isEnabledFor(logging.INFO):
            facts = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "milliseconds": round((time.perf_counter() - started) * 1000, 3),
            }
            _log.info("request", extra=facts | _facts(_head(scope)))


async def _refuse_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for nothing else
    found = error.errors()
    if any(tuple(e["loc"]) == ("body",) for e in found) and not _says_json(request):
        return _answer(
            BodyInvalidError("the body must be JSON: send it with Content-Type: application/json"),
            request,
        )
    fields = [{"field": _name(e["loc"]), "reason": _reason(e)} for e in found[:_MAX_FIELDS]]
    kind = (
        FieldNotAllowedError if all(e["type"] in _NOT_ALLOWED for e in found) else BodyInvalidError
    )
    first = fields[0]
    message = f"{first['field']}: {first['reason']}"
    return _answer(kind(message, details={"fields": fields}), request)


async def _refuse_http(request: Request, error: Exception) -> Response:
    """Tell the framework's own refusals: unknown path, wrong method, a body it cannot read."""
    assert isinstance(error, HTTPException)  # noqa: S101
    told: RequestError | str
    match error.status_code:
        case 400:
            told = BodyInvalidError(str(error.detail))
        case 404:
            told = "not_found"
        case 405:
            told = "method_not_allowed"
        case status:
            told = ServiceError(status, "request.refused", str(error.detail))
    response = _answer(told, request)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    if told == "method_not_allowed":
        response.headers["allow"] = ", ".join(_methods_at(request))
    return response


def _methods_at(request: Request) -> list[str]:
    """Return what the path can be asked with (RFC 9110 §15.5.6).

    The framework names the methods of the first route that has the path, and each of ours has one.
    """
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is Match.PARTIAL:
            found |= route.methods
    return sorted(found)


def _answer(error: RequestError | str, request: Request) -> Response:
    return _response(
        render_error(error, error_format_of(request), _request_id(_head(request.scope)))
    )


def _response(reply: StoredResponse) -> Response:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reply.headers}
    return Response(reply.body, reply.status, headers)


async def _send_internal(
    scope: MutableMapping[str, Any],
    head: RequestHead | None,
    send: Callable[[Any], Awaitable[None]],
) -> None:
    """Say that it was us, and under which id to look for it; nothing of what happened."""
    reply = render_error("internal", scope["holdfast.error_format"], _request_id(head))
    headers = [*reply.headers, (b"content-length", str(len(reply.body)).encode())]
    if head is not None:
        headers.append((b"x-request-id", head.request_id.encode("latin-1")))
        headers.append((b"x-correlation-id", head.correlation_id.encode("latin-1")))
    await send({"type": "http.response.start", "status": _INTERNAL, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


def _head(scope: MutableMapping[str, Any]) -> RequestHead | None:
    return scope.get("holdfast.head")


def _request_id(head: RequestHead | None) -> str:
    return "" if head is None else head.request_id


def _facts(head: RequestHead | None) -> dict[str, str | bool]:
    return {} if head is None else head.facts()


def _says_json(request: Request) -> bool:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def _name(loc: Sequence[int | str]) -> str:
    """Write ``("body", "interests", 2)`` as ``interests[2]``."""
    parts = loc[1:] if loc and loc[0] in ("body", "path", "query", "header") else loc
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return (name.removeprefix(".") or "body")[:_MAX_NAME_CHARS]


def _reason(error: Any) -> str:
    """Say what is wrong, never what was sent: answers end up in logs."""
    if error["type"] in _REASONS:
        return _REASONS[error["type"]]
    message: str = error["msg"].removeprefix("Value error, ")
    subject, should, rest = message.partition(" should ")
    return f"should {rest}" if should and subject in _SUBJECTS else message
