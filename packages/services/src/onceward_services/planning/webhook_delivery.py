"""Deliveries to the webhooks of an organization: their creation, and the job that sends one.

A delivery is created in the transaction of what it reports. Its id is the ``webhook-id`` of every
attempt, also after a crash and when it is sent again: a receiver that honours it handles it once.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, assert_never

from onceward import Transaction
from onceward.errors import NonRetryableError, NotFoundError, RetryLaterError, ServiceError
from onceward.jobs.admin import JobAdmin
from onceward.jobs.context import JobContext
from onceward.jobs.enqueue import encode_json
from onceward.jobs.job import job_id, job_key
from onceward.ports import Clock, Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_protocol.ids import new_id
from onceward_services.webhooks.sender import (
    Delivered,
    Gone,
    Outcome,
    Refused,
    Unavailable,
    WebhookSender,
)

if TYPE_CHECKING:
    from onceward_protocol.storage.sql_files import Queries

__all__ = [
    "DELIVER",
    "DISABLED",
    "QUEUE",
    "DeliveryRules",
    "WebhookDeliveries",
    "add_deliveries",
    "add_delivery",
    "check_enabled",
    "enqueue_delivery",
    "next_attempt_at",
    "send_again",
    "webhook_sql",
]

DELIVER: Final = "webhook.deliver"
DISABLED: Final = "webhook.disabled"
# Another queue than that of planning: its workers may wait for receivers.
QUEUE: Final = "planning-webhooks"

# A receiver that names a later time delays what is behind it no longer than this.
_MAX_RETRY_SECONDS: Final = 3600.0
_MAX_DETAIL_CHARS: Final = 300
_INTERNAL: Final = "the address is internal"

_log = logging.getLogger("onceward.services")

# ``Onceward.enqueue`` in a request, ``JobContext.enqueue`` in a job.
Enqueue = Callable[..., Awaitable[Any]]


def webhook_sql(name: str) -> str:
    """Return one of the queries of webhooks."""
    queries: Queries = load_queries("onceward_services.planning", "webhooks.sql")
    return queries[name]


async def add_deliveries(
    tx: Transaction,
    enqueue: Enqueue,
    tenant: str,
    event: str,
    data: dict[str, Any],
    *,
    notification_id: str,
    now: datetime,
) -> None:
    """Create a delivery, and its job, for each webhook that gets events of this type."""
    for webhook in await tx.fetch_all(webhook_sql("receivers"), {"tenant": tenant}):
        if webhook["events"] is None or event in webhook["events"].split(","):
            about = {"tenant": tenant, "webhook_id": webhook["id"]}
            await add_delivery(
                tx, enqueue, about, event, data, notification_id=notification_id, now=now
            )


async def add_delivery(
    tx: Transaction,
    enqueue: Enqueue,
    about: dict[str, str],
    event: str,
    data: dict[str, Any],
    *,
    notification_id: str | None = None,
    now: datetime,
) -> str:
    """Create a delivery to one webhook and its job; returns its id."""
    message = {"type": event, "timestamp": now.isoformat(), "data": data}
    values = about | {
        "id": new_id(now),
        "notification_id": notification_id,
        "type": event,
        "body": encode_json(message).decode(),
        "now": now,
    }
    await tx.execute(webhook_sql("add_delivery"), values)
    await enqueue_delivery(enqueue, values | {"sends": 1})
    return str(values["id"])


async def enqueue_delivery(enqueue: Enqueue, delivery: Row) -> None:
    """Enqueue the job that sends a delivery. Jobs of one webhook run one at a time, in order."""
    await enqueue(
        DELIVER,
        {"delivery_id": delivery["id"]},
        queue=QUEUE,
        resource_id=f"{delivery['id']}:{delivery['sends']}",
        order=delivery["webhook_id"],
    )


async def check_enabled(tx: Transaction, webhook: Mapping[str, str]) -> None:
    """Raise ``NotFoundError`` without a webhook, and ``ServiceError`` for a disabled one."""
    row = await tx.fetch_one(webhook_sql("find_webhook"), webhook)
    if row is None:
        raise NotFoundError("there is no such webhook")
    if row["disabled_at"] is not None:
        raise ServiceError(
            409, DISABLED, f"the webhook is disabled, {row['disabled_reason']}: enable it first"
        )


async def send_again(tx: Transaction, enqueue: Enqueue, delivery: Mapping[str, str]) -> None:
    """Send a delivery again, with the same id and body; one that still waits is not sent twice."""
    await check_enabled(tx, {"tenant": delivery["tenant"], "id": delivery["webhook_id"]})
    row = await tx.fetch_one(webhook_sql("send_again"), delivery)
    if row is None:
        raise NotFoundError("there is no such delivery")
    await enqueue_delivery(enqueue, row)


async def next_attempt_at(store: Store, tenant: str, delivery: Row) -> datetime | None:
    """Return when a delivery that waits is tried next; None for another, or while it is tried.

    Also None behind another delivery to the same webhook.
    """
    if delivery["state"] != "waiting":
        return None
    about = f"{delivery['id']}:{delivery['sends']}"
    job = await JobAdmin(store).find_view(
        job_id(job_key(tenant, QUEUE, DELIVER, about)), tenant=tenant
    )
    return job.due_at if job is not None and job.state == "waiting" else None


@dataclass(frozen=True, slots=True)
class DeliveryRules:
    """After how long a webhook that does not succeed is disabled."""

    # If its responses are 404 or 410.
    gone: timedelta
    # If there is any other failure.
    failing: timedelta


class WebhookDeliveries:
    """Runs the jobs that send deliveries."""

    def __init__(
        self, store: Store, sender: WebhookSender, clock: Clock, rules: DeliveryRules
    ) -> None:
        self._store = store
        self._sender = sender
        self._clock = clock
        self._rules = rules

    async def run(self, job: JobContext) -> dict[str, Any]:
        """Send a delivery. Raises ``RetryLaterError`` or ``NonRetryableError``."""
        about = {"tenant": job.tenant, "id": str(job.payload["delivery_id"])}
        rows = await self._store.read(webhook_sql("delivery_to_send"), about)
        if not rows or rows[0]["state"] == "delivered":
            # Deleted because of its age, or a dead letter that was requeued too late.
            return {"state": rows[0]["state"] if rows else "unknown"}
        delivery = rows[0]
        if delivery["deleted_at"] is not None or delivery["disabled_at"] is not None:
            return await self._end(job, about, "cancelled")
        result = await job.step("deliver", lambda _key: self._attempt(job, about, delivery))
        webhook = {"tenant": job.tenant, "id": delivery["webhook_id"]}
        await job.transaction.execute(webhook_sql("webhook_succeeded"), webhook)
        return await self._end(job, about, "delivered") | result

    async def _end(self, job: JobContext, about: dict[str, str], state: str) -> dict[str, Any]:
        values = about | {"state": state, "now": self._clock.now()}
        await job.transaction.execute(webhook_sql("end_delivery"), values)
        return {"state": state}

    async def _attempt(
        self, job: JobContext, about: dict[str, str], delivery: Row
    ) -> dict[str, Any]:
        """Send the request and log it. What is logged is committed whatever becomes of the job."""
        now = self._clock.now()
        attempt: dict[str, Any] = {
            "tenant": about["tenant"],
            "delivery_id": about["id"],
            "id": new_id(now),
        }
        if not await self._store.write(webhook_sql("add_attempt"), attempt | {"now": now}):
            raise NonRetryableError("the delivery was deleted")
        outcome = await self._sender.send(
            delivery["url"],
            _secrets(delivery, now),
            json.loads(delivery["body"]),
            message_id=about["id"],
            now=now,
        )
        ended = attempt | _logged(outcome) | {"now": self._clock.now()}
        await self._store.write(webhook_sql("end_attempt"), ended)
        match outcome:
            case Delivered(status):
                return {"status": status}
            case Unavailable(_, after_seconds):
                await self._failed(about, delivery, ended, is_final=job.is_last_attempt)
                after = min(after_seconds, _MAX_RETRY_SECONDS)
                raise RetryLaterError(outcome.reason, after_seconds=after)
            case Gone() | Refused():
                await self._failed(about, delivery, ended, is_final=True)
                raise NonRetryableError(outcome.reason)
            case _:
                assert_never(outcome)

    async def _failed(
        self, about: dict[str, str], delivery: Row, ended: dict[str, Any], *, is_final: bool
    ) -> None:
        """Record a failure, and disable a webhook that has not succeeded for long."""
        now, webhook = ended["now"], {"tenant": about["tenant"], "id": delivery["webhook_id"]}
        if is_final:
            values = about | {"state": "failed", "now": now}
            await self._store.write(webhook_sql("end_delivery"), values)
        await self._store.write(webhook_sql("webhook_failed"), webhook | {"now": now})
        is_gone = ended["outcome"] == "gone"
        span = self._rules.gone if is_gone else self._rules.failing
        reason = f"no delivery has succeeded for {_hours(span)}; the last time {ended['detail']}"
        values = webhook | {"now": now, "before": now - span, "reason": reason}
        if await self._store.write(webhook_sql("disable_failing"), values):
            fields = {"tenant": webhook["tenant"], "webhook_id": webhook["id"], "reason": reason}
            _log.warning("webhook disabled", extra=fields)


def _secrets(webhook: Row, now: datetime) -> list[str]:
    """Return the secrets to sign with: the current one, and for some time the previous one."""
    until = webhook["previous_until"]
    if isinstance(until, str):  # SQLite
        until = datetime.fromisoformat(until)
    is_valid = webhook["previous_secret"] is not None and until is not None and now < until
    return [webhook["secret"], *([webhook["previous_secret"]] if is_valid else [])]


def _logged(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as the organization sees it: nothing about the server's own network."""
    kind = type(outcome).__name__.lower()
    if isinstance(outcome, Delivered):
        return {
            "outcome": kind,
            "status": outcome.status,
            "detail": f"the response was {outcome.status}",
        }
    is_internal = isinstance(outcome, Refused) and outcome.is_internal
    detail = _INTERNAL if is_internal else outcome.reason
    return {"outcome": kind, "status": outcome.status, "detail": detail[:_MAX_DETAIL_CHARS]}


def _hours(span: timedelta) -> str:
    return f"{span / timedelta(hours=1):g} hours"
