"""What a type checker says about the public API. Read by mypy in ``make lint``, never run.

``assert_type`` holds what users get. A line that must be an error has ``type: ignore`` with the
code of that error: mypy reports the ignore as unused if the error is gone.
"""

from datetime import timedelta
from typing import assert_type

from onceward import JobContext, Onceward, Policy, Worker
from onceward.client import AsyncClient, Client
from onceward.client import Response as ClientResponse
from onceward.jobs.job import EnqueueOutcome
from onceward_nats.jetstream import jetstream
from onceward_outbox import (
    AsyncOutbox,
    DrainReport,
    Entry,
    NewEntry,
    Operation,
    Outbox,
    OutboxQueue,
    Resolution,
    Status,
)


def entries() -> None:
    NewEntry(user_id="ada", operation="create", entity_type="note", endpoint="/notes")
    NewEntry(user_id="ada", operation=Operation.PATCH, entity_type="note", endpoint="/notes/1")
    NewEntry(user_id="ada", operation="craete", entity_type="note", endpoint="/notes")  # type: ignore[arg-type]
    NewEntry(
        user_id="ada",
        operation="update",
        entity_type="note",
        endpoint="/notes/1",
        conflict_resolution="client_wins",
    )
    NewEntry(
        user_id="ada",
        operation="update",
        entity_type="note",
        endpoint="/notes/1",
        conflict_resolution="mine_wins",  # type: ignore[arg-type]
    )


def outbox(outbox: Outbox, queue: OutboxQueue, entry: Entry) -> None:
    Outbox.open("outbox.db", server="https://api.example", idle_seconds=1.0)
    Outbox.open("outbox.db", server="https://api.example", idle_secs=1.0)  # type: ignore[call-arg]
    assert_type(outbox.enqueue("ada", "create", "note", "/notes", {}, once="a"), Entry)
    outbox.enqueue("ada", "craete", "note", "/notes")  # type: ignore[call-overload]
    assert_type(outbox.resolve(entry.id, "client_wins"), Entry)
    assert_type(outbox.resolve(entry.id, Resolution.SERVER_WINS), Entry)
    outbox.resolve(entry.id, "ours")  # type: ignore[arg-type]
    assert_type(outbox.drain("ada"), DrainReport)
    assert_type(queue.entries(status="pending"), list[Entry])
    assert_type(queue.entries(status=["failed", Status.CONFLICT]), list[Entry])
    queue.entries(status="waiting")  # type: ignore[arg-type]
    assert_type(entry.operation, Operation)
    assert_type(entry.status, Status)


async def async_outbox(outbox: AsyncOutbox, entry: Entry) -> None:
    assert_type(await outbox.resolve(entry.id, "merge", payload={}), Entry)
    assert_type(await outbox.enqueue("ada", "create", "note", "/notes", {}, lane="a"), Entry)
    await outbox.enqueue("ada", "craete", "note", "/notes")  # type: ignore[call-overload]
    await outbox.resolve(entry.id, "give up")  # type: ignore[arg-type]


async def jobs(onceward: Onceward, job: JobContext) -> None:
    assert_type(await onceward.enqueue("pack", {"id": 1}, delay_seconds=5), EnqueueOutcome)
    await onceward.enqueue("pack", delay=5)  # type: ignore[call-arg]
    assert_type(await job.enqueue("pack", order="ada"), EnqueueOutcome)
    await job.enqueue("pack", orders="ada")  # type: ignore[call-arg]
    await job.enqueue("pack", max_attempts="3")  # type: ignore[arg-type]
    assert_type(onceward.worker(concurrency=2, engine=jetstream("nats://localhost")), Worker)
    onceward.worker(concurency=2)  # type: ignore[call-arg]
    onceward.worker(concurrency="2")  # type: ignore[arg-type]
    jetstream("nats://localhost", replica=3)  # type: ignore[call-arg]


def policies(policy: Policy) -> None:
    assert_type(policy.replace(wait=timedelta(seconds=1)), Policy)
    policy.replace(waits=timedelta(seconds=1))  # type: ignore[call-arg]
    policy.replace(wait=1)  # type: ignore[arg-type]
    Policy(key_format="uuid")  # type: ignore[arg-type]
    Policy(error_format="problem")  # type: ignore[arg-type]


def client(client: Client) -> None:
    assert_type(client.post("/orders", json={"item": "boots"}, key="order-1"), ClientResponse)
    assert_type(client.request("PUT", "/orders/1", json={}), ClientResponse)
    client.post("/orders", jsn={})  # type: ignore[call-arg]
    client.get("/orders", key="order-1")  # type: ignore[call-arg]
    client.request("PSOT", "/orders")  # type: ignore[arg-type]
    Client("https://api.example", timeout=5.0, max_seconds=30)
    Client("https://api.example", time_out=5.0)  # type: ignore[call-arg]


async def async_client(client: AsyncClient) -> None:
    assert_type(await client.delete("/orders/1", key="order-2"), ClientResponse)
    await client.patch("/orders/1", jsn={})  # type: ignore[call-arg]
