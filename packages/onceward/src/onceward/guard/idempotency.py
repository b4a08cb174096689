"""Runs each guarded request at most once: claim the key, run, commit everything together, replay.

One request, top to bottom::

    process ──▶ Replay                             the key has a record: send it
        │   ──▶ PayloadMismatchError, InProgressError, StaleActionError, StoreUnavailableError
        │       SequenceViolationError
        └───▶ Execution ──▶ (the handler runs) ──▶ finish ──▶ Response   committed: send it
                                              │          └──▶ Replay     another record counts
                                              └──▶ abort                 raised or cancelled

``RequestChunk`` takes the same steps for several requests in one transaction: ``resolve``,
``check_claimed``, ``record_of_stale``, ``written_by``, ``commit_all``, ``resolve_unknown_commit``,
``end_lead``. It differs in when it claims and in when a request has ended.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, assert_never

import msgspec

from onceward.errors import (
    CommitUnknownError,
    FeatureDisabledError,
    InProgressError,
    PayloadMismatchError,
    QuotaExceededError,
    RequestError,
    SequenceViolationError,
    StaleActionError,
    StoreUnavailableError,
    SupersededError,
    UnstoredWritesError,
)
from onceward.guard.caches import CacheEpoch, Epoch, RecordLruCache
from onceward.guard.error_formats import INTERNAL, render_error, status_of
from onceward.guard.execution import Execution, Replay, Writes
from onceward.guard.limits import Limits, RecordQuota
from onceward.guard.policy import ErrorsStored
from onceward.guard.request import GuardedRequest, mismatch_details, new_record, stale_error
from onceward.guard.request_log import DeferredReports, Reports, report_committed
from onceward.guard.sequences import StrictSequences
from onceward.guard.single_flight import Duplicates, SingleFlight
from onceward.guard.unstored_responses import (
    frees_the_key,
    has_written,
    redirect_warning,
    writes_error,
)
from onceward.observability.noop import NullMetrics, NullStoreMetrics
from onceward.ports import (
    BreakerMetrics,
    Claim,
    Claimed,
    Clock,
    FaultPoints,
    Found,
    Held,
    Metrics,
    Outcome,
    PositionCache,
    RecordCache,
    Store,
    StoreMetrics,
)
from onceward.records import (
    AuditEvent,
    Record,
    RecordId,
    RequestFingerprint,
    Response,
)
from onceward.stores.breaker import Breaker, BreakerState
from onceward.stores.clock import StoreClock
from onceward.stores.sessions.gate import current_visit
from onceward_protocol.effect import Effect
from onceward_protocol.error_codes import CODES
from onceward_protocol.ids import new_id

# Where tests kill the process, delay it or raise.
FAULT_POINTS: Final = ("after_claim", "after_business_write", "before_commit", "after_commit")

_FIRST_ERROR: Final = 400
_FIRST_SERVER_ERROR: Final = 500
_NOTHING: Final[Mapping[str, Any]] = {}

_log = logging.getLogger("onceward.request")


@dataclass(frozen=True, slots=True)
class Fresh:
    """The key is unknown: run the handler."""


class Replayed(msgspec.Struct, frozen=True):
    """The key has a record of the same request: send the stored response."""

    record: Record


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The key has a record of a different request."""

    expected_hash: str
    received_hash: str
    record: Record


@dataclass(frozen=True, slots=True)
class InProgress:
    """The first request with this key is running: wait for it, or return 409."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The key has an expired record: run the handler as if the key were unknown."""

    record: Record


Decision = Fresh | Replayed | Mismatched | InProgress | Expired

_FRESH: Final = Fresh()
_IN_PROGRESS: Final = InProgress()


def decide(known: Record | Held | None, fingerprint: RequestFingerprint, now: datetime) -> Decision:
    """Compare what the store has under the key with the fingerprint of this request."""
    if known is None:
        return _FRESH
    if isinstance(known, Held):
        return _IN_PROGRESS
    if known.expires_at <= now:
        return Expired(known)
    if known.fingerprint == fingerprint:
        return Replayed(known)
    if known.fingerprint.body_hash != fingerprint.body_hash:
        return Mismatched(known.fingerprint.body_hash, fingerprint.body_hash, known)
    # The same body sent to another path or query: only the request hashes differ.
    return Mismatched(known.fingerprint.request_hash, fingerprint.request_hash, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyOptions:
    """Settings of an app."""

    # Records beside the store, e.g. in Redis.
    cache: RecordCache | None = None
    # Records in memory.
    memory_bytes: int = 32 * 1024 * 1024
    breaker: Breaker | None = None
    faults: FaultPoints | None = None
    limits: Limits = field(default_factory=Limits)
    # Whether an endpoint is switched off.
    is_disabled: Callable[[str], bool] | None = None


class Idempotency:
    """Turns each guarded request into a replay, an error, or one execution of the handler."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        metrics: Metrics,
        options: IdempotencyOptions = IdempotencyOptions(),  # noqa: B008 - immutable
    ) -> None:
        limits, cache = options.limits, options.cache
        self.store = store
        # The same store, if its transactions are sessions of the app.
        self.session_store = store if store.has_sessions else None
        # Whether requests have to be admitted to the app's connection pool.
        self.is_gated = store.is_gated
        # The event loop in which the store is open, with its background tasks.
        self.opened_in: asyncio.AbstractEventLoop | None = None
        self.cache = cache
        self.memory = RecordLruCache(options.memory_bytes)
        self.epoch = CacheEpoch(
            store,
            clock,
            self.memory.clear,
            positions=cache if isinstance(cache, PositionCache) else None,
        )
        most = limits.records_per_tenant
        self.quota = None if most is None else RecordQuota(store, clock, most)
        self.reports = Reports(metrics)
        self.in_flight = SingleFlight(limits.waiting_per_tenant)
        self.duplicates = Duplicates(store, clock, self.in_flight, self.reports)
        self.breaker = options.breaker or Breaker()
        self._breaker_metrics = metrics if isinstance(metrics, BreakerMetrics) else None
        # What was reported last.
        self._is_breaker_open = False
        self.sequences = StrictSequences(store, self.call_store, clock, self.duplicates)
        self.clock = clock
        self._store_clock = clock if isinstance(clock, StoreClock) else StoreClock(clock)
        # Without metrics the clock is not read for them.
        self._times_store = type(metrics) is not NullMetrics
        self._store_metrics = metrics if isinstance(metrics, StoreMetrics) else NullStoreMetrics()
        self.faults = options.faults
        self._is_disabled = options.is_disabled
        # Errors that are sent only with these settings.
        self.optional_kinds = (
            *(() if most is None else (QuotaExceededError.kind,)),
            *(() if options.is_disabled is None else (FeatureDisabledError.kind,)),
        )
        # Endpoints whose unstored redirects were logged.
        self._logged_redirects: set[str] = set()
        self._cache_writes: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
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
                self.reports.outcome(request.endpoint, "stale")
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
                    deadline = self.duplicates.deadline_of(request)
                record = await self.duplicates.wait_for_leader(request, record_id, deadline)
                if record is None:
                    continue
            if record is not None:
                replay = await self._resolve(request, decide(record, request.fingerprint, now))
                if replay is not None:
                    return replay
                continue
            return await self._lead(request, record_id, now, deadline, sharing)

    async def _lead(
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
                await self.duplicates.release_connection()
                await self.epoch.check()
            # Of before the claim: a request on a connection of an earlier epoch must not put its
            # record into the caches of a later one.
            epoch = self.epoch.current
            if request.sequence is None:
                claim = await self.claim(request, record_id, now, deadline, sharing)
            else:
                # It returns with the turn, which ``_end`` passes on.
                claim = await self.sequences.claim(
                    request,
                    now,
                    deadline,
                    lambda at, until: self.claim(request, record_id, at, until, sharing),
                    has_session=bool(sharing),
                )
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
        # From here on, ending the execution also ends the lead (``_end``).
        execution = Execution(request, claim.unit, epoch)
        try:
            stale = await self.check_claimed(request, self.reports, after_expiry=claim.after_expiry)
            if stale is not None:
                await self._refuse_stale(execution, stale)
                raise stale  # noqa: TRY301 - after it was recorded
        except FeatureDisabledError:  # counted as refused
            await execution.unit.rollback()
            self._end(execution, None)
            raise
        except BaseException:
            await self._roll_back(execution)
            raise
        return execution

    async def check_claimed(
        self, request: GuardedRequest, reports: Reports | DeferredReports, *, after_expiry: bool
    ) -> StaleActionError | None:
        """Check a request that has claimed its key. Raises what refuses it.

        Returns the error of an action that is too old: its record is to be kept.
        """
        if after_expiry:
            reports.expired(request.endpoint)
        if self.faults:
            await self.faults.reach("after_claim")
        try:
            if self._is_disabled is not None:
                self.refuse_disabled(request)
            if self.quota is not None:  # after the look-up: replays are not refused
                await self.quota.check(request.principal.tenant)
        except RequestError as error:
            error.effect = Effect.NONE
            raise
        if request.policy.staleness is None:
            return None
        stale = stale_error(request, self.clock.now())
        if stale is not None:
            reports.outcome(request.endpoint, "stale")
        return stale

    def refuse_disabled(self, request: GuardedRequest) -> None:
        """Raise if the endpoint is switched off. A replay is not refused: it has happened."""
        if self._is_disabled is not None and self._is_disabled(request.endpoint):
            self.reports.outcome(request.endpoint, "refused")
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
        pause = 0.0
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
                deadline = self.duplicates.deadline_of(request)
            pause = await self.duplicates.poll(request, pause, deadline)
            now = self.clock.now()

    def resolve(
        self, request: GuardedRequest, decision: Decision, reports: Reports | DeferredReports
    ) -> Replay | None:
        """Return the replay a decision calls for, raise its error, or return None to run."""
        match decision:
            case Replayed(record):
                if reports.are_read:
                    reports.outcome(request.endpoint, "replayed")
                    reports.note(request, "replayed", record.status, record)
                return Replay(record)
            case Mismatched(expected, received, record):
                reports.outcome(request.endpoint, "mismatched")
                code = CODES[PayloadMismatchError.kind].name(request.policy.error_format)
                ietf_statuses = request.policy.ietf_statuses
                status = status_of(PayloadMismatchError.kind, ietf_statuses=ietf_statuses)
                reports.note(request, "mismatched", status, record, code)
                raise PayloadMismatchError(
                    "this key was used for a different request",
                    details=mismatch_details(request, expected, received),
                )
            case Expired():
                reports.expired(request.endpoint)
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
                self.reports.outcome(request.endpoint, "refused")
                raise
        return self.resolve(request, decision, self.reports)

    def record_of_stale(self, request: GuardedRequest, error: StaleActionError) -> Record | None:
        """Return the record of a stale action, its audit trail; None if the policy keeps none."""
        policy = request.policy
        if policy.errors_stored is ErrorsStored.NONE:
            error.effect = Effect.NONE
            return None
        response = render_error(
            error, policy.error_format, request.request_id, ietf_statuses=policy.ietf_statuses
        )
        record = new_record(request, response, policy.error_ttl, self.clock.now(), new_id)
        error.effect = Effect.NONE if record is None else Effect.STORED
        return record

    async def _refuse_stale(self, execution: Execution, error: StaleActionError) -> None:
        kept: Record | None = None
        try:
            record = self.record_of_stale(execution.request, error)
            if record is None:
                await execution.unit.rollback()
                return
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
        """Return the response to send and the record committed now, if any."""
        request = execution.request
        if self.faults:
            await self.faults.reach("after_business_write")
        if execution.unit.superseded:
            return await self._replay_winner(execution), None
        writes, ttl = execution.effect_of(response)
        if writes is Writes.UNDONE:
            return await self._conclude_error(execution, response, ttl)
        if writes is Writes.UNDECIDED and await frees_the_key(execution, response, ttl):
            return await self._conclude_unstored(execution, response), None
        record, audit = self.written_by(execution, response, ttl)
        outcome, kept = await self._commit_or_replay(execution, response, record, audit)
        if outcome is response:
            for callback in execution.on_commit:
                callback()
            if self.reports.are_read:
                report_committed(self.reports, request, response, record)
        return outcome, kept

    def written_by(
        self, execution: Execution, response: Response, ttl: timedelta | None
    ) -> tuple[Record | None, AuditEvent | None]:
        """Return the rows of a committing response in the store, beside the app's rows."""
        request, now = execution.request, self.clock.now()
        record = new_record(request, response, ttl, now, new_id)
        is_audited = request.policy.audit and response.status < _FIRST_ERROR
        return record, execution.audit_event(response, record, now, new_id) if is_audited else None

    async def _conclude_unstored(self, execution: Execution, response: Response) -> Response:
        """Free the key after a response below 400 that is not stored, if nothing was written.

        A commit would be repeated by each retry, and a rollback would undo a success: with writes,
        the client gets an error.
        """
        request = execution.request
        is_undone = await has_written(execution)
        await execution.unit.rollback()
        execution.effect = Effect.NONE
        if is_undone:
            self.reports.outcome(request.endpoint, "rolled_back")
            internal = CODES[INTERNAL]
            code = internal.name(request.policy.error_format)
            self.reports.note(request, "rolled_back", internal.status, None, code)
            raise UnstoredWritesError(writes_error(execution, response))
        self.reports.outcome(request.endpoint, "refused")
        self.reports.note_response(request, "refused", response)
        warning = redirect_warning(execution, response)
        if warning is not None and request.endpoint not in self._logged_redirects:
            self._logged_redirects.add(request.endpoint)
            _log.warning("%s", warning)
        return response

    async def _conclude_error(
        self, execution: Execution, response: Response, ttl: timedelta | None
    ) -> tuple[Response | Replay, Record | None]:
        """Roll the handler's writes back; store the response if the policy says so."""
        request = execution.request
        await execution.unit.rollback()
        is_server_error = response.status >= _FIRST_SERVER_ERROR
        outcome: Outcome = "rolled_back" if is_server_error else "refused"
        self.reports.outcome(request.endpoint, outcome)
        record = new_record(request, response, ttl, self.clock.now(), new_id)
        if record is None:
            if request.record_id is not None:
                execution.effect = Effect.NONE
            self.reports.note_response(request, outcome, response)
            return response, None
        claim = await self.call_store("claim", self.store.claim(record.id, record.created_at))
        if isinstance(claim, Found):
            decision = decide(claim.record, request.fingerprint, record.created_at)
            return await self._resolve(request, decision) or response, claim.record
        if isinstance(claim, Held):  # another process runs it now; its response will count
            raise self.duplicates.in_progress(request)
        execution.unit = claim.unit
        return await self._commit_or_replay(execution, response, record, None)

    async def _commit_or_replay(
        self,
        execution: Execution,
        response: Response,
        record: Record | None,
        audit: AuditEvent | None,
    ) -> tuple[Response | Replay, Record | None]:
        """Commit; return what to send and the record that is committed now, if any."""
        try:
            await self._commit(execution, record, audit)
        except SupersededError:  # another process has committed a response in the meantime
            return await self._replay_winner(execution), None
        except CommitUnknownError as unknown:
            # Without its record a refusal is not final: a later copy of the request runs again.
            committed = await self.resolve_unknown_commit(unknown, execution.request, record)
            if committed is not record:
                return Replay(committed), committed
        if record is not None:
            execution.effect = Effect.STORED
        return response, record

    async def _commit(
        self, execution: Execution, record: Record | None, audit: AuditEvent | None
    ) -> None:
        unit, request = execution.unit, execution.request

        async def commit() -> None:
            if record is not None and request.sequence is not None:
                try:
                    is_next = await self.sequences.use(request, record.created_at, unit.statements)
                except BaseException:
                    await unit.rollback()
                    raise
                if not is_next:
                    await unit.rollback()
                    raise SupersededError("another request with this number was committed first")
            await unit.commit(record, audit)

        await self.commit_all(commit, () if record is None else (record,))

    async def commit_all(
        self,
        commit: Callable[[], Awaitable[None]],
        records: Sequence[Record],
        points: tuple[str, str] = ("before_commit", "after_commit"),
    ) -> None:
        """Commit a transaction with these records. ``points`` are its fault points.

        Raises ``CommitUnknownError`` if ``resolve_unknown_commit`` has to find the outcome.
        """
        if self.faults:
            await self.faults.reach(points[0])
        started = self.clock.monotonic() if self._times_store else 0.0
        try:
            await commit()
        except CommitUnknownError:
            self._store_metrics.commit_failed("request", "unknown")
            raise
        except SupersededError:
            raise
        except Exception:
            self._store_metrics.commit_failed("request", "rolled_back")
            raise
        if self._times_store:
            self.reports.metrics.store_time("commit", self.clock.monotonic() - started)
        if self.faults:
            await self.faults.reach(points[1])
        if self.quota is not None:
            for record in records:
                await self.quota.added(record.id.tenant)

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

    async def resolve_unknown_commit(
        self, unknown: CommitUnknownError, request: GuardedRequest, pending: Record | None
    ) -> Record:
        """Find out, after the connection died during COMMIT, which record was committed.

        Claims the key on a new connection instead of looking it up: as long as the old
        connection's transaction is alive on the server, the claim is refused. A commit that was
        cut is not looked up: that would wait for it again. Raises what to respond with.
        """
        if unknown.is_cut:
            raise StoreUnavailableError(
                f"the commit took too long, and its outcome is not known: {unknown}",
                reason="outcome_unknown",
            ) from unknown
        if pending is None:
            raise StoreUnavailableError(
                "the connection was lost during the commit; check the outcome before retrying",
                is_for_callers=True,
                reason="outcome_unknown",
            )
        deadline = self.duplicates.deadline_of(request)
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
            self.reports.note(execution.request, "rolled_back", None)
            await self._roll_back(execution)

    async def _roll_back(self, execution: Execution) -> None:
        """Do as ``abort``, for a request whose error is logged elsewhere."""
        if not execution.ended:
            try:
                await execution.unit.rollback()
                self.reports.outcome(execution.request.endpoint, "rolled_back")
            finally:
                self._end(execution, None)

    def _end(self, execution: Execution, kept: Record | None) -> None:
        """Mark the end and pass the committed record, if any, to the duplicates that wait."""
        execution.ended = True
        if self.is_gated:
            visit = current_visit()
            if visit is not None:  # what the app does now needs no second connection
                visit.leave()
        if execution.request.sequence is not None:
            self.sequences.turns.leave(execution.request.stream)
        if execution.request.record_id is not None:
            self.end_lead(execution.request.record_id, kept, execution.epoch)

    def end_lead(self, record_id: RecordId, kept: Record | None, epoch: Epoch | None) -> None:
        """Remember the committed record, if any, and pass it to the duplicates that wait."""
        if kept is not None:
            self.remember(kept, epoch)
        self.in_flight.leave(record_id, kept)

    # -- the store -------------------------------------------------------------------------

    async def call_store(self, operation: str | None, work: Awaitable[Any]) -> Any:
        """Await a call of the store. Raises ``StoreUnavailableError`` if the breaker is open.

        ``operation`` is None for work whose time is not only the store's, such as a read request.
        """
        breaker, started = self.breaker, 0.0
        if self._store_clock.is_wrong:
            self._check_clock(work)
        if breaker.failures or self._times_store:
            started = self.clock.monotonic()
            wait = breaker.retry_after(started)
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
        if breaker.failures:
            breaker.succeeded()
            self._report_breaker()
        if self._times_store and operation is not None:
            self.reports.metrics.store_time(operation, self.clock.monotonic() - started)
        return result

    def _check_clock(self, work: Awaitable[Any]) -> None:
        """Raise ``StoreUnavailableError`` instead of the work if records would expire wrongly."""
        try:
            self._store_clock.check()
        except StoreUnavailableError:
            if asyncio.iscoroutine(work):
                work.close()
            raise

    def _report_breaker(self) -> None:
        """Report that the breaker has opened or closed. While it probes, it counts as open."""
        is_open = self.breaker.state is not BreakerState.CLOSED
        if is_open is not self._is_breaker_open:
            self._is_breaker_open = is_open
            if self._breaker_metrics is not None:
                self._breaker_metrics.breaker_changed(is_open=is_open)

    # -- records ---------------------------------------------------------------------------

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
