"""Enqueue and run the job that pushes a walker's events to one device."""

import json
from datetime import datetime
from typing import Any, Final

from onceward import Transaction
from onceward.errors import NonRetryableError, RetryLaterError
from onceward.jobs.context import JobContext
from onceward.jobs.job import stable_uuid
from onceward.ports import Store
from onceward_services.walk.announcements import Enqueue
from onceward_services.walk.events import WalkerEvent
from onceward_services.walk.push.devices import Device, find_device, sql
from onceward_services.walk.push.port import Push, PushMessage
from onceward_services.walk.walkers import instant
from onceward_services.webhooks.sender import Delivered, Gone, Refused, Unavailable

__all__ = ["PUSH", "announce_pushes", "push_to_device"]

PUSH: Final = "walker.push"
# A device that was away for longer reads the rest itself.
_MOST: Final = 50


async def announce_pushes(tx: Transaction, tenant: str, enqueue: Enqueue, *, after: int) -> None:
    """Enqueue a job per device if there are events to push after the event ``after``."""
    about = {"tenant": tenant}
    if await tx.fetch_one(sql("has_pushed_events"), about | {"after": after}) is None:
        return
    for row in await tx.fetch_all(sql("list_devices"), about):
        # Merged with one that waits: a job sends all that there is when it runs.
        payload = {"deviceId": row["id"]}
        await enqueue(PUSH, payload, tenant=tenant, coalesce=row["id"], order=row["id"])


async def push_to_device(
    job: JobContext, store: Store, push: Push, *, now: datetime
) -> dict[str, Any]:
    """Push the events that a device has not got, one step each, and save how far it has got."""
    device = await find_device(store, job.tenant, job.payload["deviceId"])
    if device is None:  # removed, or the walker was deleted
        return {"pushed": 0}
    rows = await store.read(
        sql("events_to_push"),
        {"tenant": job.tenant, "after": device.pushed_seq, "limit": _MOST},
    )
    reached = device.pushed_seq
    for row in rows:
        event = WalkerEvent(
            row["seq"], row["type"], json.loads(row["data"]), instant(row["created_at"])
        )
        try:
            found = await _push(job, push, device, event, now)
        except (RetryLaterError, NonRetryableError):
            # What was delivered before is not sent again by this job or the next one.
            await _advance(store, job.tenant, device, reached)
            raise
        if found == "gone":
            gone = {"tenant": job.tenant, "id": device.id, "registered_at": device.registered_at}
            await job.transaction.execute(sql("remove_gone_device"), gone)
            return {"pushed": 0, "removed": device.id}
        reached = event.seq
    done = {"tenant": job.tenant, "id": device.id, "seq": reached}
    await job.transaction.execute(sql("advance_device"), done)
    return {"pushed": len(rows)}


async def _push(
    job: JobContext, push: Push, device: Device, event: WalkerEvent, now: datetime
) -> str:
    # The same in every attempt and in every job about this event and device.
    message_id = stable_uuid("push", job.tenant, device.id, str(event.seq))
    message = PushMessage(message_id, job.tenant, device.platform, device.token, event)

    async def send(_key: str) -> str:
        match await push.send(message, now):
            case Delivered():
                return "delivered"
            case Gone():
                return "gone"
            case Refused(reason):
                raise NonRetryableError(reason)
            case Unavailable(reason, after_seconds):
                raise RetryLaterError(reason, after_seconds=after_seconds)

    return await job.step(f"event {event.seq}", send)


async def _advance(store: Store, tenant: str, device: Device, reached: int) -> None:
    if reached > device.pushed_seq:
        await store.write(
            sql("advance_device"), {"tenant": tenant, "id": device.id, "seq": reached}
        )
