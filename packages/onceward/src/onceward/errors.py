"""All errors of Onceward, grouped by cause.

::

    OncewardError
    ├── RequestError                   the caller's request; becomes an HTTP response
    │   ├── KeyRequiredError               400
    │   ├── KeyInvalidError                400
    │   ├── BodyInvalidError               400
    │   ├── BodyTimeoutError               408
    │   ├── BodyTooLargeError              413
    │   │   └── JobPayloadTooLargeError
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
    │   ├── RecordUnreadableError          500  the record of this key is damaged
    │   └── ServiceError                   code and status of the app's choice
    ├── StoreError                     the database
    │   ├── StoreUnavailableError          503
    │   ├── SupersededError                another request committed a record for this key first
    │   └── CommitUnknownError             the connection died during COMMIT
    ├── JobError                       a job
    │   ├── NonRetryableError              dead-letter the job now
    │   ├── RetryLaterError                retry the job, not before the given time
    │   └── LeaseLostError                 another worker may have the job; nothing may commit
    ├── OutboxError                    the queue of a device
    │   ├── EntryInvalidError
    │   ├── EntryNotFoundError
    │   ├── TransitionError                not allowed in the entry's status
    │   ├── OutcomeUnknownError            the entry may have been executed by the server
    │   ├── ClaimLostError                 the lease of the claim expired
    │   ├── QueueFullError
    │   ├── UnsentEntriesError             a user with unsent entries cannot be purged
    │   └── OutboxFileError                the file cannot be used; it was not changed
    │       ├── WrongPassphraseError
    │       ├── NewerFileError
    │       ├── FileDamagedError
    │       ├── FileReadOnlyError
    │       ├── DiskFullError
    │       └── FileBusyError
    └── UsageError                     the app's code or settings; raised at start-up or first use
        ├── ConfigurationError
        │   └── MissingExtraError          also an ImportError: a package of an extra is missing
        ├── PrincipalInvalidError          also a ValueError: a caller without tenant or actor
        ├── StreamingResponseError
        ├── UnstoredWritesError            a handler has written and sent what is not stored
        ├── AbortedTransactionError        a handler has ignored the error of a statement
        ├── ResponseTooLargeError
        └── NoTransactionError

The ``kind`` of a ``RequestError`` selects its status and code in ``core/error_formats.py``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "AbortedTransactionError",
    "BatchSkippedError",
    "BatchTooLargeError",
    "BodyInvalidError",
    "BodyTimeoutError",
    "BodyTooLargeError",
    "ClaimLostError",
    "CommitUnknownError",
    "ConfigurationError",
    "DiskFullError",
    "EntryInvalidError",
    "EntryNotFoundError",
    "FeatureDisabledError",
    "FieldNotAllowedError",
    "FileBusyError",
    "FileDamagedError",
    "FileReadOnlyError",
    "ForbiddenError",
    "InProgressError",
    "JobError",
    "JobPayloadTooLargeError",
    "KeyInvalidError",
    "KeyRequiredError",
    "LeaseLostError",
    "MissingExtraError",
    "NewerFileError",
    "NoTransactionError",
    "NonRetryableError",
    "NotAuthenticatedError",
    "NotFoundError",
    "OncewardError",
    "OutboxError",
    "OutboxFileError",
    "OutcomeUnknownError",
    "OverloadedError",
    "PayloadMismatchError",
    "PrincipalInvalidError",
    "QueueFullError",
    "QuotaExceededError",
    "RateLimitedError",
    "RecordUnreadableError",
    "RequestError",
    "ResponseTooLargeError",
    "RetryLaterError",
    "SequenceInvalidError",
    "SequenceViolationError",
    "ServiceError",
    "StaleActionError",
    "StoreError",
    "StoreUnavailableError",
    "StreamingResponseError",
    "SupersededError",
    "TransitionError",
    "UnsentEntriesError",
    "UnstoredWritesError",
    "UsageError",
    "VersionMismatchError",
    "VersionRequiredError",
    "WrongPassphraseError",
]


class OncewardError(Exception):
    """Base class of all errors of Onceward."""


class RequestError(OncewardError):
    """The request is refused; nothing was written. Becomes an HTTP response."""

    # The row of ``core.error_formats.CODES``: status and codes of the response.
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


class JobPayloadTooLargeError(BodyTooLargeError):
    """The payload of a job is larger than allowed."""


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


class RecordUnreadableError(RequestError):
    """The record of this key is damaged. Only requests with this key are refused.

    ``reason`` may quote the row, so it goes to the log only.
    """

    kind = "record_unreadable"

    def __init__(self, message: str, *, reason: str, record_id: tuple[str, str, str]) -> None:
        super().__init__(message)
        # What could not be read.
        self.reason = reason
        # Tenant, endpoint and key.
        self.record_id = record_id


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


class StoreError(OncewardError):
    """The store failed."""


class StoreUnavailableError(StoreError):
    """The store is down, or its circuit breaker is open. Nothing was committed.

    The message may name hosts, files and statements, so it goes to the log only; with
    ``is_for_callers`` it also goes into the response. ``reason`` is sent as ``details.reason``.
    ``is_outage`` is False if the database has responded, with an error of one statement.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_seconds: float = 1.0,
        is_for_callers: bool = False,
        is_outage: bool = True,
        reason: str = "unreachable",
    ) -> None:
        super().__init__(message)
        # ``breaker_open``, ``unreachable``, ``outcome_unknown``, ``record_changed``,
        # ``not_replicated`` or ``commits_waiting``.
        self.reason = reason
        # Sent as ``Retry-After``.
        self.retry_after_seconds = retry_after_seconds
        # Whether the message may be sent to callers; otherwise it is only logged.
        self.is_for_callers = is_for_callers
        # Whether it counts as a failure of the store for the circuit breaker.
        self.is_outage = is_outage


class SupersededError(StoreError):
    """Another request committed a record for the same key; this transaction must not commit."""


class CommitUnknownError(StoreError):
    """The connection died during COMMIT: check whether it was committed before responding.

    With ``is_cut`` the connection was closed because COMMIT took too long. The server still works
    on it, so that a look-up now would only wait again.
    """

    def __init__(self, message: str, *, is_cut: bool = False) -> None:
        super().__init__(message)
        # Whether the connection was closed because COMMIT took too long.
        self.is_cut = is_cut


class JobError(OncewardError):
    """Base class of errors raised in or around the handler of a job."""


class NonRetryableError(JobError):
    """Raised by a handler when no retry can succeed: the job is dead-lettered now."""


class RetryLaterError(JobError):
    """Raised by a handler to retry the job, not before ``after_seconds``. Counts as an attempt."""

    def __init__(self, message: str, *, after_seconds: float = 0.0) -> None:
        super().__init__(message)
        # The next attempt is not earlier.
        self.after_seconds = after_seconds


class LeaseLostError(JobError):
    """The lease expired or another worker has it: this attempt must not commit."""


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


class EntryNotFoundError(OutboxError):
    """The entry does not exist, or was pruned."""


class TransitionError(OutboxError):
    """The entry's status does not allow this; see the table in ``core/outbox_entry.py``."""

    # The rule that was violated, for programs.
    rule = "status_transition_must_be_valid"


class OutcomeUnknownError(OutboxError):
    """The entry was sent without a conclusive response: changing it could execute it twice."""


class ClaimLostError(OutboxError):
    """The lease of the claim expired and the entry was released to other processes."""


class QueueFullError(OutboxError):
    """The user's queue has reached its maximum number of entries."""


class UnsentEntriesError(OutboxError):
    """The user has ``unsent`` entries that are not final."""

    def __init__(self, message: str, *, unsent: int) -> None:
        super().__init__(message)
        # How many entries were not sent.
        self.unsent = unsent


class OutboxFileError(OutboxError):
    """The outbox's file cannot be used. It was not changed."""


class WrongPassphraseError(OutboxFileError):
    """The passphrase is wrong or missing, or was given for an unencrypted file."""


class NewerFileError(OutboxFileError):
    """The file was written by a newer version of Onceward."""


class FileDamagedError(OutboxFileError):
    """The file is not a database, or part of it cannot be read."""


class FileReadOnlyError(OutboxFileError):
    """The file or its directory is not writable."""


class DiskFullError(OutboxFileError):
    """The disk is full. The write was rolled back."""


class FileBusyError(OutboxFileError):
    """Another connection kept the file locked for too long."""


class UsageError(OncewardError):
    """The app uses Onceward incorrectly."""


class ConfigurationError(UsageError):
    """A setting, a policy or a guard is invalid."""


class MissingExtraError(ConfigurationError, ImportError):
    """A package of an extra is not installed; the message has the ``pip install`` command."""


class PrincipalInvalidError(UsageError, ValueError):
    """A caller without a tenant or an actor, or one that is not text."""


class StreamingResponseError(UsageError):
    """A guarded handler streams its response, which cannot be stored for a replay."""


class UnstoredWritesError(UsageError):
    """A handler has written, and its response below 400 is not stored: a retry would write again.

    Everything was rolled back.
    """


class AbortedTransactionError(UsageError):
    """A statement failed, the handler ignored it, and the database rolled everything back.

    A statement whose error a handler ignores belongs into a savepoint.
    """


class ResponseTooLargeError(UsageError):
    """The response of a guarded handler is larger than a record may be."""


class NoTransactionError(UsageError):
    """There is no guarded request here, so there is no transaction."""
