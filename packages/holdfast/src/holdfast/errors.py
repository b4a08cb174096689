"""The whole tree of errors, split by whose fault it is. No behaviour, no imports from other rooms.

::

    HoldfastError
    ├── RequestError               the caller's: becomes an HTTP answer, changes nothing
    │   ├── KeyRequiredError           400
    │   ├── KeyInvalidError            400
    │   ├── BodyInvalidError           400
    │   ├── BodyTooLargeError          413
    │   │   └── JobPayloadTooLargeError
    │   ├── NotAuthenticatedError      401
    │   ├── ForbiddenError             403
    │   ├── NotFoundError              404
    │   ├── PayloadMismatchError       409  (422 in IETF mode)
    │   ├── InProgressError            409
    │   ├── VersionMismatchError       409
    │   ├── VersionRequiredError       428
    │   ├── FieldNotAllowedError       422
    │   ├── StaleActionError           422
    │   ├── RateLimitedError           429
    │   └── ServiceError               a service's own code and status
    ├── StoreError                 the store's
    │   ├── StoreUnavailableError      503: down, or its breaker is open
    │   ├── SupersededError            someone else's record for this key was committed first
    │   └── CommitUnknownError         the connection died during COMMIT
    ├── JobError                   a job's, raised in or around its handler
    │   ├── NonRetryableError          no attempt can succeed: to the dead letters at once
    │   ├── RetryLaterError            not now: try again, not before the given time
    │   └── LeaseLostError             the job may be another worker's by now: nothing may commit
    ├── OutboxError                the device's queue could not do what was asked
    │   ├── EntryInvalidError          refused at the door, with the name of the rule
    │   ├── EntryNotFoundError         no such entry
    │   ├── TransitionError            the entry's status does not allow this
    │   ├── OutcomeUnknownError        it may have happened on the server: not to be changed unasked
    │   ├── ClaimLostError             the lease ran out; the entry may be another process's by now
    │   ├── QueueFullError             the queue has as many entries as it may
    │   ├── UnsentEntriesError         a user cannot be purged while something is unsent
    │   └── OutboxFileError            the file cannot be used, and was left as it is
    │       ├── WrongPassphraseError
    │       ├── NewerFileError
    │       ├── FileDamagedError
    │       ├── FileReadOnlyError
    │       ├── DiskFullError
    │       └── FileBusyError
    └── UsageError                 the developer's: shown at start-up or on first use
        ├── ConfigurationError
        ├── StreamingResponseError
        ├── ResponseTooLargeError
        └── NoTransactionError

A ``RequestError`` has a ``kind``; which code and status that kind has in which dialect (envelope
or problem) is a table in ``core/dialects.py``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "BodyInvalidError",
    "BodyTooLargeError",
    "ClaimLostError",
    "CommitUnknownError",
    "ConfigurationError",
    "DiskFullError",
    "EntryInvalidError",
    "EntryNotFoundError",
    "FieldNotAllowedError",
    "FileBusyError",
    "FileDamagedError",
    "FileReadOnlyError",
    "ForbiddenError",
    "HoldfastError",
    "InProgressError",
    "JobError",
    "JobPayloadTooLargeError",
    "KeyInvalidError",
    "KeyRequiredError",
    "LeaseLostError",
    "NewerFileError",
    "NoTransactionError",
    "NonRetryableError",
    "NotAuthenticatedError",
    "NotFoundError",
    "OutboxError",
    "OutboxFileError",
    "OutcomeUnknownError",
    "PayloadMismatchError",
    "QueueFullError",
    "RateLimitedError",
    "RequestError",
    "ResponseTooLargeError",
    "RetryLaterError",
    "ServiceError",
    "StaleActionError",
    "StoreError",
    "StoreUnavailableError",
    "StreamingResponseError",
    "SupersededError",
    "TransitionError",
    "UnsentEntriesError",
    "UsageError",
    "VersionMismatchError",
    "VersionRequiredError",
    "WrongPassphraseError",
]


class HoldfastError(Exception):
    """Everything Holdfast raises on purpose."""


class RequestError(HoldfastError):
    """The request cannot be done as it stands. Becomes an answer; nothing was written."""

    kind: ClassVar[str] = "bad_request"

    def __init__(
        self,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        """Keep one line for a person, and details for a machine."""
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = dict(details or {})
        self.retry_after_seconds = retry_after_seconds


class KeyRequiredError(RequestError):
    """The endpoint needs an idempotency key and got none."""

    kind = "key_required"


class KeyInvalidError(RequestError):
    """The key is not in the endpoint's format, or two different keys were sent."""

    kind = "key_invalid"


class BodyInvalidError(RequestError):
    """The body cannot be read: not JSON, duplicate keys, bad UTF-8, too deep, not a number."""

    kind = "body_invalid"


class BodyTooLargeError(RequestError):
    """The body is larger than the endpoint takes."""

    kind = "body_too_large"


class JobPayloadTooLargeError(BodyTooLargeError):
    """What a job is to be given is more than the table of jobs takes."""


class NotAuthenticatedError(RequestError):
    """Nobody is signed in, or the token does not hold."""

    kind = "not_authenticated"


class ForbiddenError(RequestError):
    """Signed in, but without the role this takes."""

    kind = "forbidden"


class NotFoundError(RequestError):
    """There is no such thing, as far as this tenant can know."""

    kind = "not_found"


class PayloadMismatchError(RequestError):
    """The key was used for another request."""

    kind = "payload_mismatch"


class InProgressError(RequestError):
    """The first request with this key is still running and the wait is over."""

    kind = "in_progress"


class VersionMismatchError(RequestError):
    """The aggregate has moved on since the caller read it."""

    kind = "version_mismatch"


class VersionRequiredError(RequestError):
    """The write does not say which version it was made against."""

    kind = "version_required"


class FieldNotAllowedError(RequestError):
    """A field parses, but its value is not allowed."""

    kind = "field_not_allowed"


class StaleActionError(RequestError):
    """The action was made too long ago, or in the server's future."""

    kind = "stale_action"


class RateLimitedError(RequestError):
    """Too many requests."""

    kind = "rate_limited"


class ServiceError(RequestError):
    """A service's own answer: its code and status are given, not looked up."""

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
        """Take the status and the machine's code beside the usual."""
        super().__init__(message, details=details, retry_after_seconds=retry_after_seconds)
        self.status = status
        self.code = code


class StoreError(HoldfastError):
    """The store of records could not do its part."""


class StoreUnavailableError(StoreError):
    """The store is down, or its breaker is open. The handler has not run.

    Its message may name hosts, files and statements, so it is for the log. Callers are told that
    the store is away and no more, unless ``is_for_callers`` says that it is meant for them.
    """

    def __init__(
        self, message: str, *, retry_after_seconds: float = 1.0, is_for_callers: bool = False
    ) -> None:
        """Say when to come back."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.is_for_callers = is_for_callers


class SupersededError(StoreError):
    """A record of the same key was committed by someone else; this transaction must not be."""


class CommitUnknownError(StoreError):
    """The connection died during COMMIT: it may have happened. Look it up before answering."""


class JobError(HoldfastError):
    """A job, not a request, cannot go on as it is."""


class NonRetryableError(JobError):
    """Raised by a handler: no further attempt can succeed. The job is a dead letter at once."""


class RetryLaterError(JobError):
    """Raised by a handler: not now. Counts as an attempt; the time is a floor."""

    def __init__(self, message: str, *, after_seconds: float = 0.0) -> None:
        """Say when to come back at the earliest."""
        super().__init__(message)
        self.after_seconds = after_seconds


class LeaseLostError(JobError):
    """The lease ran out or another worker has it: what was done here must not commit."""


class OutboxError(HoldfastError):
    """The device's queue could not do what was asked of it. Nothing was changed."""


class EntryInvalidError(OutboxError):
    """What was to be queued breaks a rule. ``rule`` is its name; nothing was written."""

    def __init__(self, rule: str, message: str) -> None:
        """Keep the rule's name for a machine and one line for a person."""
        super().__init__(message)
        self.rule = rule
        self.message = message


class EntryNotFoundError(OutboxError):
    """There is no such entry in the queue: never was, or pruned."""


class TransitionError(OutboxError):
    """The entry's status does not allow this; ``core/entry.py`` has the table of what does."""

    rule = "status_transition_must_be_valid"


class OutcomeUnknownError(OutboxError):
    """The entry was sent and no answer settled it: to change it now could make it happen twice."""


class ClaimLostError(OutboxError):
    """The claim's lease ran out and the entry went back: what its holder says no longer counts."""


class QueueFullError(OutboxError):
    """The user's queue has as many entries as it may. Nothing was written."""


class UnsentEntriesError(OutboxError):
    """The user has entries that are not settled; ``unsent`` is how many."""

    def __init__(self, message: str, *, unsent: int) -> None:
        """Keep the number, for a question to the person."""
        super().__init__(message)
        self.unsent = unsent


class OutboxFileError(OutboxError):
    """The outbox's file cannot be used as it is, and was left as it is."""


class WrongPassphraseError(OutboxFileError):
    """The passphrase does not open the file, is missing, or was given for a plain file."""


class NewerFileError(OutboxFileError):
    """The file was written by a newer version."""


class FileDamagedError(OutboxFileError):
    """The file is not a database, or a part of it cannot be read."""


class FileReadOnlyError(OutboxFileError):
    """The file, or the directory it is in, cannot be written."""


class DiskFullError(OutboxFileError):
    """There is no room left. What was being written was undone."""


class FileBusyError(OutboxFileError):
    """Another connection kept the file locked for longer than the wait."""


class UsageError(HoldfastError):
    """The application uses Holdfast in a way that cannot be kept safe."""


class ConfigurationError(UsageError):
    """A setting, a policy or a guard does not hold together."""


class StreamingResponseError(UsageError):
    """A guarded handler streams: its answer cannot be stored, so it cannot be replayed."""


class ResponseTooLargeError(UsageError):
    """A guarded handler answers with more bytes than a record may keep."""


class NoTransactionError(UsageError):
    """A handler asks for the guard's transaction where there is none."""
