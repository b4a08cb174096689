"""Decides about the numbers of strict sequences: which request runs, is replayed or refused.

A request with the next number runs; one whose number was used for its key is replayed; every other
one is refused. In a process, turns let one request of a stream run at a time, and between processes
a lock of the database does. What decides in the end is the statement that uses the number, in the
transaction of the record.
"""

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import datetime
from itertools import count
from typing import Any

from onceward.errors import SequenceViolationError
from onceward.guard.request import GuardedRequest
from onceward.guard.request_thread import is_in_request_thread, run_in_request_thread
from onceward.guard.single_flight import Duplicates
from onceward.ports import Claimed, Clock, Found, Store, Transaction
from onceward.stores.sequences import SequenceNumbers
from onceward_protocol.sequence import Position, Stream, key_hash, violation

CallStore = Callable[[str, Awaitable[Any]], Awaitable[Any]]
# Claims the key of a request at a time, and waits for it until a deadline.
ClaimKey = Callable[[datetime, float | None], Awaitable[Claimed | Found]]


class StrictSequences:
    """The streams of an app."""

    def __init__(
        self, store: Store, call_store: CallStore, clock: Clock, duplicates: Duplicates
    ) -> None:
        """``call_store`` runs calls of the store outside a transaction."""
        self.numbers = SequenceNumbers(store)
        self.turns = SequenceTurns()
        self._store = store
        self._call_store = call_store
        self._clock = clock
        self._duplicates = duplicates

    async def claim(
        self,
        request: GuardedRequest,
        now: datetime,
        deadline: float | None,
        claim: ClaimKey,
        *,
        has_session: bool,
    ) -> Claimed | Found:
        """Wait until no other request of the stream runs, then claim the key.

        A claim returns with the turn. Raises ``SequenceViolationError`` if the number is not the
        next one, unless the key has a record. ``has_session``: the claim shares one of the app.
        """
        stream = request.stream
        if not self.turns.take(stream):
            deadline = self._duplicates.deadline_of(request) if deadline is None else deadline
            seconds = max(0.0, deadline - self._clock.monotonic())
            await self._duplicates.wait(
                request, lambda: self.turns.wait(stream, number_of(request), seconds)
            )
        try:
            claimed = await self._claim_next(request, now, deadline, claim, has_session=has_session)
        except BaseException:
            self.turns.leave(stream)
            raise
        if isinstance(claimed, Found):
            self.turns.leave(stream)
        return claimed

    async def _claim_next(
        self,
        request: GuardedRequest,
        now: datetime,
        deadline: float | None,
        claim: ClaimKey,
        *,
        has_session: bool,
    ) -> Claimed | Found:
        """Claim the key and lock the stream; while another process has it, poll as for a key."""
        pause, has_locks = 0.0, self.numbers.has_locks
        # A session of the app cannot be claimed twice, and on SQLite a statement in the transaction
        # would take the turn to write before the handler does: those look first.
        looks_first = not has_locks or has_session or self._store.has_thread_sessions
        while True:
            position = await self.look(request) if looks_first else None
            if position is not None or not looks_first:
                claimed = await claim(now, deadline)
                if isinstance(claimed, Found):
                    return claimed
                try:
                    if has_locks:
                        position = await self.lock(request, claimed.unit.statements)
                except BaseException:
                    await claimed.unit.rollback()
                    raise
                if position is not None and position.expected == number_of(request):
                    return claimed
                await claimed.unit.rollback()
                if position is not None:
                    self._duplicates.reports.outcome(request.endpoint, "refused")
                    raise await self.refusal(request, position)
                if looks_first:
                    raise self._duplicates.in_progress(request)
            deadline = self._duplicates.deadline_of(request) if deadline is None else deadline
            pause = await self._duplicates.poll(request, pause, deadline)
            now = self._clock.now()

    async def look(self, request: GuardedRequest) -> Position | None:
        """Return where the stream is, outside a transaction; None while a request of it runs."""
        if self.numbers.has_locks:
            probe = self.numbers.try_lock(request.stream)
            if not await self._call_store("sequence", probe):
                return None
        position: Position = await self._call_store("sequence", self._find(request))
        return position

    async def lock(self, request: GuardedRequest, on: Transaction) -> Position | None:
        """Lock the stream and return where it is; None if another process has it."""
        # Two statements: the snapshot of one would be older than its lock.
        if self.numbers.has_locks and not await self.numbers.try_lock(request.stream, on):
            return None
        return await self._find(request, on)

    async def check_replay(self, request: GuardedRequest) -> None:
        """Raise ``SequenceViolationError`` unless the number was used for the request's key."""
        position = await self._call_store("sequence", self._find(request))
        if position.key_hash != key_of(request):
            raise await self._call_store("sequence", self.refusal(request, position))

    async def refusal(
        self, request: GuardedRequest, position: Position, on: Transaction | None = None
    ) -> SequenceViolationError:
        """Return the error for a request that can neither run nor be replayed."""
        hashed = key_of(request)
        key_number = await self.numbers.find_number(request.stream, hashed, on)
        return violation(number_of(request), hashed, position, key_number=key_number)

    async def use(self, request: GuardedRequest, now: datetime, on: Transaction) -> bool:
        """Use the number of a request; return False if it is not the next one any more."""
        before = number_of(request) - 1
        return await self.numbers.use(request.stream, before, [key_of(request)], now, on)

    async def _find(self, request: GuardedRequest, on: Transaction | None = None) -> Position:
        return await self.numbers.find(request.stream, number_of(request), on)


class _UsedNumbers:
    """A stream in a chunk: what the database has of it, and what the chunk adds."""

    __slots__ = ("added", "is_locked", "known", "known_from", "last_number")

    def __init__(self) -> None:
        self.is_locked = False
        # The last number that is committed; None before it was read.
        self.last_number: int | None = None
        # The hashes of keys, of ``known_from`` and later numbers.
        self.known: dict[int, str] = {}
        self.known_from: int | None = None
        # The hashes of the keys of this chunk.
        self.added: list[str] = []


class ChunkSequences:
    """The streams of the requests in one chunk. Their numbers are written when it is committed."""

    def __init__(self, sequences: StrictSequences) -> None:
        self._sequences = sequences
        self._streams: dict[Stream, _UsedNumbers] = {}
        self._turns: list[Stream] = []

    async def position(
        self, request: GuardedRequest, on: Transaction | None, *, is_replay: bool
    ) -> Position | None:
        """Return where the stream is, this chunk included; None if another request of it runs.

        A replay only looks, and does not need the stream for itself.
        """
        numbers, stream, number = self._sequences.numbers, request.stream, number_of(request)
        used = self._streams.setdefault(stream, _UsedNumbers())
        if not is_replay and not used.is_locked:
            if not self._sequences.turns.take(stream):
                return None
            self._turns.append(stream)
            if numbers.has_locks and not await numbers.try_lock(stream, on):
                self._turns.remove(stream)
                self._sequences.turns.leave(stream)
                return None
            used.is_locked = True
            used.last_number = None  # what was read before the lock may be old
        if used.last_number is None:
            used.last_number = (await numbers.find(stream, number, on)).last_number
        if number <= used.last_number and (used.known_from is None or number < used.known_from):
            used.known = await numbers.find_keys(stream, number, on)
            used.known_from = number
        at = number - used.last_number - 1
        hashed = used.added[at] if 0 <= at < len(used.added) else used.known.get(number)
        return Position(used.last_number + len(used.added), hashed)

    def use(self, request: GuardedRequest) -> None:
        """Note that a request has used its number, which was the next one."""
        self._streams[request.stream].added.append(key_of(request))

    async def save(self, now: datetime, on: Transaction) -> bool:
        """Write the numbers that were used; return False if the chunk must not commit."""
        for stream, used in self._streams.items():
            if used.added:
                assert used.last_number is not None  # noqa: S101 - it was locked
                numbers = self._sequences.numbers
                if not await numbers.use(stream, used.last_number, used.added, now, on):
                    return False
        return True

    @property
    def has_numbers(self) -> bool:
        return any(used.added for used in self._streams.values())

    def leave(self) -> None:
        """Pass the turns on, after the end of the transaction."""
        for stream in self._turns:
            self._sequences.turns.leave(stream)
        self._turns.clear()


def number_of(request: GuardedRequest) -> int:
    """Return the number of a request that has one."""
    assert request.sequence is not None  # noqa: S101 - the caller has checked
    return request.sequence.number


def key_of(request: GuardedRequest) -> str:
    """Return the hash of the request's key, as streams keep it."""
    assert request.record_id is not None  # noqa: S101 - the policy requires a key
    return key_hash(request.record_id.key)


class SequenceTurns:
    """The streams of which a request runs in this process, and those that wait for it."""

    def __init__(self) -> None:
        # Heaps of number, order of arrival, future.
        self._waiting: dict[Stream, list[tuple[int, int, Any]]] = {}
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, stream: Stream) -> bool:
        """Return True and take the turn, or False if another request has it."""
        if stream in self._waiting:
            return False
        self._waiting[stream] = []
        return True

    async def wait(self, stream: Stream, number: int, seconds: float) -> None:
        """Wait for the turn, which passes to the lowest number. Raises ``TimeoutError``."""
        if self.take(stream):
            return
        turn: Any = (
            Future() if is_in_request_thread() else asyncio.get_running_loop().create_future()
        )
        heapq.heappush(self._waiting[stream], (number, next(self._arrivals), turn))
        try:
            if isinstance(turn, Future):
                await run_in_request_thread(lambda: turn.result(seconds))
            else:
                async with asyncio.timeout(seconds):
                    await turn
        except BaseException as error:
            has_turn = turn.done() and not turn.cancelled()
            if has_turn and isinstance(error, TimeoutError):  # it came in the same instant
                return
            if has_turn:
                self.leave(stream)
            else:
                turn.cancel()
            raise

    def leave(self, stream: Stream) -> None:
        waiting = self._waiting[stream]
        while waiting:
            turn = heapq.heappop(waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[stream]
