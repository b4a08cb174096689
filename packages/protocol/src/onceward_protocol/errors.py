"""Errors that both halves of the protocol raise.

::

    OncewardError
    ├── RequestError                   the caller's request; becomes an HTTP response
    │   ├── KeyRequiredError               400
    │   ├── KeyInvalidError                400
    │   ├── BodyInvalidError               400
    │   ├── BodyTimeoutError               408
    │   ├── BodyTooLargeError              413
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
from typing import Any, ClassVar

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


class KeyRequiredError(RequestError):
    """The operation requires an idempotency key and none was sent."""

    kind = "key_required"


class KeyInvalidError(RequestError):
    """The key does not have the required format, or two different keys were sent."""

    kind = "key_invalid"


class BodyInvalidError(RequestError):
    """The body cannot be read: malformed JSON, duplicate keys, invalid UTF-8, nested too deep."""

    kind = "body_invalid"


class BodyTimeoutError(RequestError):
    """The body was not complete within its deadline; nothing was done."""

    kind = "body_timeout"


class BodyTooLargeError(RequestError):
    """The body is larger than the operation allows."""

    kind = "body_too_large"


class BatchTooLargeError(RequestError):
    """The batch has too many items, or is too large."""

    kind = "batch_too_large"


class BatchSkippedError(RequestError):
    """The item was not run: an earlier one of its lane, or that it refers to, did not succeed."""

    kind = "batch_skipped"


class NotAuthenticatedError(RequestError):
    """The request has no token, or an invalid one."""

    kind = "not_authenticated"


class ForbiddenError(RequestError):
    """The caller lacks the required role."""

    kind = "forbidden"


class NotFoundError(RequestError):
    """The resource does not exist, or belongs to another tenant."""

    kind = "not_found"


class PayloadMismatchError(RequestError):
    """The key was used for a different request."""

    kind = "payload_mismatch"


class InProgressError(RequestError):
    """The first request with this key is still running after the wait."""

    kind = "in_progress"


class VersionMismatchError(RequestError):
    """The resource has changed since the caller read it."""

    kind = "version_mismatch"


class VersionRequiredError(RequestError):
    """The request does not name the version it is based on."""

    kind = "version_required"


class FieldNotAllowedError(RequestError):
    """A field has a value that is not allowed."""

    kind = "field_not_allowed"


class StaleActionError(RequestError):
    """The action is too old, or its time is in the server's future."""

    kind = "stale_action"


class SequenceInvalidError(RequestError):
    """A header of a strict sequence is missing or malformed."""

    kind = "bad_request"


class SequenceViolationError(RequestError):
    """The number of the request is not the next one of its client. Never stored."""

    kind = "sequence_violation"


class RateLimitedError(RequestError):
    """The rate limit was exceeded."""

    kind = "rate_limited"


class QuotaExceededError(RequestError):
    """The caller or its tenant has as many of something as it may have; ``details`` say of what."""

    kind = "quota_exceeded"


class OverloadedError(RequestError):
    """The server has no connection or memory left for this request; nothing was done."""

    kind = "overloaded"


class FeatureDisabledError(RequestError):
    """The endpoint is switched off by a setting. Never stored."""

    kind = "feature_disabled"


class ServiceError(RequestError):
    """An error of the app, with its own code and status."""

    kind = "service"

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
