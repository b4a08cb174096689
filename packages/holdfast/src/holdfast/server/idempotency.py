"""The intake: claims a key, lets the handler run once, commits everything together, replies."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, Final, assert_never

from holdfast.core.breaker import Breaker
from holdfast.core.decision import (
    Decision,
    Expired,
    Fresh,
    Held,
    InProgress,
    Mismatched,
    Replayed,
    decide,
)
from holdfast.core.idempotency_record import Record, RecordId
from holdfast.errors import InProgressError, PayloadMismatchError, StoreUnavailableError
from holdfast.ports import (
    Claim,
    Claimed,
    Clock,
    FaultPoints,
    Found,
    Metrics,
    RecordCache,
    Store,
)
from holdfast.server.execution import Execution, Replay, stale_error
from holdfast.server.guarded_request import GuardedRequest
from holdfast.server.lru_cache import MemoryRecords
from holdfast.server.single_flight import InFlight

__all__ = ["FAULT_POINTS", "Idempotency"]

# Where a process may die, and tests make it die.
FAULT_POINTS: Final = ("after_claim", "after_business_write", "before_commit", "after_commit")

# How a leader looks again for a key that another process holds: soon at first, then patiently.
_POLL_FIRST_SECONDS: Final = 0.005
_POLL_MOST_SECONDS: Final = 0.25


class Idempotency:
    """Admits guarded calls: each becomes a replay, an error, or one execution of the handler."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        metrics: Metrics,
        new_id: Callable[[datetime], str],
        cache: RecordCache | None = None,
        memory_bytes: int = 32 * 1024 * 1024,
        breaker: Breaker | None = None,
        faults: FaultPoints | None = None,
    ) -> None:
        """Wire the intake to its world."""
        self.store = store
        self.cache = cache
        self.memory = MemoryRecords(memory_bytes)
        self.in_flight = InFlight()
        self.breaker = breaker or Breaker()
        self.clock = clock
        self.metrics = metrics
        self.new_id = new_id
        self.faults = faults
        self._cache_writes: set[asyncio.Task[None]] = set()

    async def admit(self, call: GuardedRequest) -> "Replay | Execution":
        """Decide what becomes of a call. Raises the error to answer with, if it is one."""
        record_id = call.record_id
        if record_id is None:
            stale = stale_error(call, self.clock.now())
            if stale is not None:  # without a key there is no record to leave
                self.metrics.outcome(call.endpoint, "stale")
                raise stale
            unit = await self.guard_store("begin", self.store.begin())
            return Execution(self, call, unit)
        deadline: float | None = None
        while True:
            now = self.clock.now()
            record = self.memory.get(record_id, now)
            if record is None and not self.in_flight.lead(record_id):
                if deadline is None:
                    deadline = self.deadline(call)
                record = await self._wait_for_leader(call, record_id, deadline)
                if record is None:
                    continue
            if record is not None:
                replay = self.settle(call, decide(record, call.mark, now))
                if replay is not None:
                    return replay
                continue
            return await self._lead(call, record_id, now, deadline)

    async def close(self) -> None:
        """Finish writing to the cache."""
        if self._cache_writes:
            await asyncio.wait(self._cache_writes, timeout=2)

    # -- leading ---------------------------------------------------------------------------

    async def _lead(
        self, call: GuardedRequest, record_id: RecordId, now: datetime, deadline: float | None
    ) -> "Replay | Execution":
        """Run as the only one of this process with this key."""
        try:
            claim = await self.take(call, record_id, now, deadline)
        except BaseException:
            self.in_flight.leave(record_id, None)
            raise
        if isinstance(claim, Found):
            self.in_flight.leave(record_id, claim.record)
            replay = self.settle(call, decide(claim.record, call.mark, self.clock.now()))
            if replay is None:  # it expired between the look-up and now
                raise StoreUnavailableError(
                    "the record expired just now; send it again", is_for_callers=True
                )
            return replay
        if claim.after_expiry:
            self.metrics.expired(call.endpoint)
        # From here on the execution gives up the lead, on whichever way it ends.
        execution = Execution(self, call, claim.unit)
        try:
            if self.faults:
                await self.faults.reach("after_claim")
            if call.policy.staleness is not None:
                stale = stale_error(call, self.clock.now())
                if stale is not None:
                    await execution.refuse_stale(stale)
                    raise stale  # noqa: TRY301 - told after it was recorded
        except BaseException:
            await execution.abort()
            raise
        return execution

    async def take(
        self, call: GuardedRequest, record_id: RecordId, now: datetime, deadline: float | None
    ) -> Claimed | Found:
        """Claim the key, waiting without a connection while another process holds it."""
        pause = _POLL_FIRST_SECONDS
        while True:
            cached = None if self.cache is None else await self.cache.get(record_id, now)
            if cached is not None:
                self.memory.put(cached)
                return Found(cached)
            claim: Claim = await self.guard_store("claim", self.store.claim(record_id, now))
            if isinstance(claim, Found):
                self.remember(claim.record)
            if not isinstance(claim, Held):
                return claim
            if deadline is None:
                deadline = self.deadline(call)
            left = deadline - self.clock.monotonic()
            if left <= 0:
                raise self.in_progress(call)
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 2, _POLL_MOST_SECONDS)
            now = self.clock.now()

    async def _wait_for_leader(
        self, call: GuardedRequest, record_id: RecordId, deadline: float
    ) -> Record | None:
        started = self.clock.monotonic()
        try:
            return await self.in_flight.wait(record_id, max(0.0, deadline - started))
        except TimeoutError:
            raise self.in_progress(call) from None
        finally:
            self.metrics.waited(call.endpoint, self.clock.monotonic() - started)

    def deadline(self, call: GuardedRequest) -> float:
        """Return until when a duplicate of this call may wait."""
        return self.clock.monotonic() + call.policy.wait.total_seconds()

    def in_progress(self, call: GuardedRequest) -> InProgressError:
        """Make the error for a call whose key another one is running."""
        self.metrics.outcome(call.endpoint, "in_progress")
        return InProgressError(
            "the first request with this key is still running", retry_after_seconds=1
        )

    def settle(self, call: GuardedRequest, decision: Decision) -> Replay | None:
        """Turn a decision about a known record into a replay or an error; None means run."""
        match decision:
            case Replayed(record):
                self.metrics.outcome(call.endpoint, "replayed")
                return Replay(record)
            case Mismatched(expected, received):
                self.metrics.outcome(call.endpoint, "mismatched")
                raise PayloadMismatchError(
                    "this key was used for a different request",
                    details={"expectedHash": expected, "receivedHash": received},
                )
            case Expired():
                self.metrics.expired(call.endpoint)
                return None
            case Fresh() | InProgress():
                return None
            case _:
                assert_never(decision)

    # -- the store, behind its breaker -----------------------------------------------------

    async def guard_store(self, operation: str, work: Awaitable[Any]) -> Any:
        """Call the store, unless its breaker is open."""
        started = self.clock.monotonic()
        wait = self.breaker.retry_after(started)
        if wait is not None:
            if asyncio.iscoroutine(work):
                work.close()
            raise StoreUnavailableError(
                "the store is not answering; try again shortly",
                retry_after_seconds=wait,
                is_for_callers=True,
            )
        try:
            result = await work
        except StoreUnavailableError:
            self.breaker.failed(self.clock.monotonic())
            raise
        self.breaker.succeeded()
        self.metrics.store_time(operation, self.clock.monotonic() - started)
        return result

    def remember(self, record: Record) -> None:
        """Keep a committed record in memory, and in the cache without waiting for it."""
        self.memory.put(record)
        if self.cache is not None:
            task = asyncio.ensure_future(self.cache.put(record, self.clock.now()))
            self._cache_writes.add(task)
            task.add_done_callback(self._cache_writes.discard)
