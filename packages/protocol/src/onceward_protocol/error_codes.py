"""Error codes: the table of status, codes and title by kind, and the code of a response."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

__all__ = ["CODES", "ERROR_HEADER", "Code", "ErrorFormat", "error_code"]

ERROR_HEADER: Final = "Onceward-Error"
"""Carries the code of the guard's own errors, whatever the format of the body."""


class ErrorFormat(StrEnum):
    """The JSON format of error bodies: RFC 9457 problem details, or an envelope with a code."""

    # ``{"error": CODE, "message": …}``.
    ENVELOPE = "envelope"
    # RFC 9457 problem details, the default.
    PROBLEM = "problem"


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

    def name(self, error_format: object) -> str:
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
    "transaction_conflict": Code(503, "TRANSACTION_CONFLICT", "transaction.conflict", "Another transaction came first"),  # noqa: E501
    "version_mismatch":  Code(409, "VERSION_MISMATCH", "concurrency.version_mismatch", "Version differs"),  # noqa: E501
    "version_required":  Code(428, "VERSION_REQUIRED", "concurrency.version_required", "Version required"),  # noqa: E501
    "rate_limited":      Code(429, "RATE_LIMITED", "rate.limited", "Too many requests"),
    "body_invalid":      Code(400, "BAD_REQUEST", "request.invalid", "Request cannot be read"),
    "bad_request":       Code(400, "BAD_REQUEST", "request.invalid", "Request cannot be read"),
    "field_not_allowed": Code(422, "BAD_REQUEST", "request.invalid", "Value not allowed"),
    "body_too_large":    Code(413, "BODY_TOO_LARGE", "request.too_large", "Request body too large"),
    "length_required":   Code(411, "LENGTH_REQUIRED", "request.length_required", "Content-Length required"),  # noqa: E501
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


def error_code(header: str | None, body: bytes) -> str | None:
    """Return the code of a 4xx or 5xx response; None if it has none.

    ``header`` is the value of ``ERROR_HEADER``. In a JSON body the code is ``code``, ``error`` or
    ``error.code``, the first of them that is a string.
    """
    if header is not None and header.strip():
        return header.strip()
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return _code_in(value)


def _code_in(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    nested = error.get("code") if isinstance(error, dict) else None
    return next((it for it in (value.get("code"), error, nested) if isinstance(it, str)), None)
