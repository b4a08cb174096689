"""All errors of the server, grouped by cause.

::

    OncewardError
    ├── RequestError                   the caller's request; the tree is in onceward_protocol.errors
    │   ├── BodyTooLargeError              413
    │   │   └── JobPayloadTooLargeError
    │   └── RecordUnreadableError          500  the record of this key is damaged
    ├── StoreError                     the database
    │   ├── StoreUnavailableError          503
    │   │   └── TransactionConflictError
    │   ├── SupersededError                another request committed a record for this key first
    │   └── CommitUnknownError             the connection died during COMMIT
    ├── JobError                       a job
    │   ├── NonRetryableError              dead-letter the job now
    │   ├── RetryLaterError                retry the job, not before the given time
    │   └── LeaseLostError                 another worker may have the job; nothing may commit
    └── UsageError                     the app's code or settings; raised at start-up or first use
        ├── ConfigurationError
        │   └── MissingExtraError          also an ImportError: a package of an extra is missing
        ├── PrincipalInvalidError          also a ValueError: a caller without tenant or actor
        ├── StreamingResponseError
        ├── UnstoredWritesError            a handler has written and sent what is not stored
        ├── AbortedTransactionError        a handler has ignored the error of a statement
        ├── ResponseTooLargeError
        └── NoTransactionError
"""

# ruff: noqa: F403, F405 - ``__all__`` names the errors of the protocol that the server has too
from onceward_protocol.errors import *

__all__ = [
    "AbortedTransactionError",
    "BatchSkippedError",
    "BatchTooLargeError",
    "BodyInvalidError",
    "BodyTimeoutError",
    "BodyTooLargeError",
    "CommitUnknownError",
    "ConfigurationError",
    "FeatureDisabledError",
    "FieldNotAllowedError",
    "ForbiddenError",
    "InProgressError",
    "JobError",
    "JobPayloadTooLargeError",
    "KeyInvalidError",
    "KeyRequiredError",
    "LeaseLostError",
    "LengthRequiredError",
    "MissingExtraError",
    "NoTransactionError",
    "NonRetryableError",
    "NotAuthenticatedError",
    "NotFoundError",
    "OncewardError",
    "OverloadedError",
    "PayloadMismatchError",
    "PrincipalInvalidError",
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
    "TransactionConflictError",
    "UnstoredWritesError",
    "UsageError",
    "VersionMismatchError",
    "VersionRequiredError",
]


class JobPayloadTooLargeError(BodyTooLargeError):
    """The payload of a job is larger than allowed."""


class RecordUnreadableError(RequestError, kind="record_unreadable"):
    """The record of this key is damaged. Only requests with this key are refused.

    ``reason`` may quote the row, so it goes to the log only.
    """

    def __init__(self, message: str, *, reason: str, record_id: tuple[str, str, str]) -> None:
        super().__init__(message)
        # What could not be read.
        self.reason = reason
        # Tenant, endpoint and key.
        self.record_id = record_id


class StoreError(OncewardError):
    """The store failed."""


class StoreUnavailableError(StoreError):
    """The store is down, or its circuit breaker is open. Nothing was committed.

    The message may name hosts, files and statements, so it goes to the log only; with
    ``is_for_callers`` it also goes into the response. ``reason`` is sent as ``details.reason``.
    ``is_outage`` is False if the database has responded, with an error of one statement.
    """

    # The row of ``error_codes.CODES``.
    kind = "store_unavailable"

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
        # ``not_replicated``, ``commits_waiting``, ``conflict`` or ``statement_failed``.
        self.reason = reason
        # Sent as ``Retry-After``.
        self.retry_after_seconds = retry_after_seconds
        # Whether the message may be sent to callers; otherwise it is only logged.
        self.is_for_callers = is_for_callers
        # Whether it counts as a failure of the store for the circuit breaker.
        self.is_outage = is_outage


class TransactionConflictError(StoreUnavailableError):
    """A deadlock, or a serialization failure: the transaction may be run again at once."""

    kind = "transaction_conflict"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_seconds=0, is_outage=False, reason="conflict")


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
