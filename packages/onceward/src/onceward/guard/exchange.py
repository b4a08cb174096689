"""One request on its way through the guard: its head, and what is known of it so far."""

from collections.abc import MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from onceward.core.error_formats import ErrorFormatter
from onceward.core.idempotency_record import Response
from onceward.errors import NoTransactionError, RequestError, StoreUnavailableError, UsageError
from onceward.guard.execution import Execution, Replay
from onceward.guard.request import GuardedRequest, Identify, Principal, RequestHead, parse_request
from onceward.guard.route_table import Match
from onceward.ports import Gate, Store, UnitOfWork
from onceward_protocol.error_codes import ErrorFormat
from onceward_protocol.fingerprint import short_hash

if TYPE_CHECKING:
    from onceward.guard.request_transaction import RequestTransaction
    from onceward.observability.traces import SpanHandle

__all__ = [
    "EXCHANGE_KEY",
    "Exchange",
    "ItemContext",
    "PendingExecution",
    "PostponedError",
    "RequestProcessor",
    "SharedProcessor",
    "exchange_of",
]

# The key of the exchange in the ASGI scope. In the request of an item that the guard has not seen
# yet, it is the ``ItemContext``.
EXCHANGE_KEY: Final = "onceward.exchange"

Headers = tuple[tuple[bytes, bytes], ...]
# What a claim can lead to.
Outcome = Execution | Replay | RequestError | StoreUnavailableError


class PostponedError(RequestError):
    """The request was rolled back and runs again, later. Its response is not used."""

    kind = "overloaded"


class RequestProcessor(Protocol):
    """Claims keys, commits and replays: ``Idempotency``, or the chunk of a batch."""

    @property
    def store(self) -> Store:
        """Where records are."""

    @property
    def session_store(self) -> Store | None:
        """The same store, if its transactions are sessions of the app."""

    @property
    def gate(self) -> Gate | None:
        """Limits how many requests use the app's connection pool at once."""

    async def process(self, request: GuardedRequest, **sharing: Any) -> Replay | Execution:
        """Return a replay, or an execution with the key claimed."""

    async def finish(self, execution: Execution, response: Response) -> Response | Replay:
        """Commit the handler's response, and return what to send."""

    async def abort(self, execution: Execution) -> None:
        """Roll back and free the key. Does nothing if the execution has ended."""


class SharedProcessor(RequestProcessor, Protocol):
    """A processor whose requests share one transaction."""

    async def begin(self, *, idle_seconds: float | None = None) -> UnitOfWork:
        """Begin a part of the transaction without a key, for dependencies of the app."""


class Steps(Protocol):
    """The part of the pipeline that the app calls while it serves a request."""

    @property
    def identify(self) -> Identify:
        """Returns the caller."""

    async def claim_late(self, exchange: "Exchange", principal: Principal) -> Execution | Replay:
        """Claim the key after the app's dependencies have run."""

    async def transaction_of(self, exchange: "Exchange") -> Any:
        """Return the transaction or session of a request that has not claimed a key."""


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
        self.processor: SharedProcessor | None = None
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
        """Return what was parsed ahead, once, if body and caller are still the same.

        The caller is another object if the head of the request was read again.
        """
        parsed, self.parsed = self.parsed, None
        if parsed is None or parsed[0] is not body or principal is not self.principal:
            return None
        return parsed[1]


class Exchange:
    """The state of one request: passed from step to step of the pipeline."""

    __slots__ = (
        *("added_headers", "content", "error_format", "has_reply", "head", "identify"),
        *("is_replay", "item", "limit_headers", "match", "outcome", "payload_hash"),
        *("principal", "processor", "request", "span", "steps", "transaction"),
    )

    def __init__(
        self,
        head: RequestHead,
        match: Match | None,
        steps: Steps,
        *,
        error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM,
        added_headers: Headers = (),
        item: ItemContext | None = None,
    ) -> None:
        self.head = head
        # The guarded route; None for a request that is not guarded.
        self.match = match
        self.steps = steps
        # Returns the caller.
        self.identify = steps.identify
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
        self.outcome: Outcome | None = None
        # True once a stored response was found for it.
        self.is_replay = False
        # True once its reply is known; the app may still run background tasks.
        self.has_reply = False
        self.span: SpanHandle | None = None

    @property
    def is_claimed_late(self) -> bool:
        """Whether its key is claimed after the app's dependencies have run."""
        return self.match is not None and self.match.is_claimed_late

    @property
    def is_unclaimed(self) -> bool:
        """Whether the app runs and has not claimed the key: its response is not guarded."""
        return self.outcome is None and self.match is not None and self.match.is_claimed_late

    async def claim(self, principal: object) -> Execution | Replay:
        """Claim the key for this caller, after the dependencies. Raises what the client gets."""
        if not isinstance(principal, Principal):
            raise UsageError(
                f"the principal dependency returned {type(principal).__name__}: it must return "
                "onceward.Principal(tenant=…, actor=…)"
            )
        if self.outcome is not None:
            raise UsageError("a guarded endpoint ran twice in one request")
        try:
            outcome = await self.steps.claim_late(self, principal)
        except (RequestError, StoreUnavailableError) as error:
            self.outcome = error
            raise
        self.outcome = outcome
        return outcome

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
    """What a dependency gets for the execution; it has the attributes of it after the claim."""

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
