"""One run of a guarded handler: the transaction it writes in and what it sets for the commit."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Any, Final

from onceward.core.idempotency_record import AuditEvent, Record, Response
from onceward.errors import NoTransactionError, UsageError
from onceward.guard.cache_epoch import Epoch
from onceward.guard.request import GuardedRequest, NewId
from onceward.ports import Transaction, UnitOfWork

__all__ = [
    "Execution",
    "Replay",
    "Writes",
    "current_execution",
    "executing",
    "find_execution",
    "set_current_execution",
]

_FIRST_REDIRECT: Final = 300
_FIRST_ERROR: Final = 400
_FIRST_SERVER_ERROR: Final = 500

_current: ContextVar["Execution"] = ContextVar("onceward_execution")


def current_execution() -> "Execution":
    """Return the execution of the guarded request being served, in this task or its children."""
    try:
        return _current.get()
    except LookupError:
        raise NoTransactionError(
            "there is no guarded request here: put @onceward.guard() below the route decorator"
        ) from None


def find_execution() -> "Execution | None":
    """Return the execution of the guarded request being served, or None."""
    return _current.get(None)


def set_current_execution(execution: "Execution") -> "Token[Execution]":
    """Make an execution the current one of this task."""
    return _current.set(execution)


class executing:  # noqa: N801 - used like a function; a generator would cost four times as much
    """Make an execution the current one of this thread, for the duration of a sync handler."""

    __slots__ = ("_execution", "_token")

    def __init__(self, execution: "Execution") -> None:
        self._execution = execution

    def __enter__(self) -> None:
        self._token = _current.set(self._execution)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


class Writes(Enum):
    """What becomes of the writes of a handler, by its response."""

    # They commit with the response.
    KEPT = auto()
    # It was an error.
    UNDONE = auto()
    # The response is not stored, or a redirect: it depends on whether there are any.
    UNDECIDED = auto()


class Replay:
    """The stored response is to be sent; the handler did not run, or its work was rolled back."""

    __slots__ = ("record",)

    def __init__(self, record: Record) -> None:
        # That of the first request with the key.
        self.record = record


class Execution:
    """What a guarded handler gets: as ``scope["onceward"]`` or by the framework's dependency.

    A handler reads ``request``, writes in ``transaction`` and may call the methods below.
    ``Idempotency`` reads the other attributes when it commits or rolls back; handlers must not
    use them.
    """

    __slots__ = (
        "ended",
        "epoch",
        "is_last",
        "is_stored",
        "on_commit",
        "request",
        "resource",
        "ttl",
        "unit",
        "version",
        "writes_kept_on_error",
    )

    def __init__(
        self, request: GuardedRequest, unit: UnitOfWork, epoch: Epoch | None = None
    ) -> None:
        # The request: key, caller, endpoint, ids.
        self.request = request
        # The unit of work of the store.
        self.unit = unit
        # The epoch in which the key was claimed, for the caches.
        self.epoch = epoch
        # True once committed or rolled back.
        self.ended = False
        # Nothing of the app runs after its response.
        self.is_last = False
        # False after ``no_store``.
        self.is_stored = True
        # Set by ``store_for``.
        self.ttl: timedelta | None = None
        # True after ``keep_writes_on_error``.
        self.writes_kept_on_error = False
        # What the request was about, for the audit event.
        self.resource: str | None = None
        # The version that the request wrote, for the audit event.
        self.version: int | None = None
        # Called after the commit.
        self.on_commit: list[Callable[[], None]] = []

    @property
    def transaction(self) -> Any:
        """The transaction to write in. It commits with the record, or not at all."""
        return self.unit.transaction

    @property
    def statements(self) -> Transaction:
        """The same transaction as plain SQL, even where ``transaction`` is an app's session."""
        return self.unit.statements

    @property
    def database_epoch(self) -> str | None:
        """A text that changes when the database may have lost commits; None if it is unknown.

        It is the same in all processes. A restore or a failover changes it, and so may other
        maintenance: compare it, do not count it.
        """
        return None if self.epoch is None else self.epoch.value

    def describe(self, *, resource: str | None = None, version: int | None = None) -> None:
        """Name the changed resource and its version in the audit event."""
        self.resource, self.version = resource, version

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call this after the commit and before the response is sent; never after a replay.

        The callback must not raise and must not block.
        """
        self.on_commit.append(callback)

    def keep_writes_on_error(self) -> None:
        """Commit the handler's writes even if the response is a 4xx, e.g. a log of refusals.

        Without this, an error response rolls them back.
        """
        self.writes_kept_on_error = True

    def no_store(self) -> None:
        """Do not store this response: the key is free again, and a retry runs the handler.

        So the handler must not have written, or a retry would write again: below 400, writes make
        it a 500, unless ``keep_writes_on_error`` says that a retry may repeat them.
        """
        self.is_stored = False

    def store_for(self, ttl: timedelta) -> None:
        """Store this response for this long, in place of the TTL of the policy.

        It does not make a response stored that the policy does not store.
        """
        if ttl <= timedelta(0):
            raise UsageError(f"store_for({ttl!r}): the time must be positive")
        self.ttl = ttl

    # -- for the guard -----------------------------------------------------------------------

    def effect_of(self, response: Response) -> tuple[Writes, timedelta | None]:
        """Return what becomes of the handler's writes, and how long to store its response.

        None: it is not stored.
        """
        status = response.status
        ttl = self.request.policy.ttl_for(status)
        if ttl is not None:
            ttl = (self.ttl or ttl) if self.is_stored else None
        if status >= _FIRST_ERROR:
            is_kept = self.writes_kept_on_error and status < _FIRST_SERVER_ERROR
            return (Writes.KEPT if is_kept else Writes.UNDONE), ttl
        is_kept = ttl is not None and status < _FIRST_REDIRECT
        return (Writes.KEPT if is_kept else Writes.UNDECIDED), ttl

    def audit_event(
        self, response: Response, record: Record | None, now: datetime, new_id: NewId
    ) -> AuditEvent:
        """Return the audit event of a success."""
        request = self.request
        return AuditEvent(
            id=(None if record is None else record.audit_id) or new_id(now),
            tenant=request.principal.tenant,
            actor=request.principal.actor,
            endpoint=request.endpoint,
            payload_hash=request.fingerprint.body_hash,
            status=response.status,
            request_id=request.request_id,
            correlation_id=request.correlation_id,
            created_at=now,
            resource=self.resource,
            version=self.version,
        )
