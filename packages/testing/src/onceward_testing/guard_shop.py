"""The app that ``GuardContract`` sends requests to, whatever its framework, and its faults.

A front serves the routes of ``Shop`` in a framework. Its handlers run ``Shop.handle``, which yields
what to do in the transaction and returns the response::

    @app.post("/orders")
    @onceward.guard("orders.create")
    async def create(request: Request) -> Response:
        sent = Sent(request.headers, await request.body())
        reply = await run_handler(onceward, shop.handle(sent))
        return Response(reply.body, reply.status, dict(reply.headers))
"""

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol, cast
from uuid import uuid4

from onceward import GuardConfig, Onceward, Policy, Principal, ServiceError
from onceward.errors import NotAuthenticatedError
from onceward.frameworks.wsgi import SyncExecution
from onceward.guard.request import RequestHead
from onceward.ports import Claimed
from onceward_testing.in_process_client import Request, Response

__all__ = [
    "BATCH_PATH",
    "CREATE_ORDERS",
    "INSERT_ORDER",
    "NOT_SIGNED_IN",
    "STEPS",
    "FaultyStore",
    "GuardedApp",
    "Reply",
    "Sent",
    "SettableClock",
    "Shop",
    "Visits",
    "Write",
    "identify",
    "principal_of",
    "run_handler",
    "run_sync_handler",
]

CREATE_ORDERS: Final = "CREATE TABLE IF NOT EXISTS orders (tenant TEXT, item TEXT)"
"""Creates the table of the app."""
INSERT_ORDER: Final = "INSERT INTO orders (tenant, item) VALUES (:tenant, :item)"
"""The statement with which a handler writes."""
BATCH_PATH: Final = "/batch"
"""Where the batch endpoint is."""
NOT_SIGNED_IN: Final = "not-signed-in"
"""As the value of ``X-Tenant``: the app refuses the request with 401."""

_WAIT_SECONDS: Final = 20.0


class GuardedApp(Protocol):
    """One app of a front, with the routes of a ``Shop``."""

    @property
    def onceward(self) -> Onceward[Any]:
        """Its Onceward."""

    def send(self, request: Request) -> Response:
        """Send a request and return the response. Called from several threads."""

    def close(self) -> None:
        """Close its Onceward, and what else it has opened."""


class Headers(Protocol):
    """The headers of a request, as frameworks have them: names in any case."""

    def get(self, name: str, /) -> str | None:
        """Return a header."""


class Sent(NamedTuple):
    """The handler's view of its request."""

    # As the framework has them.
    headers: Headers
    # Complete.
    body: bytes


class Reply(NamedTuple):
    """The response that a front makes for its framework."""

    # The HTTP status.
    status: int
    # All of them, two cookies included.
    headers: tuple[tuple[str, str], ...]
    # Complete.
    body: bytes
    # Send it in parts of unknown length.
    is_stream: bool
    # Fronts with background tasks run this in one, after the response.
    background: Callable[[], None]


# -- what handlers do ----------------------------------------------------------------------------


class Write(NamedTuple):
    """Execute ``INSERT_ORDER``."""

    # Whose order it is.
    tenant: str
    # A new id.
    item: str


class Enqueue(NamedTuple):
    """Enqueue a job of the type ``order.made``."""

    item: str


class Wait(NamedTuple):
    """Wait until the test opens the gate."""

    gate: threading.Event


class CallExecution(NamedTuple):
    """Call a method of the execution."""

    method: str
    arguments: tuple[Any, ...] = ()


STEPS = Write | Enqueue | Wait | CallExecution
"""The steps that ``Shop.handle`` yields; ``run_handler`` and ``run_sync_handler`` do it."""


class Visits:
    """Effects of the handlers for one tenant, in this process; also what was rolled back."""

    def __init__(self) -> None:
        # The value of ``X-Do`` in each run.
        self.runs: list[str] = []
        # Set when a handler has written.
        self.started = threading.Event()
        # Handlers of requests that ask for it wait until this is set.
        self.gate = threading.Event()
        # Items whose ``after_commit`` was called.
        self.committed: list[str] = []
        # Items whose background task has run.
        self.background: list[str] = []


@dataclass(slots=True)
class Shop:
    """The routes of a front: what is guarded, by which policy, and what handlers do.

    A front has these routes. All take any body; ``principal_of`` says who the caller is, from the
    header ``X-Tenant``, and refuses some with 401.

    ====================  ==================  =======================================
    route                 endpoint            policy
    ====================  ==================  =======================================
    POST /orders          ``orders.create``   ``policy``
    POST /shelves/{name}  ``shelves.fill``    ``policy``
    POST /numbered        ``orders.number``   ``policy``, with strict sequences
    POST, GET /open       not guarded
    POST /batch           the batch endpoint
    ====================  ==================  =======================================
    """

    # The URL of a database that has the table ``orders``.
    url: str
    # The policy of all guarded routes.
    policy: Policy
    # The options of ``Onceward`` that do not say who the caller is.
    config: GuardConfig
    # What handlers have done, by tenant.
    visits: defaultdict[str, Visits] = field(default_factory=lambda: defaultdict(Visits))

    @property
    def numbered_policy(self) -> Policy:
        """The policy of ``/numbered``."""
        return self.policy.replace(ordering="strict", key_required=True)

    def handle(self, sent: Sent) -> Generator[STEPS, None, Reply]:
        """Do what the header ``X-Do`` says; it is no part of the fingerprint of a request."""
        words = (sent.headers.get("X-Do") or "").split()
        tenant = sent.headers.get("X-Tenant") or ""
        visits, item = self.visits[tenant], str(uuid4())
        visits.runs.append(" ".join(words))
        if "quiet" not in words:
            yield Write(tenant, item)
        if "enqueue" in words:
            yield Enqueue(item)
        visits.started.set()
        if "wait" in words:
            yield Wait(visits.gate)
        if "keep" in words:
            yield CallExecution("keep_writes_on_error")
        if "no-store" in words:
            yield CallExecution("no_store")
        yield CallExecution("after_commit", (lambda: visits.committed.append(item),))
        if "raise" in words:
            raise RuntimeError("as the test asked")
        if "refuse" in words:
            raise ServiceError(422, "order.refused", "as the test asked", details={"item": 5})
        status = next((int(word) for word in words if word.isdigit()), 201)
        size = next((int(word[5:]) for word in words if word.startswith("size=")), 0)
        to = next((word[3:] for word in words if word.startswith("to=")), f"/orders/{item}")
        fields = {"id": item, "version": 7, "bytes": len(sent.body), "pad": "x" * size}
        with suppress(ValueError, AttributeError):
            fields["parent"] = json.loads(sent.body).get("parent")
        fields["match"] = sent.headers.get("If-Match")
        has_body = status != 204  # noqa: PLR2004 - No Content
        headers = [("ETag", '"7"'), ("Location", to), ("X-Extra", item), ("Set-Cookie", "a=1")]
        headers += [("Set-Cookie", "b=2")]
        headers += [("Content-Type", "application/json")] if has_body else []
        body = json.dumps(fields).encode() if has_body else b""
        return Reply(
            status,
            tuple(headers),
            body,
            "stream" in words,
            lambda: visits.background.append(item),
        )


async def run_handler(onceward: Onceward[Any], steps: Generator[STEPS, None, Reply]) -> Reply:
    """Run a handler of an async framework."""
    execution = onceward.execution
    try:
        while True:
            step = next(steps)
            if isinstance(step, Write):
                await execution.statements.execute(INSERT_ORDER, step._asdict())
            elif isinstance(step, Enqueue):
                await onceward.enqueue("order.made", {"item": step.item}, resource_id=step.item)
            elif isinstance(step, Wait):
                await asyncio.to_thread(step.gate.wait, _WAIT_SECONDS)
            else:
                getattr(execution, step.method)(*step.arguments)
    except StopIteration as done:
        return cast("Reply", done.value)


def run_sync_handler(
    execution: SyncExecution,
    steps: Generator[STEPS, None, Reply],
    write: Callable[[Write], object] | None = None,
) -> Reply:
    """Run a handler of a sync framework. ``write`` writes where the app has its own session."""
    try:
        while True:
            step = next(steps)
            if isinstance(step, Write) and write is not None:
                write(step)
            elif isinstance(step, Write):
                execution.transaction.execute(INSERT_ORDER, step._asdict())
            elif isinstance(step, Enqueue):
                execution.enqueue("order.made", {"item": step.item}, resource_id=step.item)
            elif isinstance(step, Wait):
                step.gate.wait(_WAIT_SECONDS)
            else:
                getattr(execution, step.method)(*step.arguments)
    except StopIteration as done:
        return cast("Reply", done.value)


# -- callers -------------------------------------------------------------------------------------


def principal_of(tenant: str | None) -> Principal | None:
    """Return the caller by the value of ``X-Tenant``; None is refused with 401."""
    return None if tenant in (None, NOT_SIGNED_IN) else Principal(tenant, f"{tenant}'s phone")


def identify(head: RequestHead) -> Principal:
    """Do the same for ``Onceward(identify=…)``."""
    found = principal_of(head.header("x-tenant"))
    if found is None:
        raise NotAuthenticatedError("sign in first")
    return found


# -- time and faults -----------------------------------------------------------------------------


class SettableClock:
    """A wall clock that changes only when it is moved. The monotonic one also runs by itself."""

    def __init__(self, now: datetime = datetime(2026, 3, 1, 12, tzinfo=UTC)) -> None:
        self._now = now
        self._moved = 0.0

    def now(self) -> datetime:
        """Return the time that was set."""
        return self._now

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic() + self._moved

    def move(self, span: timedelta) -> None:
        """Let this much time pass."""
        self._now += span
        self._moved += span.total_seconds()


Commit = Callable[[Any, Any, Any], Awaitable[None]]


class FaultyStore:
    """Counts the calls of a store, and makes them fail."""

    def __init__(self, store: Any) -> None:
        """Replace the methods of this object that requests call."""
        # How often records were looked up or claimed.
        self.calls = 0
        # Raised by each call as long as it is set.
        self.down: Exception | None = None
        # Called in place of the next commits, with the real unit, the record and the audit event.
        self.commits: list[Commit] = []
        for name in ("find", "claim", "begin"):
            setattr(store, name, self._replaced(getattr(store, name)))

    def _replaced(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.down is not None:
                raise self.down
            found = await method(*args, **options)
            if isinstance(found, Claimed):
                unit: Any = _FaultyUnit(self, found.unit)
                return Claimed(unit, after_expiry=found.after_expiry)
            return _FaultyUnit(self, found) if hasattr(found, "rollback") else found

        return call


class _FaultyUnit:
    """A unit of work whose commit may be replaced."""

    def __init__(self, store: FaultyStore, unit: Any) -> None:
        self._store = store
        self._unit = unit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unit, name)

    async def commit(self, record: Any, audit: Any) -> None:
        if self._store.commits:
            await self._store.commits.pop(0)(self._unit, record, audit)
        else:
            await self._unit.commit(record, audit)
