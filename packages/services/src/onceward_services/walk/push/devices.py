"""The devices of walkers that get pushes."""

from datetime import datetime
from typing import Final

import msgspec

from onceward import Transaction
from onceward.jobs.job import stable_uuid
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_services.walk.errors import walk_error
from onceward_services.walk.walkers import instant, lock_walker

__all__ = ["MAX_DEVICES", "Device", "find_device", "list_devices", "register", "remove", "sql"]

MAX_DEVICES: Final = 20


class Device(msgspec.Struct, frozen=True):
    """A device. Events up to ``pushed_seq`` were pushed to it."""

    id: str
    platform: str
    token: str
    pushed_seq: int
    registered_at: datetime


async def register(
    tx: Transaction, tenant: str, *, platform: str, token: str, now: datetime, on_sqlite: bool
) -> Device:
    """Register a device for events from now on; the same token is the same device.

    A token that another walker has registered moves to this one: somebody else has signed in on
    the device. Raises ``TOO_MANY_DEVICES``. Locks the walker.
    """
    walker = await lock_walker(tx, tenant, now)
    device_id = stable_uuid("device", token)
    known = [row["id"] for row in await tx.fetch_all(sql("list_devices"), {"tenant": tenant})]
    if device_id not in known and len(known) >= MAX_DEVICES:
        raise walk_error(
            "TOO_MANY_DEVICES",
            f"a walker can have {MAX_DEVICES} devices: remove one first",
            limit=MAX_DEVICES,
        )
    if not on_sqlite:  # which has one writer at a time
        await tx.fetch_all(sql("lock_device"), {"id": device_id})
    await tx.execute(sql("take_device"), {"tenant": tenant, "id": device_id})
    values = {"tenant": tenant, "id": device_id, "platform": platform, "token": token}
    await tx.execute(sql("save_device"), values | {"seq": walker.event_seq, "now": now})
    row = await tx.fetch_one(sql("find_device"), {"tenant": tenant, "id": device_id})
    if row is None:
        raise LookupError("the upsert of a device left no row")
    return _device(row)


async def remove(tx: Transaction, tenant: str, device_id: str) -> bool:
    """Remove a device; returns False if the walker has no such device."""
    return bool(await tx.execute(sql("remove_device"), {"tenant": tenant, "id": device_id}))


async def list_devices(store: Store, tenant: str) -> list[Device]:
    """Return a walker's devices."""
    return [_device(row) for row in await store.read(sql("list_devices"), {"tenant": tenant})]


async def find_device(store: Store, tenant: str, device_id: str) -> Device | None:
    """Return one of a walker's devices, or None."""
    rows = await store.read(sql("find_device"), {"tenant": tenant, "id": device_id})
    return _device(rows[0]) if rows else None


def _device(row: Row) -> Device:
    registered_at = instant(row["registered_at"])
    return Device(row["id"], row["platform"], row["token"], row["pushed_seq"], registered_at)


def sql(name: str) -> str:
    """Return a statement by name."""
    return load_queries("onceward_services.walk.push")[name]
