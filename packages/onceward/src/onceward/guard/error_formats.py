"""Error codes and how errors become responses: two built-in formats, or the app's own."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import iscoroutinefunction
from math import ceil
from typing import Any, Final
from urllib.parse import quote

import msgspec

from onceward.errors import (
    ConfigurationError,
    PayloadMismatchError,
    RequestError,
    ServiceError,
    StoreUnavailableError,
    TransactionConflictError,
)
from onceward.records import Response
from onceward_protocol.error_codes import CODES, ERROR_HEADER, Code, ErrorFormat

__all__ = [
    "CODES",
    "Code",
    "ErrorFormat",
    "ErrorFormatter",
    "ErrorInfo",
    "ProblemFormat",
    "check_error_format",
    "render_error",
    "status_of",
]

_log = logging.getLogger("onceward.request")


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
        page = self.help_for(info)
        return "application/problem+json", _encode(_problem(info, page))


_SERVICE: Final = "service"
INTERNAL: Final = "internal"
"""The kind of an error that says nothing to the client."""
_ERROR_HEADER: Final = ERROR_HEADER.lower().encode()
_IETF_STATUS: Final = {PayloadMismatchError.kind: 422}
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


def status_of(kind: str, *, ietf_statuses: bool) -> int:
    """Return the status of a kind of error, by default or in the draft of the IETF."""
    status = CODES[kind].status
    return _IETF_STATUS.get(kind, status) if ietf_statuses else status


def _info(
    error: RequestError | StoreUnavailableError | str,
    error_format: ErrorFormat | ErrorFormatter,
    request_id: str,
    *,
    ietf_statuses: bool,
) -> ErrorInfo:
    message, details = "", dict[str, Any]()
    retry_after: float | None = None
    least = 0 if isinstance(error, TransactionConflictError) else 1
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
        status=code.status if kind == _SERVICE else status_of(kind, ietf_statuses=ietf_statuses),
        title=code.title,
        message=message or code.title,
        details=details,
        request_id=request_id,
        # Whole seconds, rounded up: a client that retries too early is refused again.
        retry_after=None if retry_after is None else max(least, ceil(retry_after)),
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
    return error.kind
