"""Error codes and how errors become responses: two built-in formats, or the app's own."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from inspect import iscoroutinefunction
from math import ceil
from typing import Any, Final
from urllib.parse import quote

import msgspec

from onceward.core.error_code import ERROR_HEADER
from onceward.core.idempotency_record import Response
from onceward.errors import ConfigurationError, RequestError, ServiceError, StoreUnavailableError

__all__ = [
    "CODES",
    "Code",
    "ErrorFormat",
    "ErrorFormatter",
    "ErrorInfo",
    "ProblemFormat",
    "check_error_format",
    "render_error",
]

_log = logging.getLogger("onceward.request")


class ErrorFormat(StrEnum):
    """The JSON format of error bodies: RFC 9457 problem details, or an envelope with a code."""

    # ``{"error": CODE, "message": …}``.
    ENVELOPE = "envelope"
    # RFC 9457 problem details, the default.
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """One error, as an app's own formatter gets it."""

    # The row of ``CODES``, "service" for a ``ServiceError``.
    kind: str
    # The code in the problem format, or the app's own code of a ``ServiceError``.
    code: str
    # The HTTP status.
    status: int
    # One line about every error of this code.
    title: str
    # One line about this error.
    message: str
    # Members that a program may read, such as ``fields``.
    details: Mapping[str, Any]
    # The ``X-Request-ID`` of the request.
    request_id: str
    # Seconds, as in the Retry-After header of the response; None without one.
    retry_after: int | None


# Returns the body as a JSON object, or the content type and the body.
ErrorFormatter = Callable[[ErrorInfo], Mapping[str, Any] | tuple[str, bytes | str]]


@dataclass(frozen=True, slots=True)
class ProblemFormat:
    """RFC 9457 problem details whose ``type`` is the address of a page about the error.

    The response also has ``Link: <…>; rel="help"``. Errors of the app (``ServiceError``) have both
    only if ``help_url`` contains ``{code}``. Raises ConfigurationError for another address than
    http, https or a path.
    """

    # ``{code}`` is replaced by the code, e.g. ``https://example.com/errors#{code}``.
    help_url: str

    def __post_init__(self) -> None:
        if not _HELP_URL.fullmatch(self.help_url):
            raise ConfigurationError(
                "help_url must be an address such as https://example.com/errors#{code}, without "
                f"spaces and quotes, not {self.help_url!r}"
            )

    def help_for(self, info: ErrorInfo) -> str | None:
        """Return the address of the page about an error; None if there is none."""
        if info.kind == _SERVICE and "{code}" not in self.help_url:
            return None
        return self.help_url.replace("{code}", quote(info.code, safe=".-_"))

    def __call__(self, info: ErrorInfo) -> tuple[str, bytes]:
        """Return content type and body."""
        page = self.help_for(info)
        return "application/problem+json", _encode(_problem(info, page))


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of error: its status, its code in each format, and its title."""

    # The HTTP status.
    status: int
    # The code in the envelope format.
    envelope: str
    # The code in the problem format.
    problem: str
    # One line about every error of this kind.
    title: str

    def name(self, error_format: ErrorFormat | ErrorFormatter) -> str:
        """Return the code in this format; an app's own format gets the code of problems."""
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
    "batch_too_large":   Code(413, "BATCH_TOO_LARGE", "batch.too_large", "Batch too large"),
    "batch_skipped":     Code(424, "BATCH_SKIPPED", "batch.skipped", "Earlier item did not succeed"),  # noqa: E501
    "body_timeout":      Code(408, "BODY_TIMEOUT", "request.timeout", "Request body took too long"),
    "quota_exceeded":    Code(429, "QUOTA_EXCEEDED", "quota.exceeded", "Quota exceeded"),
    "overloaded":        Code(503, "OVERLOADED", "server.overloaded", "Server overloaded"),
    "not_authenticated": Code(401, "UNAUTHENTICATED", "auth.required", "Sign-in required"),
    "forbidden":         Code(403, "FORBIDDEN", "auth.forbidden", "Not allowed"),
    "feature_disabled":  Code(403, "FEATURE_DISABLED", "feature.disabled", "Switched off"),
    "not_found":         Code(404, "NOT_FOUND", "resource.not_found", "Not found"),
    "method_not_allowed": Code(405, "METHOD_NOT_ALLOWED", "request.method_not_allowed", "Method not allowed"),  # noqa: E501
    "stale_action":      Code(422, "STALE_ACTION", "action.stale", "Action is stale"),
    "sequence_violation": Code(422, "ORDERING_VIOLATION", "sequence.violation", "Not the next number of the client"),  # noqa: E501
    "record_unreadable": Code(500, "RECORD_UNREADABLE", "idempotency.record_unreadable", "Stored response cannot be read"),  # noqa: E501
    "internal":          Code(500, "INTERNAL", "server.internal", "Internal error"),
}
# fmt: on

_SERVICE: Final = "service"
_ERROR_HEADER: Final = ERROR_HEADER.lower().encode()
_IETF_STATUS: Final = {"payload_mismatch": 422}
_PROBLEM_TYPE: Final = "urn:onceward:problem:"
_STORE_DOWN: Final = "the store is unavailable; try again shortly"
_HELP_URL: Final = re.compile(r"(?:https?://[^\s<>\"]+|/[^\s<>\"]*)")
_encode = msgspec.json.Encoder().encode


def check_error_format(error_format: object) -> None:
    """Raise ``ConfigurationError`` unless this is a built-in format or a plain function."""
    if isinstance(error_format, ErrorFormat):
        return
    if not callable(error_format) or iscoroutinefunction(error_format):
        raise ConfigurationError(
            "error_format must be ErrorFormat.PROBLEM, ErrorFormat.ENVELOPE or a function without "
            f"await that takes an ErrorInfo, not {error_format!r}"
        )


def render_error(
    error: RequestError | StoreUnavailableError | str,
    error_format: ErrorFormat | ErrorFormatter,
    request_id: str,
    *,
    ietf_statuses: bool = False,
) -> Response:
    """Render an error, or a kind from ``CODES`` without details, as a response."""
    info = _info(error, error_format, request_id, ietf_statuses=ietf_statuses)
    content_type, body = _body(info, error_format)
    headers = [(b"content-type", content_type)]
    if info.kind != _SERVICE:
        # Clients find the code here in every error format: without it they would take
        # in_progress for a conflict, and might send the request again with a new key.
        headers.append((_ERROR_HEADER, info.code.encode()))
    if isinstance(error_format, ProblemFormat) and (page := error_format.help_for(info)):
        headers.append((b"link", f'<{page}>; rel="help"'.encode()))
    if info.retry_after is not None:
        headers.append((b"retry-after", str(info.retry_after).encode()))
    if info.status == 401:  # noqa: PLR2004 - required by RFC 9110 §11.6.1
        headers.append((b"www-authenticate", b"Bearer"))
    return Response(info.status, tuple(headers), body)


def _info(
    error: RequestError | StoreUnavailableError | str,
    error_format: ErrorFormat | ErrorFormatter,
    request_id: str,
    *,
    ietf_statuses: bool,
) -> ErrorInfo:
    message, details = "", dict[str, Any]()
    retry_after: float | None = None
    if isinstance(error, ServiceError):
        code = Code(error.status, error.code, error.code, error.message)
        kind = _SERVICE
    else:
        kind = _kind_of(error)
        code = CODES[kind]
    if isinstance(error, RequestError):
        message, details, retry_after = error.message, error.details, error.retry_after_seconds
    elif isinstance(error, StoreUnavailableError):
        message = str(error) if error.is_for_callers else _STORE_DOWN
        retry_after = error.retry_after_seconds
        details = {"reason": error.reason}
    return ErrorInfo(
        kind=kind,
        code=code.name(error_format),
        status=_IETF_STATUS.get(kind, code.status) if ietf_statuses else code.status,
        title=code.title,
        message=message or code.title,
        details=details,
        request_id=request_id,
        # Whole seconds, rounded up: a client that retries too early is refused again.
        retry_after=None if retry_after is None else max(1, ceil(retry_after)),
    )


def _body(info: ErrorInfo, error_format: ErrorFormat | ErrorFormatter) -> tuple[bytes, bytes]:
    """Return content type and body."""
    if not isinstance(error_format, ErrorFormat):
        try:
            return _formatted(error_format(info))
        except Exception:  # noqa: BLE001 - logged
            # The error itself must reach the client, whatever the app's formatter does.
            _log.exception(
                "error_format %r failed for %s; the problem format is sent instead",
                error_format,
                info.code,
            )
    if error_format is ErrorFormat.ENVELOPE:
        envelope = {
            "error": info.code,
            "message": info.message,
            "details": info.details,
            "requestId": info.request_id,
        }
        return b"application/json", _encode(envelope)
    return b"application/problem+json", _encode(_problem(info, None))


def _problem(info: ErrorInfo, page: str | None) -> dict[str, Any]:
    return {
        "type": page or _PROBLEM_TYPE + info.code,
        "title": info.title,
        "status": info.status,
        "detail": info.message,
        "code": info.code,
        "details": info.details,
        "requestId": info.request_id,
    }


def _formatted(result: Any) -> tuple[bytes, bytes]:
    """Return content type and body from what a formatter returned."""
    match result:
        case Mapping():
            return b"application/json", _encode(result)
        case (str() as content_type, bytes() as body):
            return content_type.encode("latin-1"), body
        case (str() as content_type, str() as text):
            return content_type.encode("latin-1"), text.encode()
        case _:
            raise ConfigurationError(
                "an error_format function must return a dict or (content type, body), "
                f"not {type(result).__name__}"
            )


def _kind_of(error: RequestError | StoreUnavailableError | str) -> str:
    if isinstance(error, str):
        return error
    return error.kind if isinstance(error, RequestError) else "store_unavailable"
