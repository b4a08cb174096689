"""Pause and resume queues, for operators.

Jobs of a paused queue are enqueued, but no worker claims them, whatever its engine. Jobs that run
go on. A worker that dies loses nothing: its jobs are claimed again when the queue is resumed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

from onceward.jobs.job import check_name
from onceward.ports import Params, Store
from onceward.records import AuditEvent
from onceward.stores.sql_loader import load_queries
from onceward.tenants import OPERATOR_TENANT
from onceward_protocol.ids import new_id, new_request_id

__all__ = ["PausedQueue", "PausedQueues"]

_OK: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedQueue:
    """A queue whose jobs are not claimed."""

    # Its name.
    queue: str
    # Who paused it.
    actor: str
    # Why.
    reason: str
    # When.
    paused_at: datetime


class PausedQueues:
    """The paused queues of one database."""

    def __init__(self, store: Store, notify: Callable[[], None]) -> None:
        """``notify`` wakes the workers after a queue was resumed."""
        self._store = store
        self._notify = notify

    async def all(self) -> list[PausedQueue]:
        """Return the paused queues by name."""
        rows = await self._store.read(self._sql("paused"))
        return [
            PausedQueue(
                queue=row["queue"],
                actor=row["actor"],
                reason=row["reason"],
                paused_at=datetime.fromtimestamp(row["paused_at"], UTC),
            )
            for row in rows
        ]

    async def pause(self, queue: str, *, actor: str, reason: str) -> bool:
        """Pause a queue, whether or not it has jobs; False if it was paused already.

        Claims that begin after this get none of its jobs. Raises ``UsageError`` for a malformed
        name.
        """
        check_name(queue, "queue")
        event = _event("queue.paused", queue, actor, reason)
        paused_at = event.created_at.timestamp()
        values = {"queue": queue, "actor": actor, "reason": reason, "paused_at": paused_at}
        return await self._change("pause", values, event)

    async def resume(self, queue: str, *, actor: str, reason: str) -> bool:
        """Have the jobs of a queue claimed again; False if it was not paused."""
        event = _event("queue.resumed", queue, actor, reason)
        is_resumed = await self._change("resume", {"queue": queue}, event)
        if is_resumed:
            self._notify()
        return is_resumed

    async def _change(self, statement: str, values: Params, event: AuditEvent) -> bool:
        """Change the table and write the audit event in one transaction; False: nothing to change.

        In that case, too, it commits a write, which waits for a synchronous standby: the earlier
        change may come from a commit of unknown outcome, and be lost by a failover.
        """
        unit = await self._store.begin()
        try:
            is_changed = bool(await unit.statements.fetch_all(self._sql(statement), values))
            if not is_changed:
                await unit.statements.execute(self._sql("add_nothing"))
                await unit.statements.execute(self._sql("remove_nothing"))
            await unit.commit(None, event if is_changed else None)
        except BaseException:
            await unit.rollback()
            raise
        return is_changed

    def _sql(self, name: str) -> str:
        names = self._store.table_names
        return load_queries("onceward.jobs", "paused_queues.sql", names=names)[name]


def _event(what: str, queue: str, actor: str, reason: str) -> AuditEvent:
    now, request_id = datetime.now(UTC), new_request_id()
    return AuditEvent(
        id=new_id(now),
        tenant=OPERATOR_TENANT,
        actor=actor,
        endpoint=f"{what} {queue}",
        payload_hash=sha256(queue.encode()).hexdigest(),
        status=_OK,
        request_id=request_id,
        correlation_id=request_id,
        created_at=now,
        resource=f"queue:{queue}",
        reason=reason,
    )
