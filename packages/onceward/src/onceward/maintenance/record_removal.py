"""Remove single records, for operators: the next request with the key runs again."""

from dataclasses import dataclass
from datetime import datetime

from onceward.errors import InProgressError, RecordUnreadableError, SupersededError
from onceward.guard.caches import new_epoch
from onceward.ports import Claim, Claimed, Clock, RecordQuery, Store
from onceward.records import AuditEvent, Record, RecordId
from onceward.stores.sql_loader import load_queries
from onceward_protocol.ids import new_id, new_request_id

_REMOVED: str = "record.removed"
_RUNNING: str = "a request with this key is running; try again when it has ended"


@dataclass(frozen=True, slots=True)
class Removed:
    """A removed record and the id of its audit event."""

    record: Record
    audit_id: str


class RecordRemoval:
    """Removes records together with an audit event, and makes caches forget them."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def find(self, record_id: RecordId) -> Record | None:
        """Return the record of a key, expired or not."""
        query = RecordQuery(record_id.tenant, record_id.endpoint, record_id.key, limit=1)
        found = await self._store.records(query)
        return found[0] if found else None

    async def remove(
        self, record_id: RecordId, *, actor: str, reason: str, started_at: datetime | None = None
    ) -> Removed | None:
        """Remove a record; None if there is none.

        Raises ``InProgressError`` while a request with this key is running: it is not disturbed.
        On SQLite the store waits for that request, which ends with a record: give ``started_at``,
        by the clock of this machine, so that a record created since then is not removed.
        Deletion, audit event and the new epoch of the caches commit together.
        """
        now = self._clock.now()
        record = await self.find(record_id)
        # On PostgreSQL the claim decides, and records have the time of other machines.
        newest = started_at if self._store.name == "sqlite" else None
        if record is not None and newest is not None and record.created_at >= newest:
            raise InProgressError(_RUNNING)
        try:
            claim: Claim | None = await self._store.claim(record_id, now)
        except RecordUnreadableError:  # damaged, which is why it is removed
            claim = None
        if isinstance(claim, Claimed):  # no record, or an expired one
            unit = claim.unit
        elif record is None:
            raise InProgressError(_RUNNING)
        else:
            unit = await self._store.begin()
        try:
            if record is None:
                await unit.rollback()
                return None
            sql = load_queries("onceward.stores", "records.sql", names=self._store.table_names)
            about = record_id._asdict() | {"request_id": record.request_id}
            if await unit.statements.execute(sql["delete_record"], about) == 0:
                raise InProgressError(_RUNNING)  # noqa: TRY301 - rolled back below
            await unit.statements.execute(sql["renew_cache_epoch"], {"epoch": new_epoch()})
            audit = AuditEvent(
                id=new_id(now),
                tenant=record_id.tenant,
                actor=actor,
                endpoint=f"{_REMOVED} {record_id.endpoint}",
                payload_hash=record.fingerprint.body_hash,
                status=record.status,
                request_id=new_request_id(),
                correlation_id=record.correlation_id,
                created_at=now,
                resource=f"key:{record_id.key}",
                reason=reason,
            )
            await unit.commit(None, audit)
        except SupersededError as error:
            await unit.rollback()
            raise InProgressError(_RUNNING) from error
        except BaseException:
            await unit.rollback()
            raise
        return Removed(record, audit.id)
