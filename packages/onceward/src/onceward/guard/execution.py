"""One request while it is served: what is known of it, and the execution that its handler gets."""

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from contextvars import ContextVar, Token
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from onceward.errors import NoTransactionError, RequestError, StoreUnavailableError, UsageError
from onceward.guard.caches import Epoch
from onceward.guard.error_formats import ErrorFormatter
from onceward.guard.request import (
    GuardedRequest,
    Headers,
    Identify,
    NewId,
    Principal,
    RequestHead,
    parse_request,
)
from onceward.guard.route_table import Match
from onceward.ports import Store, Transaction, UnitOfWork
from onceward.records import AuditEvent, Record, Response
from onceward_protocol.error_codes import ErrorFormat
from onceward_protocol.fingerprint import short_hash

if TYPE_CHECKING:
    from onceward.observability.traces import SpanHandle
    from onceward_protocol.effect import Effect

__all__ = [
    "Execution",
    "Replay",
    "Writes",
    "current_execution",
    "executing",
    "find_execution",
    "set_current_execution",
]

# The key of the exchange in the ASGI scope. In the request of an item that the guard has not seen
# yet, it is the ``ItemContext``.
EXCHANGE_KEY: Final = "onceward.exchange"

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
    """Fate of the writes of a handler, by its response."""

    # They commit with the response.
    KEPT = auto()
    # It was an error.
    UNDONE = auto()
    # The response is not stored, or a redirect: it depends on whether there are any.
    UNDECIDED = auto()


class Replay(msgspec.Struct, frozen=True, gc=False):
    """The stored response is to be sent; the handler did not run, or its work was rolled back."""

    # That of the first request with the key.
    record: Record


class Execution:
    """Execution for a guarded handler: as ``scope["onceward"]`` or by the framework's dependency.

    A handler reads ``request``, writes in ``transaction`` and may call the methods below.
    ``Idempotency`` reads the other attributes when it commits or rolls back; handlers must not
    use them.
    """

    __slots__ = (
        "effect",
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
        # What its end says about the key.
        self.effect: Effect | None = None
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
        """Return the effect on the handler's writes, and how long to store its response.

        None: it is not stored.
        """
        status, policy = response.status, self.request.policy
        # As ``ttl_for``, which is not called for most responses.
        ttl = policy.success_ttl if status < _FIRST_REDIRECT else policy.ttl_for(status)
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


class RequestProcessor(Protocol):
    """Claims keys, commits and replays: ``Idempotency``, or the chunk of a batch."""

    @property
    def store(self) -> Store: ...

    @property
    def session_store(self) -> Store | None: ...

    @property
    def is_gated(self) -> bool: ...

    async def process(self, request: GuardedRequest, **sharing: Any) -> Replay | Execution: ...

    async def finish(self, execution: Execution, response: Response) -> Response | Replay: ...

    async def abort(self, execution: Execution) -> None: ...


class RequestTransaction(Protocol):
    """The transaction of dependencies before the claim, or of a request that is not guarded."""

    @property
    def handle(self) -> Any:
        """The transaction for a dependency: a ``Transaction``, or a session of the app."""

    async def release(self, endpoint: str) -> Mapping[str, Any]:
        """End what ran before the claim; return the options with which to claim."""

    def join(self, execution: Execution) -> None:
        """Write in the transaction of a guarded handler from now on."""

    async def finish(self, *, is_success: bool) -> None:
        """End before the response of a request that is not guarded is sent."""

    async def close(self) -> None:
        """Roll back what has not ended. Never raises."""

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:
        """Return the client's error, if ``error`` is of the transaction and means an outage."""


class Steps(Protocol):
    """The part of the pipeline that the app calls while it serves a request."""

    @property
    def identify(self) -> Identify: ...

    async def claim(self, exchange: "Exchange", principal: object) -> Execution | Replay: ...

    async def transaction_of(self, exchange: "Exchange") -> Any: ...


class ItemContext:
    """The context of a request that is an item of a batch, for the guard.

    The same one for each attempt of an item: a request that runs again is counted once.
    """

    __slots__ = (
        *("head", "limit_error", "limit_headers", "parsed", "principal", "processor"),
        "seen_headers",
    )

    def __init__(self) -> None:
        # Processes the request; None: as any other request.
        self.processor: RequestProcessor | None = None
        # The head, if it was read already; for the first attempt only.
        self.head: RequestHead | None = None
        # The body that was parsed while another item waited, and what was read from it.
        self.parsed: tuple[bytes, GuardedRequest] | None = None
        # The caller, if it was found in these headers already. Middleware may change them.
        self.principal: Principal | None = None
        self.seen_headers: Headers = ()
        # The headers of the rate limit, once the request was counted.
        self.limit_headers: Headers | None = None
        # Why it was refused when it was counted.
        self.limit_error: RequestError | None = None

    def take_head(self, path: str, query: bytes, headers: Any) -> RequestHead | None:
        """Return the head that was read before, once, unless middleware has changed the request.

        If it has, the caller who was found in it does not count, either.
        """
        head, self.head = self.head, None
        if (
            head is not None
            and (head.path, head.query) == (path, query)
            and self.seen_headers == tuple(headers)
        ):
            return head
        self.principal = None
        return None

    def parse_ahead(self, match: Match, content: bytes) -> None:
        """Read key and fingerprint before the item's turn; errors are left for that."""
        if (
            self.head is not None
            and self.principal is not None
            and match.policy.fingerprint is None  # a function of the app
        ):
            with suppress(RequestError):
                self.parsed = content, parse_request(self.head, content, match, self.principal)

    def take_parsed(self, body: bytes, principal: Principal) -> GuardedRequest | None:
        """Return the body parsed ahead, once, if body and caller are still the same.

        The caller is another object if the head of the request was read again.
        """
        parsed, self.parsed = self.parsed, None
        if parsed is None or parsed[0] is not body or principal is not self.principal:
            return None
        return parsed[1]


class Exchange:
    """The state of one request: passed from step to step of the pipeline."""

    __slots__ = (
        *("added_headers", "content", "effect", "error_format", "has_reply", "head", "identify"),
        *(
            "is_claimed_late",
            "is_replay",
            "item",
            "limit_headers",
            "match",
            "outcome",
            "payload_hash",
        ),
        *("pipeline", "principal", "processor", "request", "span", "transaction"),
    )

    def __init__(
        self,
        head: RequestHead,
        match: Match | None,
        pipeline: Steps,
        *,
        error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM,
        added_headers: Headers = (),
        item: ItemContext | None = None,
    ) -> None:
        self.head = head
        # The guarded route; None for a request that is not guarded.
        self.match = match
        # Its key is claimed after the app's dependencies have run.
        self.is_claimed_late = match is not None and match.is_claimed_late
        self.pipeline = pipeline
        # Returns the caller.
        self.identify = pipeline.identify
        # The format of errors outside guarded operations.
        self.error_format = error_format
        # Headers that every response to it has.
        self.added_headers = added_headers
        # The item of a batch that it is.
        self.item = item
        # ``RateLimit`` and ``RateLimit-Policy`` of the response, on a limited endpoint.
        self.limit_headers: Headers = ()
        # Set once the caller is known, for logs.
        self.principal: Principal | None = None
        # The body, and its hash if it was hashed before the key is known.
        self.content = b""
        self.payload_hash: str | None = None
        # Set once key and fingerprint are known, for logs and traces.
        self.request: GuardedRequest | None = None
        # Opened by the first dependency that needs it, ended by the guard.
        self.transaction: RequestTransaction | None = None
        # Claims the key, commits and replays.
        self.processor: RequestProcessor | None = None
        # None until the claim. After the app has run, it may have refused the request by itself.
        self.outcome: Execution | Replay | RequestError | StoreUnavailableError | None = None
        # True once a stored response was found for it.
        self.is_replay = False
        # What its reply says about its key.
        self.effect: Effect | None = None
        # True once its reply is known; the app may still run background tasks.
        self.has_reply = False
        self.span: SpanHandle | None = None

    def facts(self) -> dict[str, str | bool]:
        """Return the fields for logs and traces. The key is included as a hash only."""
        facts: dict[str, str | bool] = {
            "request_id": self.head.request_id,
            "correlation_id": self.head.correlation_id,
        }
        if self.request is not None:
            facts |= {
                "endpoint": self.request.endpoint,
                "tenant": self.request.principal.tenant,
                "replayed": self.is_replay,
            }
            if self.request.record_id is not None:
                facts["key_hash"] = short_hash(self.request.record_id.key)
        return facts


class PendingExecution:
    """The execution for a dependency; it has the attributes of it after the claim."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        execution = self._exchange.outcome
        if not isinstance(execution, Execution):
            raise NoTransactionError(
                "dependencies run before the key is claimed, so there is no execution yet: use it "
                "in the handler"
            )
        return getattr(execution, name)


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange | None:
    """Return the exchange of an ASGI request; None if it has not reached the guard."""
    found = scope.get(EXCHANGE_KEY)
    return found if isinstance(found, Exchange) else None
