"""Processes requests of a batch in one transaction.

It takes the place of ``Idempotency`` for these requests: keys are claimed together, records and
audit events written together. A request that has responded waits for the commit; its response, its
background tasks and what others learn of it come after that.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from onceward.errors import (
    AbortedTransactionError,
    CommitUnknownError,
    OverloadedError,
    RequestError,
    StoreUnavailableError,
    SupersededError,
)
from onceward.guard.execution import Execution, Replay, Writes
from onceward.guard.idempotency import Idempotency, Mismatched, Replayed, decide
from onceward.guard.request import GuardedRequest
from onceward.guard.request_log import DeferredReports, report_committed
from onceward.guard.sequences import ChunkSequences, key_of, number_of
from onceward.ports import Chunk, Found, KeyClaimed, Store, UnitOfWork
from onceward.records import AuditEvent, Record, RecordId, Response
from onceward_protocol.effect import Effect

# Where tests kill the process, beside the points of single requests before the commit.
FAULT_POINTS: Final = (
    "chunk_claimed",
    "chunk_savepoint",
    "chunk_item_ended",
    "chunk_before_commit",
    "chunk_after_commit",
    "batch_before_response",
)

_FIRST_SERVER_ERROR: Final = 500

_log = logging.getLogger("onceward.request")


class PostponedError(OverloadedError):
    """The request was rolled back and runs again, later. Its response is not used."""


class RequestChunk:
    """One transaction for several requests. They run one at a time.

    Its owner calls ``begin_request`` before each, and in the end ``commit`` or ``discard``.
    """

    session_store = None
    is_gated = False

    def __init__(
        self,
        idempotency: Idempotency,
        store: Store,
        *,
        is_direct: bool = False,
        has_savepoints: bool = True,
    ) -> None:
        """With ``is_direct``, nothing around the guard gets responses before the commit.

        Without ``has_savepoints``, it may turn out that it needs them: all run again then.
        """
        self._is_direct = is_direct
        self._has_savepoints = has_savepoints
        self.store = idempotency.store
        self._idempotency = idempotency
        self._chunk_store = store
        self._chunk: Chunk | None = None
        self._epoch = idempotency.epoch.current
        self._claims: dict[RecordId, KeyClaimed | Found] = {}
        self._led: list[RecordId] = []
        self._records: dict[RecordId, Record] = {}
        self._audits: list[AuditEvent] = []
        # The first request with a record: its key tells whether the chunk was committed.
        self._first: tuple[GuardedRequest, Record] | None = None
        self._held: list[tuple[Execution, asyncio.Future[bool] | None]] = []
        self._sequences = ChunkSequences(idempotency.sequences)
        self._reports = DeferredReports(idempotency.reports)
        self._has_writes = False
        self._is_closed = False
        self._current: Execution | None = None
        self._on_response: Callable[[Response], None] = _ignore
        # The tenant of all its requests; None before the first.
        self.tenant: str | None = None
        # Whether the last request has to run again.
        self.is_postponed = False
        # Whether it has to run alone then, because of what it does.
        self.is_alone = False

    @property
    def is_broken(self) -> bool:
        return self._chunk is not None and self._chunk.is_broken

    @property
    def needs_savepoints(self) -> bool:
        """True if a request was to be undone alone and had no savepoint."""
        return self._chunk is not None and self._chunk.needs_savepoints

    @property
    def must_end(self) -> bool:
        """True if no other request may follow in this transaction."""
        return self._chunk is not None and (self._chunk.must_end or self._chunk.is_broken)

    async def claim(self, record_ids: Sequence[RecordId]) -> int:
        """Claim keys of one tenant, in order, up to the first that is held; return how many.

        Never waits for another holder. Raises ``StoreUnavailableError``, or ``RequestError`` for a
        record that cannot be read.
        """
        idempotency = self._idempotency
        if not self._claims and (self._epoch.value is None or idempotency.epoch.is_due()):
            await idempotency.epoch.check()
            self._epoch = idempotency.epoch.current
        now = idempotency.clock.now()
        count, unknown = self._lead(record_ids, now)
        if not unknown:
            return count
        chunk = await self._begun()
        claims = await idempotency.call_store("claim", chunk.claim(unknown, now))
        for record_id, claim in zip(unknown, claims, strict=False):
            self._claims[record_id] = claim
            if isinstance(claim, Found):
                idempotency.remember(claim.record, self._epoch)
        for record_id in unknown[len(claims) :]:
            self._led.remove(record_id)
            idempotency.in_flight.leave(record_id, None)
            count = min(count, record_ids.index(record_id))
        await self._reach("chunk_claimed")
        return count

    def _lead(self, record_ids: Sequence[RecordId], now: datetime) -> tuple[int, list[RecordId]]:
        """Lead keys in this process, up to the first that has a leader.

        Returns how many are led or known, and those to be claimed in the database.
        """
        idempotency, unknown = self._idempotency, list[RecordId]()
        for count, record_id in enumerate(record_ids):
            if record_id in self._claims or record_id in unknown:
                continue
            if self.tenant not in {None, record_id.tenant}:
                return count, unknown
            self.tenant = record_id.tenant
            record = idempotency.memory.get(record_id, now, self._epoch)
            if record is not None:
                self._claims[record_id] = Found(record)
            elif idempotency.in_flight.lead(record_id):
                self._led.append(record_id)
                unknown.append(record_id)
            else:
                return count, unknown
        return len(record_ids), unknown

    def begin_request(self, on_response: Callable[[Response], None]) -> None:
        """Expect the next request. ``on_response`` gets what it responds, before the commit."""
        self.is_postponed = self.is_alone = False
        self._current = None
        self._on_response = on_response

    # -- as ``Idempotency`` ------------------------------------------------------------------

    async def begin(self, *, idle_seconds: float | None = None) -> UnitOfWork:  # noqa: ARG002
        """Begin a part without a key, for dependencies. It is rolled back before the claim."""
        return await (await self._begun()).begin_item()

    async def process(self, request: GuardedRequest, **_sharing: Any) -> Replay | Execution:
        idempotency, record_id = self._idempotency, request.record_id
        if record_id is None or self._is_closed:
            raise self._postpone(is_alone=True)
        claim = self._claims.get(record_id) or await self._claim_one(record_id)
        now = idempotency.clock.now()
        known = self._records.get(record_id)
        if known is None and isinstance(claim, Found):
            known = claim.record
        decision = decide(known, request.fingerprint, now)
        if request.sequence is not None and not isinstance(decision, Mismatched):
            await self._check_number(request, is_replay=isinstance(decision, Replayed))
        replay = idempotency.resolve(request, decision, self._reports)
        if replay is not None:
            return replay
        if isinstance(claim, Found):  # it has expired since
            raise self._postpone(is_alone=True)
        stale = await idempotency.check_claimed(
            request, self._reports, after_expiry=claim.after_expiry
        )
        if stale is not None:
            self._keep(request, idempotency.record_of_stale(request, stale), None)
            raise stale
        try:
            unit = await (await self._begun()).begin_item()
        except StoreUnavailableError:
            raise self._postpone() from None
        execution = self._current = Execution(request, unit, self._epoch)
        await self._reach("chunk_savepoint")
        return execution

    async def _claim_one(self, record_id: RecordId) -> KeyClaimed | Found:
        try:
            claimed = await self.claim([record_id])
        except StoreUnavailableError:
            raise self._postpone(is_alone=True) from None
        if not claimed:
            raise self._postpone()
        return self._claims[record_id]

    async def _check_number(self, request: GuardedRequest, *, is_replay: bool) -> None:
        """Raise ``SequenceViolationError`` unless the number allows a replay, or to run."""
        sequences = self._idempotency.sequences
        try:
            on = None
            # On SQLite a statement would take the turn to write, which a replay does not need.
            if not is_replay or sequences.numbers.has_locks:
                on = await (await self._begun()).statements()
            position = await self._sequences.position(request, on, is_replay=is_replay)
            if position is None:  # another request of this client runs
                raise self._postpone()
            if is_replay:
                is_allowed = position.key_hash == key_of(request)
            else:
                is_allowed = position.expected == number_of(request)
            if is_allowed:
                return
            refusal = await sequences.refusal(request, position, on)
        except (StoreUnavailableError, AbortedTransactionError):
            raise self._postpone(is_alone=True) from None
        self._reports.outcome(request.endpoint, "refused")
        raise refusal

    async def finish(self, execution: Execution, response: Response) -> Response | Replay:
        """End the part of a request, and return its response after the commit.

        Raises ``PostponedError`` if the request has to run again.
        """
        await self._reach("after_business_write")
        if execution.ended or self._is_closed:
            raise self._postpone()
        await self._conclude(execution, response)
        execution.ended = True
        await self._reach("chunk_item_ended")
        if self._is_direct and execution.is_last:
            # Its owner gets the response at once, and uses it after the commit only.
            if execution.on_commit:
                self._held.append((execution, None))
            return response
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._held.append((execution, settled))
        self._on_response(response)
        if not await settled:
            raise PostponedError("the transaction was rolled back")
        return response

    async def _conclude(self, execution: Execution, response: Response) -> None:
        request = execution.request
        writes, ttl = execution.effect_of(response)
        # A 5xx may have come of the other requests in the transaction, and what is undecided needs
        # to know what this one has written: both run alone.
        is_postponed = writes is Writes.UNDECIDED or response.status >= _FIRST_SERVER_ERROR
        if is_postponed or writes is Writes.UNDONE:
            execution.ended = True
            await execution.unit.rollback()
        else:
            try:
                await execution.unit.commit(None, None)
            except AbortedTransactionError:
                is_postponed = True
            self._has_writes = True
        if is_postponed or self.is_broken:
            execution.ended = True
            raise self._postpone(is_alone=True)
        record, audit = self._idempotency.written_by(execution, response, ttl)
        if record is not None:
            execution.effect = Effect.STORED
        elif writes is Writes.UNDONE:
            execution.effect = Effect.NONE
        self._keep(request, record, audit)
        if self._reports.are_read:
            report_committed(self._reports, request, response, record)

    async def abort(self, execution: Execution) -> None:
        """Roll back a request that raised or was cancelled; it runs again, alone."""
        if not execution.ended:
            execution.ended = True
            await execution.unit.rollback()
            self._postpone(is_alone=True)

    async def abandon_current(self) -> None:
        """Roll back the request that runs now, whose task does not end; it runs again, alone."""
        if self._current is not None:
            await self.abort(self._current)
        self._postpone(is_alone=True)

    # -- the end -----------------------------------------------------------------------------

    async def commit(self) -> bool:
        """Commit all requests that have responded; return False if they have to run again.

        Raises ``StoreUnavailableError`` if it is not known whether they were committed.
        """
        self._is_closed = True
        idempotency, chunk = self._idempotency, self._chunk
        if self.is_broken:
            await self.discard()
            return False
        if chunk is None or not (self._has_writes or self._records):
            if chunk is not None:
                await chunk.rollback()
            self._settle()
            return True

        async def commit() -> None:
            if self._sequences.has_numbers:
                on = await chunk.statements()
                if not await self._sequences.save(idempotency.clock.now(), on):
                    raise SupersededError(
                        "another request with one of these numbers was committed first"
                    )
            await chunk.commit(records, self._audits)

        records = list(self._records.values())
        try:
            points = "chunk_before_commit", "chunk_after_commit"
            await idempotency.commit_all(commit, records, points)
        except CommitUnknownError as unknown:
            if not await self._was_committed(unknown):
                await self.discard()
                return False
        except Exception:  # noqa: BLE001 - a deadlock, a deferred constraint, another record
            await self.discard()
            return False
        self._settle()
        return True

    async def discard(self) -> None:
        """Roll everything back; requests that have responded raise ``PostponedError``."""
        self._is_closed = True
        try:
            if self._chunk is not None:
                await self._chunk.rollback()
        finally:
            self._sequences.leave()
            for record_id in self._led:
                self._idempotency.in_flight.leave(record_id, None)
            self._led.clear()
            for _, settled in self._held:
                if settled is not None and not settled.done():
                    settled.set_result(False)

    async def _was_committed(self, unknown: CommitUnknownError) -> bool:
        """Find out after the connection died during COMMIT.

        All records are in one transaction, so one of them decides. The keys are still led here, so
        that no other request of this process comes in between.
        """
        request, record = self._first or (None, None)
        try:
            if request is None:
                raise StoreUnavailableError(  # noqa: TRY301 - as without a record
                    "the connection was lost during the commit; check the outcome before retrying",
                    is_for_callers=True,
                    reason="outcome_unknown",
                )
            found = await self._idempotency.resolve_unknown_commit(unknown, request, record)
        except StoreUnavailableError as error:
            if error.reason == "outcome_unknown":
                await self.discard()
                raise
            return False
        except RequestError:  # another request has used the key since
            return False
        return found is record

    def _settle(self) -> None:
        idempotency = self._idempotency
        for execution, _ in self._held:
            for callback in execution.on_commit:
                try:
                    callback()
                except Exception:  # noqa: BLE001 - the others are committed, too
                    _log.exception("a callback after the commit raised")
        self._reports.report()
        self._sequences.leave()
        for record_id in self._led:
            idempotency.end_lead(record_id, self._records.get(record_id), self._epoch)
        self._led.clear()
        for _, settled in self._held:
            if settled is not None and not settled.done():
                settled.set_result(True)

    def _keep(
        self, request: GuardedRequest, record: Record | None, audit: AuditEvent | None
    ) -> None:
        if record is not None:
            self._records[record.id] = record
            if request.sequence is not None:
                self._sequences.use(request)
            if self._first is None:
                self._first = request, record
        if audit is not None:
            self._audits.append(audit)

    def _postpone(self, *, is_alone: bool = False) -> PostponedError:
        self.is_postponed = True
        self.is_alone = self.is_alone or is_alone
        return PostponedError("the request runs again")

    async def _reach(self, point: str) -> None:
        if self._idempotency.faults:
            await self._idempotency.faults.reach(point)

    async def _begun(self) -> Chunk:
        if self._is_closed:
            raise self._postpone()
        if self._chunk is None:
            begun = self._chunk_store.begin_chunk(has_savepoints=self._has_savepoints)
            self._chunk = await self._idempotency.call_store("begin", begun)
        return self._chunk


def _ignore(_response: Response) -> None:
    return
