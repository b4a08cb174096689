"""Remove single records, for operators: the next request with the key runs again."""

from dataclasses import dataclass

from holdfast.core.idempotency_record import AuditEvent, Record, RecordId
from holdfast.errors import InProgressError
from holdfast.ids import new_id, new_request_id
from holdfast.ports import Claimed, Clock, RecordQuery, Store
from holdfast.server.cache_epoch import new_epoch
from holdfast.stores.sql_loader import load_queries

__all__ = ["RecordRemoval", "Removed"]

_REMOVED: str = "record.removed"


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

    async def remove(self, record_id: RecordId, *, actor: str, reason: str) -> Removed | None:
        """Remove a record; None if there is none.

        Raises ``InProgressError`` while a request with this key is running: it is not disturbed.
        Deletion, audit event and the new epoch of the caches commit together.
        """
        now = self._clock.now()
        record = await self.find(record_id)
        claim = await self._store.claim(record_id, now)
        if isinstance(claim, Claimed):  # no record, or an expired one
            unit = claim.unit
        elif record is None:
            raise InProgressError("a request with this key is running; try again when it has ended")
        else:
            unit = await self._store.begin()
        try:
            if record is None:
                await unit.rollback()
                return None
            sql = load_queries("holdfast.stores", "records.sql", names=self._store.table_names)
            about = {"tenant": record_id.tenant, "endpoint": record_id.endpoint}
            await unit.statements.execute(sql["delete_record"], about | {"key": record_id.key})
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
        except BaseException:
            await unit.rollback()
            raise
        return Removed(record, audit.id)
