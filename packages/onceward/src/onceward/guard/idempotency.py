"""Runs each guarded request at most once: claim the key, run, commit everything together, replay.

One request, top to bottom::

    process ──▶ Replay                             the key has a record: send it
        │   ──▶ PayloadMismatchError, InProgressError, StaleActionError, StoreUnavailableError
        │       SequenceViolationError
        └───▶ Execution ──▶ (the handler runs) ──▶ finish ──▶ Response   committed: send it
                                              │          └──▶ Replay     another record counts
                                              └──▶ abort                 raised or cancelled
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Protocol, assert_never

from onceward.core.breaker import Breaker, BreakerState
from onceward.core.decision import (
    Decision,
    Expired,
    Fresh,
    Held,
    InProgress,
    Mismatched,
    Replayed,
    decide,
)
from onceward.core.error_formats import render_error
from onceward.core.idempotency_record import AuditEvent, Record, RecordId, Response
from onceward.core.policy import STORABLE_REDIRECTS, ErrorsStored
from onceward.errors import (
    CommitUnknownError,
    FeatureDisabledError,
    InProgressError,
    PayloadMismatchError,
    SequenceViolationError,
    StaleActionError,
    StoreUnavailableError,
    SupersededError,
    UnstoredWritesError,
)
from onceward.guard.cache_epoch import CacheEpoch, Epoch
from onceward.guard.execution import Execution
from onceward.guard.limits import Limits
from onceward.guard.record_lru_cache import RecordLruCache
from onceward.guard.record_quota import RecordQuota
from onceward.guard.redirects import leads_to_sign_in
from onceward.guard.request import (
    GuardedRequest,
    generated_at,
    mismatch_details,
    stale_error,
)
from onceward.guard.request_log import RequestLog, RequestNotes
from onceward.guard.request_thread import sleep
from onceward.guard.single_flight import SingleFlight
from onceward.guard.strict_sequences import StrictSequences, number_of
from onceward.observability.noop import NullMetrics, NullStoreMetrics
from onceward.ports import (
    BreakerMetrics,
    Claim,
    Claimed,
    Clock,
    FaultPoints,
    Found,
    Gate,
    Metrics,
    Outcome,
    PositionCache,
    RecordCache,
    Store,
    StoreMetrics,
)
from onceward.stores.sessions.gate import current_visit
from onceward_protocol.error_codes import CODES

__all__ = ["FAULT_POINTS", "Idempotency", "OutcomeMetrics", "Replay", "ttl_of"]

# Where tests kill the process, delay it or raise.
FAULT_POINTS: Final = ("after_claim", "after_business_write", "before_commit", "after_commit")

# Pauses between two attempts to claim a key that another process holds.
_CONFLICT: Final = 409
_UNPROCESSABLE: Final = 422
_POLL_FIRST_SECONDS: Final = 0.005
_POLL_MAX_SECONDS: Final = 0.25

# The staleness limit is inclusive and expiry is exclusive, so the record must live one second
# longer.
_ONE_SECOND: Final = timedelta(seconds=1)
# Some drivers return instants in the zone of the session, up to a day away, as a ``datetime``.
_STORED_YEARS: Final = range(2, 9999)

_NOTHING: Final[Mapping[str, Any]] = {}

_log = logging.getLogger("onceward.request")


class OutcomeMetrics(Protocol):
    """The part of ``Metrics`` that counts how requests ended."""

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        """Count the outcome of a guarded request."""

    def expired(self, endpoint: str) -> None:
        """Count an expired record that was found."""


class Replay:
    """The stored response is to be sent; the handler did not run, or its work was rolled back."""

    __slots__ = ("record",)

    def __init__(self, record: Record) -> None:
        self.record = record


class Idempotency:
    """Turns each guarded request into a replay, an error, or one execution of the handler."""

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
        limits: Limits = Limits(),  # noqa: B008 - immutable
        is_disabled: Callable[[str], bool] | None = None,
    ) -> None:
        self.store = store
        # The same store, if its transactions are sessions of the app.
        self.session_store = store if store.has_sessions else None
        self.cache = cache
        self.memory = RecordLruCache(memory_bytes)
        self.epoch = CacheEpoch(
            store,
            clock,
            self.memory.clear,
            positions=cache if isinstance(cache, PositionCache) else None,
        )
        most = limits.records_per_tenant
        self.quota = None if most is None else RecordQuota(store, clock, most)
        self.in_flight = SingleFlight(limits.waiting_per_tenant)
        self.sequences = StrictSequences(store, self.call_store)
        self.breaker = breaker or Breaker()
        self.clock = clock
        self.metrics = metrics
        # Requests that did not run, for operators; None: they are not logged.
        self.request_log: RequestLog | None = None
        # Without metrics the clock is not read for them.
        self._times_store = type(metrics) is not NullMetrics
        self.store_metrics = metrics if isinstance(metrics, StoreMetrics) else NullStoreMetrics()
        self.new_id = new_id
        self.faults = faults
        self._is_disabled = is_disabled
        # Errors that are sent only with these settings.
        self.optional_kinds = (
            *(() if most is None else ("quota_exceeded",)),
            *(() if is_disabled is None else ("feature_disabled",)),
        )
        self._breaker_metrics = metrics if isinstance(metrics, BreakerMetrics) else None
        # What was reported last.
        self._is_breaker_open = False
        # Endpoints whose unstored redirects were logged.
        self._logged_redirects: set[str] = set()
        self._cache_writes: set[asyncio.Task[None]] = set()

    def log_requests(self, log: RequestLog) -> None:
        """Log requests that do not run, and count all of them, for operators. Idempotent."""
        if self.request_log is None:
            self.request_log = log
            self.metrics = log.counting(self.metrics)

    @property
    def gate(self) -> Gate | None:
        """Limits how many requests use the app's connection pool at once."""
        return self.store.gate

    async def close(self) -> None:
        """Wait up to two seconds for writes to the cache."""
        await self.epoch.close()
        if self.quota is not None:
            await self.quota.close()
        if self._cache_writes:
            await asyncio.wait(self._cache_writes, timeout=2)

    # -- before the handler ----------------------------------------------------------------

    async def process(self, request: GuardedRequest, **sharing: Any) -> Replay | Execution:
        """Return a replay, or an execution with the key claimed.

        ``sharing`` are options of a store with sessions: the session that the execution is to use.
        The caller must end an execution with ``finish`` or ``abort``. Raises the
        ``RequestError`` or ``StoreUnavailableError`` to respond with.
        """
        record_id = request.record_id
        if record_id is None:
            self.refuse_disabled(request)
            stale = stale_error(request, self.clock.now())
            if stale is not None:  # without a key there is nothing to record
                self.metrics.outcome(request.endpoint, "stale")
                raise stale
            session = {"session": sharing["session"]} if "session" in sharing else {}
            begun = self.store.begin(**session)
            return Execution(request, await self.call_store("begin", begun))
        deadline: float | None = None
        while True:
            now = self.clock.now()
            record = self.memory.get(record_id, now, self.epoch.current)
            if record is not None and self.epoch.is_due():
                await self.epoch.check()
                record = self.memory.get(record_id, now, self.epoch.current)
            if record is None and not self.in_flight.lead(record_id):
                if deadline is None:
                    deadline = self.deadline_of(request)
                record = await self._wait_for_leader(request, record_id, deadline)
                if record is None:
                    continue
            if record is not None:
                replay = await self._resolve(request, decide(record, request.fingerprint, now))
                if replay is not None:
                    return replay
                continue
            return await self._lead(request, record_id, now, deadline, sharing)

    async def _lead(  # noqa: C901 - one branch per way a claim can end
        self,
        request: GuardedRequest,
        record_id: RecordId,
        now: datetime,
        deadline: float | None,
        sharing: Mapping[str, Any],
    ) -> Replay | Execution:
        """Claim the key as the only request of this process with it."""
        try:
            if self.epoch.current.value is None:
                await self.release_connection()
                await self.epoch.check()
            # Of before the claim: a request on a connection of an earlier epoch must not put its
            # record into the caches of a later one.
            epoch = self.epoch.current
            claiming = self.claim if request.sequence is None else self._claim_in_turn
            claim = await claiming(request, record_id, now, deadline, sharing)
        except BaseException:
            self.in_flight.leave(record_id, None)
            raise
        if isinstance(claim, Found):
            self.in_flight.leave(record_id, claim.record)
            decision = decide(claim.record, request.fingerprint, self.clock.now())
            replay = await self._resolve(request, decision)
            if replay is None:  # it expired between the look-up and now
                raise StoreUnavailableError(
                    "the record expired just now; send it again",
                    is_for_callers=True,
                    reason="record_changed",
                )
            return replay
        if claim.after_expiry:
            self.metrics.expired(request.endpoint)
        # From here on, ending the execution also ends the lead (``_end``).
        execution = Execution(request, claim.unit, epoch)
        try:
            if self.faults:
                await self.faults.reach("after_claim")
            if self._is_disabled is not None:
                try:
                    self.refuse_disabled(request)
                except FeatureDisabledError:
                    await execution.unit.rollback()
                    self._end(execution, None)
                    raise
            if self.quota is not None:  # after the look-up: replays are not refused
                await self.quota.check(record_id.tenant)
            if request.policy.staleness is not None:
                stale = stale_error(request, self.clock.now())
                if stale is not None:
                    await self._refuse_stale(execution, stale)
                    raise stale  # noqa: TRY301 - after it was recorded
        except BaseException:
            await self._roll_back(execution)
            raise
        return execution

    def refuse_disabled(self, request: GuardedRequest) -> None:
        """Raise if the endpoint is switched off. A replay is not refused: it has happened."""
        if self._is_disabled is not None and self._is_disabled(request.endpoint):
            self.metrics.outcome(request.endpoint, "refused")
            raise FeatureDisabledError("this operation is switched off on this server")

    async def claim(
        self,
        request: GuardedRequest,
        record_id: RecordId,
        now: datetime,
        deadline: float | None,
        sharing: Mapping[str, Any] = _NOTHING,
    ) -> Claimed | Found:
        """Claim the key; while another process holds it, poll without holding a connection."""
        pause = _POLL_FIRST_SECONDS
        while True:
            if self.cache is not None:
                await self.epoch.check()
            epoch = self.epoch.current
            if self.cache is not None and epoch.value is not None and epoch.is_compared:
                cached = await self.cache.get(record_id, now, epoch=epoch.value)
                if cached is not None and epoch is self.epoch.current:
                    self.memory.put(cached, epoch)
                    return Found(cached)
            claiming = self.store.claim(record_id, now, **sharing)
            claim: Claim = await self.call_store("claim", claiming)
            if isinstance(claim, Found):
                self.remember(claim.record, epoch)
            if not isinstance(claim, Held):
                return claim
            if deadline is None:
                deadline = self.deadline_of(request)
            await self._sleep(request, record_id, min(pause, deadline - self.clock.monotonic()))
            pause = min(pause * 2, _POLL_MAX_SECONDS)
            now = self.clock.now()

    async def _claim_in_turn(
        self,
        request: GuardedRequest,
        record_id: RecordId,
        now: datetime,
        deadline: float | None,
        sharing: Mapping[str, Any],
    ) -> Claimed | Found:
        """Wait until no other request of the stream runs, then claim the key.

        A claim returns with the turn, which ``_end`` passes on. Raises ``SequenceViolationError``
        if the number is not the next one, unless the key has a record.
        """
        turns, stream = self.sequences.turns, request.stream
        if not turns.take(stream):
            deadline = self.deadline_of(request) if deadline is None else deadline
            await self._wait_for_turn(request, deadline)
        try:
            claim = await self._claim_next(request, record_id, now, deadline, sharing)
        except BaseException:
            turns.leave(stream)
            raise
        if isinstance(claim, Found):
            turns.leave(stream)
        return claim

    async def _wait_for_turn(self, request: GuardedRequest, deadline: float) -> None:
        started = self.clock.monotonic()
        await self.release_connection()
        try:
            with self.in_flight.waiting(request.principal.tenant):
                await self.sequences.turns.wait(
                    request.stream, number_of(request), max(0.0, deadline - started)
                )
        except TimeoutError:
            raise self.in_progress(request) from None
        finally:
            self.metrics.waited(request.endpoint, self.clock.monotonic() - started)

    async def _claim_next(
        self,
        request: GuardedRequest,
        record_id: RecordId,
        now: datetime,
        deadline: float | None,
        sharing: Mapping[str, Any],
    ) -> Claimed | Found:
        """Claim the key and lock the stream; while another process has it, poll as for a key."""
        sequences, pause = self.sequences, _POLL_FIRST_SECONDS
        # A session of the app cannot be claimed twice, and on SQLite a statement in the transaction
        # would take the turn to write before the handler does: those look first.
        has_locks = sequences.numbers.has_locks
        looks_first = not has_locks or bool(sharing) or self.store.has_thread_sessions
        while True:
            position = await sequences.look(request) if looks_first else None
            if position is not None or not looks_first:
                claim = await self.claim(request, record_id, now, deadline, sharing)
                if isinstance(claim, Found):
                    return claim
                try:
                    if has_locks:
                        position = await sequences.lock(request, claim.unit.statements)
                except BaseException:
                    await claim.unit.rollback()
                    raise
                if position is not None and position.expected == number_of(request):
                    return claim
                await claim.unit.rollback()
                if position is not None:
                    self.metrics.outcome(request.endpoint, "refused")
                    raise await sequences.refusal(request, position)
                if looks_first:
                    raise self.in_progress(request)
            deadline = self.deadline_of(request) if deadline is None else deadline
            await self._sleep(request, record_id, min(pause, deadline - self.clock.monotonic()))
            pause = min(pause * 2, _POLL_MAX_SECONDS)
            now = self.clock.now()

    async def _sleep(self, request: GuardedRequest, record_id: RecordId, seconds: float) -> None:
        """Wait as a duplicate, unless the time is up or too many of its tenant wait."""
        if seconds <= 0:
            raise self.in_progress(request)
        try:
            with self.in_flight.waiting(record_id.tenant):
                await sleep(seconds)
        except TimeoutError:
            raise self.in_progress(request) from None

    async def _wait_for_leader(
        self, request: GuardedRequest, record_id: RecordId, deadline: float
    ) -> Record | None:
        started = self.clock.monotonic()
        await self.release_connection()
        try:
            return await self.in_flight.wait(record_id, max(0.0, deadline - started))
        except TimeoutError:
            raise self.in_progress(request) from None
        finally:
            self.metrics.waited(request.endpoint, self.clock.monotonic() - started)

    async def release_connection(self) -> None:
        """Return the connection that the sign-in of a sync app has read with, before a wait.

        If duplicates kept theirs, the first request could find none in the pool. Nor must they
        count as requests that are about to take one.
        """
        if self.store.has_thread_sessions:
            await self.store.release_connection()
        if self.store.is_gated:
            visit = current_visit()
            if visit is not None:
                visit.leave_without_connection()

    def deadline_of(self, request: GuardedRequest) -> float:
        """Return the monotonic time until which a duplicate may wait."""
        return self.clock.monotonic() + request.policy.wait.total_seconds()

    def in_progress(self, request: GuardedRequest) -> InProgressError:
        """Count a duplicate that has waited too long, and return its error."""
        self.metrics.outcome(request.endpoint, "in_progress")
        if self.request_log is not None:
            code = _code(request, "in_progress")
            self.request_log.note(request, "in_progress", _CONFLICT, code=code)
        return InProgressError(
            "the first request with this key is still running"
            if request.sequence is None
            else "this request, or an earlier one of this client, is still running",
            retry_after_seconds=1,
        )

    def resolve(
        self,
        request: GuardedRequest,
        decision: Decision,
        metrics: OutcomeMetrics | None = None,
        log: RequestNotes | None = None,
    ) -> Replay | None:
        """Return the replay a decision calls for, raise its error, or return None to run.

        ``metrics`` counts the outcome and ``log`` logs it, in place of those of the app.
        """
        counted = metrics or self.metrics
        log = log or self.request_log
        match decision:
            case Replayed(record):
                counted.outcome(request.endpoint, "replayed")
                if log is not None:
                    log.note(request, "replayed", record.status, record)
                return Replay(record)
            case Mismatched(expected, received, record):
                counted.outcome(request.endpoint, "mismatched")
                if log is not None:
                    code = _code(request, "payload_mismatch")
                    log.note(request, "mismatched", _mismatch_status(request), record, code=code)
                raise PayloadMismatchError(
                    "this key was used for a different request",
                    details=mismatch_details(request, expected, received),
                )
            case Expired():
                counted.expired(request.endpoint)
                return None
            case Fresh() | InProgress():
                return None
            case _:
                assert_never(decision)

    async def _resolve(self, request: GuardedRequest, decision: Decision) -> Replay | None:
        """Do as ``resolve``, but replay only if the number was used for the key."""
        if request.sequence is not None and isinstance(decision, Replayed):
            try:
                await self.sequences.check_replay(request)
            except SequenceViolationError:
                self.metrics.outcome(request.endpoint, "refused")
                raise
        return self.resolve(request, decision)

    async def _refuse_stale(self, execution: Execution, error: StaleActionError) -> None:
        """Commit the record of a stale action: its audit trail. The handler did not run."""
        kept: Record | None = None
        request, policy = execution.request, execution.request.policy
        self.metrics.outcome(request.endpoint, "stale")
        try:
            if policy.errors_stored is ErrorsStored.NONE:
                await execution.unit.rollback()
                return
            response = render_error(
                error, policy.error_format, request.request_id, ietf_statuses=policy.ietf_statuses
            )
            record = self.new_record(request, response, policy.error_ttl)
            await self._commit(execution, record, None)
            kept = record
        except (SupersededError, CommitUnknownError) as unknown:
            raise StoreUnavailableError(
                "the response could not be recorded; try again",
                is_for_callers=True,
                reason="outcome_unknown",
            ) from unknown
        finally:
            self._end(execution, kept)

    # -- after the handler -----------------------------------------------------------------

    async def finish(self, execution: Execution, response: Response) -> Response | Replay:
        """Commit the handler's response, or roll back where it is an error; return what to send.

        Raises the ``RequestError`` or ``StoreUnavailableError`` to respond with instead.
        """
        kept: Record | None = None
        try:
            outcome, kept = await self._conclude(execution, response)
        except BaseException:
            await execution.unit.rollback()  # does nothing if it has ended
            raise
        finally:
            self._end(execution, kept)
        return outcome

    async def _conclude(
        self, execution: Execution, response: Response
    ) -> tuple[Response | Replay, Record | None]:
        """Return what to send and the record that is committed now, if any."""
        request = execution.request
        if self.faults:
            await self.faults.reach("after_business_write")
        if execution.unit.superseded:
            return await self._replay_winner(execution), None
        is_error = response.status >= 400  # noqa: PLR2004 - HTTP errors start here
        if is_error and (not execution.writes_kept_on_error or response.status >= 500):  # noqa: PLR2004
            return await self._conclude_error(execution, response)
        ttl = ttl_of(execution, response)
        may_be_free = ttl is None or response.status >= 300  # noqa: PLR2004 - the first redirect
        if not is_error and may_be_free and await _frees_the_key(execution, response, ttl):
            return await self._conclude_unstored(execution, response), None
        record = self.new_record(request, response, ttl)
        audit = None if is_error else self.new_audit_event(execution, response, record)
        try:
            await self._commit(execution, record, audit)
        except SupersededError:
            return await self._replay_winner(execution), None
        except CommitUnknownError as unknown:
            committed = await self._committed_after(unknown, request, record)
            if committed is not record:
                return Replay(committed), committed
        for callback in execution.on_commit:
            callback()
        self.metrics.outcome(request.endpoint, "refused" if is_error else "fresh")
        if is_error and record is None and self.request_log is not None:
            self.request_log.note_response(request, "refused", response)
        return response, record

    async def _conclude_unstored(self, execution: Execution, response: Response) -> Response:
        """Free the key after a response below 400 that is not stored, if nothing was written.

        A commit would be repeated by each retry, and a rollback would undo a success: with writes,
        the client gets an error.
        """
        request = execution.request
        has_written = await _has_written(execution)
        await execution.unit.rollback()
        if has_written:
            self.metrics.outcome(request.endpoint, "rolled_back")
            if self.request_log is not None:
                code = _code(request, "internal")
                self.request_log.note(request, "rolled_back", CODES["internal"].status, code=code)
            raise UnstoredWritesError(_unstored_writes(execution, response))
        self.metrics.outcome(request.endpoint, "refused")
        if self.request_log is not None:
            self.request_log.note_response(request, "refused", response)
        if (
            execution.is_stored
            and request.endpoint not in self._logged_redirects
            and not leads_to_sign_in(response, request.policy, request.path)
        ):
            self._logged_redirects.add(request.endpoint)
            _log.warning(
                "%s responds %d, which is not stored: a retry runs the handler again. If it "
                "redirects after a success, write Policy(redirects_stored={302, 303})",
                request.endpoint,
                response.status,
            )
        return response

    async def _conclude_error(
        self, execution: Execution, response: Response
    ) -> tuple[Response | Replay, Record | None]:
        """Roll the handler's writes back; store the response if the policy says so."""
        request = execution.request
        await execution.unit.rollback()
        outcome: Outcome = "rolled_back" if response.status >= 500 else "refused"  # noqa: PLR2004
        self.metrics.outcome(request.endpoint, outcome)
        record = self.new_record(request, response, ttl_of(execution, response))
        if record is None:
            if self.request_log is not None:
                self.request_log.note_response(request, outcome, response)
            return response, None
        claim = await self.call_store("claim", self.store.claim(record.id, record.created_at))
        if isinstance(claim, Found):
            decision = decide(claim.record, request.fingerprint, record.created_at)
            return await self._resolve(request, decision) or response, claim.record
        if isinstance(claim, Held):  # another process runs it now; its response will count
            raise self.in_progress(request)
        execution.unit = claim.unit
        try:
            await self._commit(execution, record, None)
        except SupersededError:  # another process has committed a response in the meantime
            return await self._replay_winner(execution), None
        except CommitUnknownError as unknown:
            # Without its record a refusal is not final: a later copy of the request runs again.
            committed = await self._committed_after(unknown, request, record)
            if committed is not record:
                return Replay(committed), committed
        return response, record

    async def _commit(
        self, execution: Execution, record: Record | None, audit: AuditEvent | None
    ) -> None:
        if self.faults:
            await self.faults.reach("before_commit")
        started = self.clock.monotonic() if self._times_store else 0.0
        try:
            if record is not None and execution.request.sequence is not None:
                await self._use_number(execution, record)
            await execution.unit.commit(record, audit)
        except CommitUnknownError:
            self.store_metrics.commit_failed("request", "unknown")
            raise
        except StoreUnavailableError:
            self.store_metrics.commit_failed("request", "rolled_back")
            raise
        if self._times_store:
            self.metrics.store_time("commit", self.clock.monotonic() - started)
        if self.faults:
            await self.faults.reach("after_commit")
        if self.quota is not None and record is not None:
            await self.quota.added(record.id.tenant)

    async def _use_number(self, execution: Execution, record: Record) -> None:
        """Use the number of the request. Raises ``SupersededError`` if another process has."""
        unit = execution.unit
        try:
            is_next = await self.sequences.use(
                execution.request, record.created_at, unit.statements
            )
        except BaseException:
            await unit.rollback()
            raise
        if not is_next:
            await unit.rollback()
            raise SupersededError("another request with this number was committed first")

    async def _replay_winner(self, execution: Execution) -> Replay:
        """Roll back and replay the record that another request committed for this key.

        Raises ``SequenceViolationError`` if another key has used the number.
        """
        request = execution.request
        await execution.unit.rollback()
        assert request.record_id is not None  # noqa: S101 - without a key there is no record
        now = self.clock.now()
        record = await self.call_store("find", self.store.find(request.record_id, now))
        replay = await self._resolve(request, decide(record, request.fingerprint, now))
        if replay is None and request.sequence is not None:
            await self.sequences.check_replay(request)
        if replay is None:
            raise StoreUnavailableError(
                "the record of this key has been removed; try again",
                is_for_callers=True,
                reason="record_changed",
            )
        return replay

    async def _committed_after(
        self, unknown: CommitUnknownError, request: GuardedRequest, pending: Record | None
    ) -> Record:
        """Return the record that was committed, or raise what to respond with."""
        if unknown.is_cut:
            raise _cut(unknown) from unknown
        return await self.resolve_unknown_commit(request, pending)

    async def resolve_unknown_commit(
        self, request: GuardedRequest, pending: Record | None
    ) -> Record:
        """Find out, after the connection died during COMMIT, which record was committed.

        Claims the key on a new connection instead of looking it up: as long as the old
        connection's transaction is alive on the server, the claim is refused.
        """
        if pending is None:
            raise StoreUnavailableError(
                "the connection was lost during the commit; check the outcome before retrying",
                is_for_callers=True,
                reason="outcome_unknown",
            )
        deadline = self.deadline_of(request)
        try:
            claim = await self.claim(request, pending.id, self.clock.now(), deadline)
        except InProgressError as error:
            raise StoreUnavailableError(
                "the outcome is not known yet; send it again",
                is_for_callers=True,
                reason="outcome_unknown",
            ) from error
        if isinstance(claim, Claimed):
            await claim.unit.rollback()
            raise StoreUnavailableError(
                "the connection was lost before the commit; send it again", is_for_callers=True
            )
        # Compare every field: clients repeat their X-Request-ID, so it identifies no attempt.
        if claim.record == pending:
            return pending
        decision = decide(claim.record, request.fingerprint, self.clock.now())
        replay = await self._resolve(request, decision)
        return replay.record if replay is not None else claim.record

    async def abort(self, execution: Execution) -> None:
        """Roll back and free the key. Does nothing if the execution has ended."""
        if not execution.ended:
            # What the framework responds is not known here: 500, or nothing to a caller who left.
            if self.request_log is not None:
                self.request_log.note(execution.request, "rolled_back", None)
            await self._roll_back(execution)

    async def _roll_back(self, execution: Execution) -> None:
        """Do as ``abort``, for a request whose error is logged elsewhere."""
        if not execution.ended:
            try:
                await execution.unit.rollback()
                self.metrics.outcome(execution.request.endpoint, "rolled_back")
            finally:
                self._end(execution, None)

    def _end(self, execution: Execution, kept: Record | None) -> None:
        """Mark the end and pass the committed record, if any, to the duplicates that wait."""
        execution.ended = True
        if self.store.is_gated:
            visit = current_visit()
            if visit is not None:  # what the app does now needs no second connection
                visit.leave()
        if kept is not None:
            self.remember(kept, execution.epoch)
        if execution.request.sequence is not None:
            self.sequences.turns.leave(execution.request.stream)
        if execution.request.record_id is not None:
            self.in_flight.leave(execution.request.record_id, kept)

    # -- records ---------------------------------------------------------------------------

    def new_record(
        self, request: GuardedRequest, response: Response, ttl: timedelta | None
    ) -> Record | None:
        """Return the record of a response; None without a key or a TTL."""
        if request.record_id is None or ttl is None:
            return None
        created_at = self.clock.now()
        succeeded = response.status < 400  # noqa: PLR2004
        made_at = generated_at(request)
        return Record(
            id=request.record_id,
            fingerprint=request.fingerprint,
            status=response.status,
            headers=response.stored_headers(request.policy.replay_headers),
            body=response.body,
            created_at=created_at,
            expires_at=_expires_at(request, created_at, ttl, made_at, succeeded=succeeded),
            request_id=request.request_id,
            correlation_id=request.correlation_id,
            audit_id=self.new_id(created_at) if request.policy.audit and succeeded else None,
            client_generated_at=made_at if made_at and made_at.year in _STORED_YEARS else None,
        )

    def new_audit_event(
        self, execution: Execution, response: Response, record: Record | None
    ) -> AuditEvent | None:
        """Return the audit event of a success; None if the policy writes none."""
        request = execution.request
        if not request.policy.audit:
            return None
        created_at = self.clock.now() if record is None else record.created_at
        audit_id = None if record is None else record.audit_id
        return AuditEvent(
            id=audit_id or self.new_id(created_at),
            tenant=request.principal.tenant,
            actor=request.principal.actor,
            endpoint=request.endpoint,
            payload_hash=request.fingerprint.body_hash,
            status=response.status,
            request_id=request.request_id,
            correlation_id=request.correlation_id,
            created_at=created_at,
            resource=execution.resource,
            version=execution.version,
        )

    def remember(self, record: Record, epoch: Epoch | None) -> None:
        """Keep a record of this epoch in memory, and write it to the cache in the background.

        Does nothing if the epoch has ended: the database may have lost the record since.
        """
        if epoch is None or epoch is not self.epoch.current:
            return
        self.memory.put(record, epoch)
        if self.cache is not None and epoch.value is not None:
            write = self.cache.put(record, self.clock.now(), epoch=epoch.value)
            task = asyncio.ensure_future(write)
            self._cache_writes.add(task)
            task.add_done_callback(self._cache_writes.discard)

    # -- the store, behind its breaker -----------------------------------------------------

    async def call_store(self, operation: str, work: Awaitable[Any]) -> Any:
        """Call the store, unless its breaker is open."""
        breaker = self.breaker
        is_closed = breaker.state is BreakerState.CLOSED
        started = 0.0 if is_closed and not self._times_store else self.clock.monotonic()
        wait = None if is_closed else breaker.retry_after(started)
        if wait is not None:
            if asyncio.iscoroutine(work):
                work.close()
            raise StoreUnavailableError(
                "the store is not responding; try again shortly",
                retry_after_seconds=wait,
                is_for_callers=True,
                reason="breaker_open",
            )
        try:
            result = await work
        except StoreUnavailableError as error:
            if error.is_outage:
                breaker.failed(self.clock.monotonic())
            else:  # one statement failed: the store has responded
                breaker.succeeded()
            self._report_breaker()
            raise
        except Exception:
            breaker.abandoned()
            raise
        breaker.succeeded()
        if self._is_breaker_open:
            self._report_breaker()
        if self._times_store:
            self.metrics.store_time(operation, self.clock.monotonic() - started)
        return result

    def _report_breaker(self) -> None:
        """Report that the breaker has opened or closed. While it probes, it counts as open."""
        is_open = self.breaker.state is not BreakerState.CLOSED
        if is_open is not self._is_breaker_open:
            self._is_breaker_open = is_open
            if self._breaker_metrics is not None:
                self._breaker_metrics.breaker_changed(is_open=is_open)


def _cut(unknown: CommitUnknownError) -> StoreUnavailableError:
    """Return the error for a commit that took too long: a look-up would wait for it again."""
    return StoreUnavailableError(
        f"the commit took too long, and its outcome is not known: {unknown}",
        reason="outcome_unknown",
    )


def _expires_at(
    request: GuardedRequest,
    created_at: datetime,
    ttl: timedelta,
    made_at: datetime | None,
    *,
    succeeded: bool,
) -> datetime:
    """Return when the record expires: never before its action is stale.

    An action counts for cap + grace from its ``clientGeneratedAt``, which may be longer than the
    TTL. It must not run again in between, unless the policy sets ``outlive_staleness`` to False.
    """
    expires_at = created_at + ttl
    rule = request.policy.staleness
    if rule is None or made_at is None or not request.policy.outlive_staleness or not succeeded:
        return expires_at
    return max(expires_at, made_at + rule.cap + rule.grace + _ONE_SECOND)


def ttl_of(execution: Execution, response: Response) -> timedelta | None:
    """Return how long to store a response; None if it is not stored."""
    ttl = execution.request.policy.ttl_for(response.status)
    if ttl is None or not execution.is_stored:
        return None
    return execution.ttl or ttl


async def _frees_the_key(execution: Execution, response: Response, ttl: timedelta | None) -> bool:
    """Return whether a redirect, or a success without a TTL, is not stored, and frees the key."""
    request = execution.request
    if request.record_id is None or execution.writes_kept_on_error:
        return False
    if ttl is None:
        return True
    is_sign_in = leads_to_sign_in(response, request.policy, request.path)
    return is_sign_in and not await _has_written(execution)


async def _has_written(execution: Execution) -> bool:
    """Return whether the handler has written in its transaction."""
    try:
        return await execution.unit.has_written()
    except StoreUnavailableError:
        raise
    except Exception:  # noqa: BLE001 - a failed statement has aborted the transaction
        return True


def _unstored_writes(execution: Execution, response: Response) -> str:
    """Return what the developer has to change."""
    endpoint, status = execution.request.endpoint, response.status
    undone = "Its writes were rolled back, because a retry would write again"
    if not execution.is_stored:
        return (
            f"{endpoint} has written, and called no_store(). {undone}. If that is intended, call "
            "keep_writes_on_error(), too"
        )
    if status in STORABLE_REDIRECTS:
        return (
            f"{endpoint} has written, and responds {status}, which its policy does not store. "
            f"{undone}. If it redirects after a success, write "
            f"Policy(redirects_stored={{{status}}})"
        )
    return (
        f"{endpoint} has written, and responds {status}, which is never stored. {undone}. After a "
        "success, respond 303 and write Policy(redirects_stored={303})"
    )


def _code(request: GuardedRequest, kind: str) -> str:
    return CODES[kind].name(request.policy.error_format)


def _mismatch_status(request: GuardedRequest) -> int:
    return _UNPROCESSABLE if request.policy.ietf_statuses else _CONFLICT
