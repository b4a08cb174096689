"""Error codes and how errors become responses, in the envelope and in the problem format."""

from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import msgspec

from holdfast.core.idempotency_record import Response
from holdfast.core.policy import ErrorFormat
from holdfast.errors import RequestError, ServiceError, StoreUnavailableError

__all__ = ["CODES", "Code", "render_error"]


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of error: its status, its code in each format, and its title."""

    status: int
    envelope: str
    problem: str
    title: str

    def name(self, error_format: ErrorFormat) -> str:
        """Return the code in this format."""
        return self.envelope if error_format is ErrorFormat.ENVELOPE else self.problem


# fmt: off
# One row per kind of error; the rows may be longer than the line limit.
CODES: Final[dict[str, Code]] = {
    "key_required":      Code(400, "IDEMPOTENCY_KEY_REQUIRED", "idempotency.key_required", "Idempotency key required"),  # noqa: E501
    "key_invalid":       Code(400, "IDEMPOTENCY_KEY_INVALID", "idempotency.key_invalid", "Idempotency key invalid"),  # noqa: E501
    "payload_mismatch":  Code(409, "IDEMPOTENCY_CONFLICT", "idempotency.payload_mismatch", "Key was used for another request"),  # noqa: E501
    "in_progress":       Code(409, "IDEMPOTENCY_IN_PROGRESS", "idempotency.in_progress", "First request still running"),  # noqa: E501
    "store_unavailable": Code(503, "STORE_UNAVAILABLE", "idempotency.store_unavailable", "Store unavailable"),  # noqa: E501
    "version_mismatch":  Code(409, "VERSION_MISMATCH", "concurrency.version_mismatch", "Version differs"),  # noqa: E501
    "version_required":  Code(428, "VERSION_REQUIRED", "concurrency.version_required", "Version required"),  # noqa: E501
    "rate_limited":      Code(429, "RATE_LIMITED", "rate.limited", "Too many requests"),
    "body_invalid":      Code(400, "BAD_REQUEST", "request.invalid", "Request cannot be read"),
    "bad_request":       Code(400, "BAD_REQUEST", "request.invalid", "Request cannot be read"),
    "field_not_allowed": Code(422, "BAD_REQUEST", "request.invalid", "Value not allowed"),
    "body_too_large":    Code(413, "BODY_TOO_LARGE", "request.too_large", "Request body too large"),
    "not_authenticated": Code(401, "UNAUTHENTICATED", "auth.required", "Sign-in required"),
    "forbidden":         Code(403, "FORBIDDEN", "auth.forbidden", "Not allowed"),
    "not_found":         Code(404, "NOT_FOUND", "resource.not_found", "Not found"),
    "method_not_allowed": Code(405, "METHOD_NOT_ALLOWED", "request.method_not_allowed", "Method not allowed"),  # noqa: E501
    "stale_action":      Code(422, "STALE_ACTION", "action.stale", "Action is stale"),
    "internal":          Code(500, "INTERNAL", "server.internal", "Internal error"),
}
# fmt: on

_IETF_STATUS: Final = {"payload_mismatch": 422}
_PROBLEM_TYPE: Final = "urn:holdfast:problem:"
_STORE_DOWN: Final = "the store is unavailable; try again shortly"
_encode = msgspec.json.Encoder().encode


def render_error(
    error: RequestError | StoreUnavailableError | str,
    error_format: ErrorFormat,
    request_id: str,
    *,
    ietf_statuses: bool = False,
) -> Response:
    """Render an error, or a kind from ``CODES`` without details, as a response."""
    message, details = "", dict[str, Any]()
    retry_after: float | None = None
    if isinstance(error, ServiceError):
        code = Code(error.status, error.code, error.code, error.message)
        kind = "service"
    else:
        kind = _kind_of(error)
        code = CODES[kind]
    if isinstance(error, RequestError):
        message, details, retry_after = error.message, error.details, error.retry_after_seconds
    elif isinstance(error, StoreUnavailableError):
        message = str(error) if error.is_for_callers else _STORE_DOWN
        retry_after = error.retry_after_seconds
    status = _IETF_STATUS.get(kind, code.status) if ietf_statuses else code.status
    name = code.name(error_format)
    message = message or code.title
    if error_format is ErrorFormat.ENVELOPE:
        content_type = b"application/json"
        body: dict[str, Any] = {
            "error": name,
            "message": message,
            "details": details,
            "requestId": request_id,
        }
    else:
        content_type = b"application/problem+json"
        body = {
            "type": _PROBLEM_TYPE + name,
            "title": code.title,
            "status": status,
            "detail": message,
            "code": name,
            "details": details,
            "requestId": request_id,
        }
    headers = [(b"content-type", content_type)]
    if retry_after is not None:
        # Whole seconds, rounded up: a client that retries too early is refused again.
        headers.append((b"retry-after", str(max(1, ceil(retry_after))).encode()))
    if status == 401:  # noqa: PLR2004 - required by RFC 9110 §11.6.1
        headers.append((b"www-authenticate", b"Bearer"))
    return Response(status, tuple(headers), _encode(body))


def _kind_of(error: RequestError | StoreUnavailableError | str) -> str:
    if isinstance(error, str):
        return error
    return error.kind if isinstance(error, RequestError) else "store_unavailable"
