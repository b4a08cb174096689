"""Errors that both halves of the protocol raise.

::

    OncewardError
    ├── RequestError                   the caller's request; becomes an HTTP response
    │   ├── KeyRequiredError               400
    │   ├── KeyInvalidError                400
    │   ├── BodyInvalidError               400
    │   ├── BodyTimeoutError               408
    │   ├── BodyTooLargeError              413
    │   ├── LengthRequiredError            411
    │   ├── BatchTooLargeError             413
    │   ├── BatchSkippedError              424  an earlier item of the batch did not succeed
    │   ├── NotAuthenticatedError          401
    │   ├── ForbiddenError                 403
    │   ├── NotFoundError                  404
    │   ├── PayloadMismatchError           409  (422 with the statuses of the IETF draft)
    │   ├── InProgressError                409
    │   ├── VersionMismatchError           409
    │   ├── VersionRequiredError           428
    │   ├── FieldNotAllowedError           422
    │   ├── StaleActionError               422
    │   ├── SequenceInvalidError           400  the headers of a strict sequence
    │   ├── SequenceViolationError         422  not the next number of the client
    │   ├── RateLimitedError               429
    │   ├── QuotaExceededError             429
    │   ├── OverloadedError                503
    │   ├── FeatureDisabledError           403  the endpoint is switched off
    │   └── ServiceError                   code and status of the app's choice
    ├── OutboxError                    the queue of a device
    │   └── EntryInvalidError
    └── UsageError                     the app's code or settings; raised at start-up or first use
        └── ConfigurationError
            └── MissingExtraError          also an ImportError: a package of an extra is missing

The server's own errors are in ``onceward.errors``, those of the device in
``onceward_outbox.errors``. The ``kind`` of a ``RequestError`` is its row in ``error_codes.CODES``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from onceward_protocol.effect import Effect

__all__ = [
    "BatchSkippedError",
    "BatchTooLargeError",
    "BodyInvalidError",
    "BodyTimeoutError",
    "BodyTooLargeError",
    "ConfigurationError",
    "EntryInvalidError",
    "FeatureDisabledError",
    "FieldNotAllowedError",
    "ForbiddenError",
    "InProgressError",
    "KeyInvalidError",
    "KeyRequiredError",
    "LengthRequiredError",
    "MissingExtraError",
    "NotAuthenticatedError",
    "NotFoundError",
    "OncewardError",
    "OutboxError",
    "OverloadedError",
    "PayloadMismatchError",
    "QuotaExceededError",
    "RateLimitedError",
    "RequestError",
    "SequenceInvalidError",
    "SequenceViolationError",
    "ServiceError",
    "StaleActionError",
    "UsageError",
    "VersionMismatchError",
    "VersionRequiredError",
]


class OncewardError(Exception):
    """Base class of all errors of Onceward."""


class RequestError(OncewardError):
    """The request is refused; nothing was written. Becomes an HTTP response."""

    # The row of ``error_codes.CODES``: status and codes of the response.
    kind: ClassVar[str] = "bad_request"

    def __init_subclass__(cls, *, kind: str | None = None) -> None:
        super().__init_subclass__()
        if kind is not None:
            cls.kind = kind

    def __init__(
        self,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        """``message`` is one line for people; ``details`` are members of the error body."""
        super().__init__(message)
        # One line for people.
        self.message = message
        # Members that a program may read.
        self.details: dict[str, Any] = dict(details or {})
        # Sent as ``Retry-After``.
        self.retry_after_seconds = retry_after_seconds
        # What is known of the key, if it was looked up before.
        self.effect: Effect | None = None


class KeyRequiredError(RequestError, kind="key_required"):
    """The operation requires an idempotency key and none was sent."""


class KeyInvalidError(RequestError, kind="key_invalid"):
    """The key does not have the required format, or two different keys were sent."""


class BodyInvalidError(RequestError, kind="body_invalid"):
    """The body cannot be read: malformed JSON, duplicate keys, invalid UTF-8, nested too deep."""


class BodyTimeoutError(RequestError, kind="body_timeout"):
    """The body was not complete within its deadline; nothing was done."""


class BodyTooLargeError(RequestError, kind="body_too_large"):
    """The body is larger than the operation allows."""


class LengthRequiredError(RequestError, kind="length_required"):
    """The server cannot pass on a body without ``Content-Length``."""


class BatchTooLargeError(RequestError, kind="batch_too_large"):
    """The batch has too many items, or is too large."""


class BatchSkippedError(RequestError, kind="batch_skipped"):
    """The item was not run: an earlier one of its lane, or that it refers to, did not succeed."""


class NotAuthenticatedError(RequestError, kind="not_authenticated"):
    """The request has no token, or an invalid one."""


class ForbiddenError(RequestError, kind="forbidden"):
    """The caller lacks the required role."""


class NotFoundError(RequestError, kind="not_found"):
    """The resource does not exist, or belongs to another tenant."""


class PayloadMismatchError(RequestError, kind="payload_mismatch"):
    """The key was used for a different request."""


class InProgressError(RequestError, kind="in_progress"):
    """The first request with this key is still running after the wait."""


class VersionMismatchError(RequestError, kind="version_mismatch"):
    """The resource has changed since the caller read it."""


class VersionRequiredError(RequestError, kind="version_required"):
    """The request does not name the version it is based on."""


class FieldNotAllowedError(RequestError, kind="field_not_allowed"):
    """A field has a value that is not allowed."""


class StaleActionError(RequestError, kind="stale_action"):
    """The action is too old, or its time is in the server's future."""


class SequenceInvalidError(RequestError):
    """A header of a strict sequence is missing or malformed."""


class SequenceViolationError(RequestError, kind="sequence_violation"):
    """The number of the request is not the next one of its client. Never stored."""


class RateLimitedError(RequestError, kind="rate_limited"):
    """The rate limit was exceeded."""


class QuotaExceededError(RequestError, kind="quota_exceeded"):
    """The caller or its tenant has as many of something as it may have; ``details`` say of what."""


class OverloadedError(RequestError, kind="overloaded"):
    """The server has no connection or memory left for this request; nothing was done."""


class FeatureDisabledError(RequestError, kind="feature_disabled"):
    """The endpoint is switched off by a setting. Never stored."""


class ServiceError(RequestError, kind="service"):
    """An error of the app, with its own code and status."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message, details=details, retry_after_seconds=retry_after_seconds)
        # The HTTP status, 400 to 599.
        self.status = status
        # The code of the response, the same in both formats.
        self.code = code


class OutboxError(OncewardError):
    """Base class of errors of the outbox. Nothing was changed."""


class EntryInvalidError(OutboxError):
    """The entry breaks a validation rule, named by ``rule``."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        # The rule that was violated, for programs.
        self.rule = rule
        # What is wrong, for people.
        self.message = message


class UsageError(OncewardError):
    """The app uses Onceward incorrectly."""


class ConfigurationError(UsageError):
    """A setting, a policy or a guard is invalid."""


class MissingExtraError(ConfigurationError, ImportError):
    """A package of an extra is not installed; the message has the ``pip install`` command."""
