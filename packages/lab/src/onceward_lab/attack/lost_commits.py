"""Makes a database of Onceward lose what was committed for a key, as restoring a backup does."""

from onceward.maintenance.record_removal import RecordRemoval
from onceward.ports import RecordQuery, Store
from onceward_protocol.clock import SystemClock

__all__ = ["lose_commit"]


async def lose_commit(store: Store, key: str) -> None:
    """Remove the records of a key and renew the epoch, in one transaction."""
    removal = RecordRemoval(store, SystemClock())
    for record in await store.records(RecordQuery(key=key)):
        await removal.remove(record.id, actor="onceward attack", reason="as if it were restored")
