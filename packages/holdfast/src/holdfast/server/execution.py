"""One execution of a guarded handler: the transaction it writes in, and the one way it ends."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.core.decision import Held, decide
from holdfast.core.error_formats import render_error
from holdfast.core.idempotency_record import AuditEvent, Record, Reply
from holdfast.core.policy import ErrorsStored
from holdfast.core.staleness import (
    check_not_stale,
    check_submitted_after_generated,
    parse_instant,
)
from holdfast.errors import (
    BodyInvalidError,
    CommitUnknownError,
    InProgressError,
    NoTransactionError,
    StaleActionError,
    StoreUnavailableError,
    SupersededError,
)
from holdfast.ports import Claimed, Found, Transaction, UnitOfWork
from holdfast.server.guarded_request import GuardedRequest

if TYPE_CHECKING:
    from holdfast.server.idempotency import Idempotency

__all__ = ["Execution", "Replay", "current_execution", "running_as", "stale_error"]

_current: ContextVar["Execution"] = ContextVar("holdfast_execution")

# An action counts up to and including its last instant; a record is gone at the instant it expires.
_A_MOMENT: Final = timedelta(seconds=1)


def current_execution() -> "Execution":
    """Return the execution of the guarded request being served, from anywhere below it."""
    try:
        return _current.get()
    except LookupError:
        raise NoTransactionError(
            "there is no guarded request here: put @holdfast.guard() below the route decorator"
        ) from None


def running_as(execution: "Execution") -> "Token[Execution]":
    """Make an execution the current one of this task."""
    return _current.set(execution)


class Replay:
    """An answer from the record. The handler did not run."""

    __slots__ = ("record",)

    def __init__(self, record: Record) -> None:
        """Carry the record to be told again."""
        self.record = record


class Execution:
    """One run of a handler: its transaction, and the one way it ends.

    Handlers reach it as ``scope["holdfast"]`` or by the framework's dependency. They write in
    ``transaction``; they may ``describe`` what they changed for the audit event.
    """

    __slots__ = (
        "_after_commit",
        "_ended",
        "_idempotency",
        "_keep_writes",
        "_resource",
        "_unit",
        "_version",
        "call",
    )

    def __init__(self, idempotency: "Idempotency", call: GuardedRequest, unit: UnitOfWork) -> None:
        """Begin with an open unit."""
        self._idempotency = idempotency
        self._unit = unit
        self._ended = False
        self._keep_writes = False
        self._resource: str | None = None
        self._version: int | None = None
        self._after_commit: list[Callable[[], None]] | None = None
        self.call = call

    @property
    def transaction(self) -> Any:
        """What to write in. Commits with the record, or not at all."""
        return self._unit.transaction

    @property
    def statements(self) -> Transaction:
        """The same transaction as plain SQL, even where ``transaction`` is an app's session."""
        return self._unit.statements

    @property
    def ended(self) -> bool:
        """True once committed or rolled back."""
        return self._ended

    def describe(self, *, resource: str | None = None, version: int | None = None) -> None:
        """Say for the audit event what was changed."""
        self._resource, self._version = resource, version

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call this once everything is committed, before the answer leaves. Never after a replay.

        It must not fail and must not block: the commit has happened.
        """
        if self._after_commit is None:
            self._after_commit = []
        self._after_commit.append(callback)

    def keep_writes_on_error(self) -> None:
        """Commit what was written even if the answer is a 4xx, e.g. a log of refusals.

        Without this an error answer undoes the handler's writes.
        """
        self._keep_writes = True

    async def finish(self, reply: Reply) -> Reply | Replay:
        """End with the handler's answer: commit it, or roll back and pass it on."""
        idempotency, call = self._idempotency, self.call
        kept: Record | None = None
        try:
            if idempotency.faults:
                await idempotency.faults.reach("after_business_write")
            if self._unit.superseded:
                return await self._give_way()
            is_error = reply.status >= 400  # noqa: PLR2004 - where HTTP's errors begin
            if is_error and (not self._keep_writes or reply.status >= 500):  # noqa: PLR2004
                kept, outcome = await self._finish_error(reply)
                return outcome
            kept = self._record(reply, call.policy.ttl_for(reply.status))
            try:
                await self._commit(kept, None if is_error else self._audit_event(reply, kept))
            except SupersededError:
                kept = None
                return await self._give_way()
            except CommitUnknownError:
                pending, kept = kept, None
                kept = await self._learn_outcome(pending)
                if kept is not pending:
                    return Replay(kept)
            except BaseException:
                kept = None
                raise
            self._tell_committed()
            idempotency.metrics.outcome(call.endpoint, "refused" if is_error else "fresh")
            return reply  # noqa: TRY300 - nothing may come between it and the end
        except BaseException:
            await self._unit.rollback()  # does nothing where it has ended; else it would stay open
            raise
        finally:
            self._leave(kept)

    async def abort(self) -> None:
        """End without an answer: everything is undone and the key is free again."""
        if not self._ended:
            try:
                await self._unit.rollback()
                self._idempotency.metrics.outcome(self.call.endpoint, "rolled_back")
            finally:
                self._leave(None)

    async def refuse_stale(self, error: StaleActionError) -> None:
        """Commit the record of a stale attempt, which is its audit trail. No handler has run."""
        kept: Record | None = None
        policy = self.call.policy
        self._idempotency.metrics.outcome(self.call.endpoint, "stale")
        try:
            if policy.errors_stored is ErrorsStored.NONE:
                await self._unit.rollback()
                return
            reply = render_error(
                error, policy.error_format, self.call.request_id, ietf_statuses=policy.ietf_statuses
            )
            record = self._record(reply, policy.error_ttl)
            await self._commit(record, None)
            kept = record
        except (SupersededError, CommitUnknownError) as unsure:
            raise StoreUnavailableError(
                "the answer could not be recorded; try again", is_for_callers=True
            ) from unsure
        finally:
            self._leave(kept)

    def _tell_committed(self) -> None:
        for callback in self._after_commit or ():
            callback()

    # -- endings ---------------------------------------------------------------------------

    async def _commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        idempotency = self._idempotency
        if idempotency.faults:
            await idempotency.faults.reach("before_commit")
        started = idempotency.clock.monotonic()
        await self._unit.commit(record, audit)
        idempotency.metrics.store_time("commit", idempotency.clock.monotonic() - started)
        if idempotency.faults:
            await idempotency.faults.reach("after_commit")

    async def _finish_error(self, reply: Reply) -> tuple[Record | None, Reply | Replay]:
        """Undo the writes; then, where the policy wants it, record the answer by itself."""
        idempotency, call = self._idempotency, self.call
        await self._unit.rollback()
        server_failed = reply.status >= 500  # noqa: PLR2004
        idempotency.metrics.outcome(call.endpoint, "rolled_back" if server_failed else "refused")
        record = self._record(reply, call.policy.ttl_for(reply.status))
        if record is None:
            return None, reply
        claim = await idempotency.guard_store(
            "claim", idempotency.store.claim(record.id, record.created_at)
        )
        if isinstance(claim, Found):
            replay = idempotency.settle(call, decide(claim.record, call.mark, record.created_at))
            return claim.record, replay or reply
        if isinstance(claim, Held):  # another process runs it now; its answer will count
            raise idempotency.in_progress(call)
        self._unit = claim.unit
        try:
            await self._commit(record, None)
        except SupersededError:  # another process has answered meanwhile: the same key, one answer
            return None, await self._give_way()
        except CommitUnknownError:
            # Nothing but the record was in there: the retry runs again and finds out.
            return None, reply
        return record, reply

    async def _give_way(self) -> Replay:
        """Another's record stands: undo ours and answer with theirs."""
        idempotency, call = self._idempotency, self.call
        await self._unit.rollback()
        assert call.record_id is not None  # noqa: S101 - without a key there is no record
        now = idempotency.clock.now()
        record = await idempotency.guard_store("find", idempotency.store.find(call.record_id, now))
        replay = idempotency.settle(call, decide(record, call.mark, now))
        if replay is None:
            raise StoreUnavailableError(
                "the record of this key is gone again; try again", is_for_callers=True
            )
        return replay

    async def _learn_outcome(self, pending: Record | None) -> Record:
        """COMMIT may have happened: ask on a new connection before anything is answered.

        Claiming the key tells more than looking it up: as long as the old connection's
        transaction lives on the server, the claim is refused.
        """
        idempotency, call = self._idempotency, self.call
        if pending is None:
            raise StoreUnavailableError(
                "the connection was lost while committing; look before retrying",
                is_for_callers=True,
            )
        deadline = idempotency.deadline(call)
        try:
            claim = await idempotency.take(call, pending.id, idempotency.clock.now(), deadline)
        except InProgressError as error:
            raise StoreUnavailableError(
                "the outcome is not known yet; send it again", is_for_callers=True
            ) from error
        if isinstance(claim, Claimed):
            await claim.unit.rollback()
            raise StoreUnavailableError(
                "the connection was lost before the commit; send it again", is_for_callers=True
            )
        # Every field: clients repeat their X-Request-ID, so that one does not tell whose it is.
        if claim.record == pending:
            return pending
        replay = idempotency.settle(call, decide(claim.record, call.mark, idempotency.clock.now()))
        return replay.record if replay is not None else claim.record

    def _leave(self, kept: Record | None) -> None:
        self._ended = True
        if kept is not None:
            self._idempotency.remember(kept)
        if self.call.record_id is not None:
            self._idempotency.in_flight.leave(self.call.record_id, kept)

    def _record(self, reply: Reply, ttl: timedelta | None) -> Record | None:
        call = self.call
        if call.record_id is None or ttl is None:
            return None
        created_at = self._idempotency.clock.now()
        return Record(
            id=call.record_id,
            mark=call.mark,
            status=reply.status,
            headers=reply.stored_headers(),
            body=reply.body,
            created_at=created_at,
            expires_at=self._expiry(reply, created_at, ttl),
            request_id=call.request_id,
            correlation_id=call.correlation_id,
            audit_id=self._idempotency.new_id(created_at)
            if call.policy.audit and reply.status < 400  # noqa: PLR2004
            else None,
        )

    def _expiry(self, reply: Reply, created_at: datetime, ttl: timedelta) -> datetime:
        """Return when the record may go: not while its action could still be taken for a new one.

        An action counts for a cap and a grace from when the device says it was made, which may be
        longer than the record's time. What happened must not happen again in between, unless the
        policy says that its time is meant as it is written.
        """
        expires_at = created_at + ttl
        policy = self.call.policy
        rule = policy.staleness
        if rule is None or not policy.outlive_staleness or reply.status >= 400:  # noqa: PLR2004
            return expires_at
        counts_until = _generated_at(_fields(self.call)) + rule.cap + rule.grace
        return max(expires_at, counts_until + _A_MOMENT)

    def _audit_event(self, reply: Reply, record: Record | None) -> AuditEvent | None:
        call = self.call
        if not call.policy.audit:
            return None
        idempotency = self._idempotency
        created_at = idempotency.clock.now() if record is None else record.created_at
        audit_id = None if record is None else record.audit_id
        return AuditEvent(
            id=audit_id or idempotency.new_id(created_at),
            tenant=call.principal.tenant,
            actor=call.principal.actor,
            endpoint=call.endpoint,
            payload_hash=call.mark.body_hash,
            status=reply.status,
            request_id=call.request_id,
            correlation_id=call.correlation_id,
            created_at=created_at,
            resource=self._resource,
            version=self._version,
        )


def stale_error(call: GuardedRequest, now: datetime) -> StaleActionError | None:
    """Check the action's age; its times are read from the body."""
    rule = call.policy.staleness
    if rule is None:
        return None
    values = _fields(call)
    generated_at = _generated_at(values)
    if values.get("clientSubmittedAt") is not None:
        submitted_at = parse_instant(values["clientSubmittedAt"], "clientSubmittedAt")
        check_submitted_after_generated(submitted_at, generated_at, grace=rule.grace)
    try:
        check_not_stale(generated_at, now, cap=rule.cap, grace=rule.grace)
    except StaleActionError as error:
        return error
    return None


def _fields(call: GuardedRequest) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(call.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyInvalidError("the body is not JSON that can be read") from error
    return fields if isinstance(fields, dict) else {}


def _generated_at(fields: dict[str, Any]) -> datetime:
    return parse_instant(fields.get("clientGeneratedAt"), "clientGeneratedAt")
