"""The relay: every due row is published, marked, and published again if it is not claimed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from onceward.errors import StoreUnavailableError
from onceward_nats import relay as relays
from onceward_nats.connection import Broker, Message
from onceward_nats.relay import Relay
from onceward_testing.servers import RealNats
from packages.nats.tests.nats_harness import NatsLab
from packages.onceward.tests.support.jobs_harness import JobsLab, eventually

AGO = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 - :seconds * 1000 AS INTEGER)",
    "postgresql": "statement_timestamp() - make_interval(secs => :seconds::float8)",
}


class NullListener:
    """Ignores messages: these tests check the stream."""

    async def on_message(self, message: Message) -> None:
        return

    def on_pull_ended(self, queue: str, unserved: int | None) -> None:
        return


class Faults:
    """Raises or runs what is planned for the next time a point is reached."""

    def __init__(self) -> None:
        self.plans: dict[str, Any] = {}

    async def reach(self, point: str) -> None:
        plan = self.plans.pop(point, None)
        if isinstance(plan, Exception):
            raise plan
        if plan is not None:
            await plan()


class RelayLab:
    """A relay that publishes when a test calls it."""

    def __init__(self, lab: JobsLab, nats: NatsLab) -> None:
        self.lab, self.nats = lab, nats
        self.faults = Faults()
        self.notifier = lab.store.notifier()
        self.broker = Broker(
            nats.url,
            ("default",),
            find_names=lambda: nats.names(lab.store),
            client_name="relay-test",
            ack_wait_seconds=30,
            replicas=None,
            options={},
            on_new_stream=self._nothing,
            silent_after_seconds=5,
            on_silence=lambda _: None,
        )
        self.relay = self.another()

    async def _nothing(self) -> None:
        return

    def another(self, *queues: str) -> Relay:
        return Relay(
            self.lab.job_store,
            queues or ("default",),
            self.broker,
            notifier=self.notifier,
            name=self.nats.stream,
            again_after_seconds=30,
            faults=self.faults,
        )

    async def publish(self) -> tuple[int, int]:
        return await self.relay.publish_due()

    async def row(self) -> tuple[int, bool]:
        """Return how often the one row was published, and whether it is marked."""
        (row,) = await self.lab.rows("SELECT published, published_at FROM onceward_jobs")
        return row["published"], row["published_at"] is not None

    async def grow_old(self, seconds: float) -> None:
        """Let it be so long since everything became due and was published."""
        past = AGO[self.lab.store.name]
        await self.lab.store.write(
            self.lab.store.table_names.render(
                f"UPDATE onceward_jobs SET visible_at = {past}, published_at = {past}"
            ),
            {"seconds": seconds},
        )


@pytest.fixture
async def relay_lab(lab: JobsLab, nats_server: RealNats) -> AsyncIterator[RelayLab]:
    nats_server.start()
    relay_lab = RelayLab(lab, NatsLab(nats_server.url()))
    await relay_lab.broker.open(NullListener())
    async with asyncio.timeout(15):
        await relay_lab.broker.up.wait()
    yield relay_lab
    await relay_lab.broker.close()


async def test_due_job_is_published_once_and_marked(relay_lab):
    await relay_lab.lab.enqueue()
    assert await relay_lab.publish() == (1, 1)
    assert await relay_lab.row() == (1, True)
    assert await relay_lab.publish() == (0, 0)
    assert await relay_lab.nats.messages() == 1


async def test_message_contains_only_tenant_and_job_id(relay_lab):
    job_id = await relay_lab.lab.enqueued(payload={"card": "4111"}, tenant="kim lovelace")
    await relay_lab.publish()
    names = await relay_lab.nats.names(relay_lab.lab.store)
    async with relay_lab.nats.broker() as broker:
        message = await broker.get_msg(relay_lab.nats.stream, 1)
    assert message.data == b'{"tenant":"kim lovelace","job_id":"%s"}' % job_id.encode()
    assert message.subject == names.subject_of("default")
    assert "kim" not in str(message.subject)  # which has a hash, of the digits 0 to f


async def test_job_that_is_not_due_is_not_published(relay_lab):
    await relay_lab.lab.enqueue(delay_seconds=60)
    assert await relay_lab.publish() == (0, 0)
    assert 55 < (await relay_lab.lab.published_jobs.publish_due_in(["default"]) or 0) <= 60
    await relay_lab.lab.show_in(-0.001)
    assert await relay_lab.publish() == (1, 1)
    assert await relay_lab.lab.published_jobs.publish_due_in(["default"]) is None


async def test_relay_that_dies_before_the_mark_publishes_again_with_the_same_id(relay_lab):
    await relay_lab.lab.enqueue()
    relay_lab.faults.plans["relay_before_mark"] = RuntimeError("killed")
    with pytest.raises(RuntimeError, match="killed"):
        await relay_lab.publish()
    assert await relay_lab.row() == (0, False)
    assert await relay_lab.nats.messages() == 1
    assert await relay_lab.publish() == (1, 1)
    assert await relay_lab.row() == (1, True)
    assert await relay_lab.nats.messages() == 1


async def test_job_that_is_not_claimed_is_published_again_with_growing_delay(relay_lab):
    await relay_lab.lab.enqueue()
    await relay_lab.publish()
    for published, waits in ((1, 30), (2, 60), (3, 120)):
        await relay_lab.grow_old(waits - 5)
        assert await relay_lab.publish() == (0, 0)
        await relay_lab.grow_old(waits + 5)
        assert await relay_lab.publish() == (1, 1)
        assert await relay_lab.row() == (published + 1, True)
    assert await relay_lab.nats.messages() == 4


async def test_leased_job_is_not_published(relay_lab):
    await relay_lab.lab.enqueue()
    await relay_lab.lab.claim_one()
    assert await relay_lab.publish() == (0, 0)


async def test_requeued_job_has_a_new_message_id(relay_lab):
    job_id = await relay_lab.lab.enqueued()
    await relay_lab.publish()
    job = await relay_lab.lab.claim_one()
    await relay_lab.lab.job_store.dead_letter(job, worker="test-worker", reason="error", error="no")
    await relay_lab.lab.admin.requeue(job_id, tenant="ada", actor="operator")
    assert await relay_lab.publish() == (1, 1)
    assert await relay_lab.nats.messages() == 2


async def test_a_job_requeued_before_the_mark_is_not_marked(relay_lab):
    lab = relay_lab.lab
    job_id = await lab.enqueued()

    async def requeue() -> None:
        job = await lab.claim_one()
        await lab.job_store.dead_letter(job, worker="test-worker", reason="error", error="no")
        await lab.admin.requeue(job_id, tenant="ada", actor="operator")

    relay_lab.faults.plans["relay_before_mark"] = requeue
    assert await relay_lab.publish() == (1, 1)
    assert await relay_lab.row() == (0, False)


async def test_all_jobs_are_published_again_after_a_reset(relay_lab):
    await relay_lab.lab.enqueue(resource_id="one")
    await relay_lab.lab.enqueue(resource_id="two")
    assert await relay_lab.publish() == (2, 2)
    assert await relay_lab.lab.published_jobs.reset_published() == 2
    assert await relay_lab.lab.published_jobs.reset_published() == 0
    assert await relay_lab.publish() == (2, 2)
    assert await relay_lab.nats.messages() == 4


async def test_queues_of_other_workers_are_not_published(relay_lab):
    await relay_lab.lab.enqueue(queue="elsewhere")
    assert await relay_lab.publish() == (0, 0)
    assert await relay_lab.lab.published_jobs.publish_due_in(["default"]) is None


async def test_only_the_front_of_a_long_queue_is_published(relay_lab, monkeypatch):
    monkeypatch.setattr(relays, "_FRONT", 3)
    for number in range(5):
        await relay_lab.lab.enqueue(resource_id=str(number))
    assert await relay_lab.publish() == (3, 3)
    assert await relay_lab.publish() == (0, 0)
    claimed = await relay_lab.lab.job_store.claim(
        ["default"], worker="test-worker", limit=1, lease_seconds=30
    )
    assert [job.resource_id for job in claimed] == ["0"]
    assert await relay_lab.publish() == (1, 1)


async def test_two_relays_publish_no_job_twice(relay_lab):
    await relay_lab.lab.enqueue()
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        inside.set()
        await go_on.wait()

    relay_lab.faults.plans["relay_before_publish"] = wait
    first = asyncio.create_task(relay_lab.publish())
    await inside.wait()
    second = await relay_lab.another().publish_due()
    go_on.set()
    assert await first == (1, 1)
    # On SQLite there is no such turn, and the broker throws the second one away.
    assert second == ((0, 0) if relay_lab.lab.store.name == "postgresql" else (1, 1))
    assert await relay_lab.nats.messages() == 1
    assert await relay_lab.row() == (1, True)


async def test_relays_of_different_queues_do_not_wait_for_each_other(relay_lab):
    await relay_lab.lab.enqueue(queue="other")
    await relay_lab.lab.enqueue(queue="default")
    other: list[tuple[int, int]] = []

    async def publish_other() -> None:
        other.append(await relay_lab.another("other").publish_due())

    relay_lab.faults.plans["relay_before_publish"] = publish_other
    assert await relay_lab.publish() == (1, 1)
    assert other == [(1, 1)]


async def test_relay_continues_after_database_errors(relay_lab, monkeypatch, caplog):
    real = relay_lab.lab.published_jobs.to_publish
    errors: list[Exception] = [StoreUnavailableError("gone"), RuntimeError("worse")]

    async def fails_twice(*args: Any, **values: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return await real(*args, **values)

    relay = relay_lab.another()
    monkeypatch.setattr(relay._jobs, "to_publish", fails_twice)
    await relay_lab.lab.enqueue()
    running = asyncio.create_task(relay.run())
    try:

        async def is_marked() -> bool:
            relay_lab.notifier.notify()
            return bool(await relay_lab.row() == (1, True))

        await eventually(is_marked)
    finally:
        running.cancel()
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == [
        "jobs cannot be published, trying again: gone",
        "jobs cannot be published, trying again",
    ]


async def test_without_a_broker_nothing_is_published_or_marked(relay_lab):
    await relay_lab.lab.enqueue()
    await relay_lab.broker.close()
    assert await relay_lab.publish() == (1, 0)
    assert await relay_lab.row() == (0, False)
