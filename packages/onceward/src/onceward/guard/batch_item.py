"""One item of a batch on its way through the app."""

from typing import Any, Final, Protocol

from onceward.core.idempotency_record import Response
from onceward.errors import RequestError
from onceward.guard.execution import Execution
from onceward.guard.idempotency import Replay
from onceward.guard.request import GuardedRequest, Principal
from onceward.ports import Gate, Store, UnitOfWork

__all__ = ["ITEM_KEY", "ItemContext", "PostponedError", "RequestProcessor", "SharedProcessor"]

# The key of an item in the ASGI scope of its request.
ITEM_KEY: Final = "onceward.batch_item"


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


class ItemContext:
    """What the guard needs to know about a request that is an item of a batch.

    The same one for each attempt of an item: a request that runs again is counted once.
    """

    __slots__ = (
        *("head", "limit_error", "limit_headers", "parsed", "principal", "processor"),
        "seen_headers",
    )

    def __init__(self) -> None:
        # Processes the request; None: as any other request.
        self.processor: SharedProcessor | None = None
        # The ``RequestHead``, if it was read already; for the first attempt only.
        self.head: object = None
        # The body that was parsed while another item waited, and what was read from it.
        self.parsed: tuple[bytes, GuardedRequest] | None = None
        # The caller, if it was found in these headers already. Middleware may change them.
        self.principal: Principal | None = None
        self.seen_headers: tuple[tuple[bytes, bytes], ...] = ()
        # The headers of the rate limit, once the request was counted.
        self.limit_headers: tuple[tuple[bytes, bytes], ...] | None = None
        # Why it was refused when it was counted.
        self.limit_error: RequestError | None = None

    def take_parsed(self, body: bytes, principal: Principal) -> GuardedRequest | None:
        """Return what was parsed ahead, once, if body and caller are still the same.

        The caller is another object if the head of the request was read again.
        """
        parsed, self.parsed = self.parsed, None
        if parsed is None or parsed[0] is not body or principal is not self.principal:
            return None
        return parsed[1]
