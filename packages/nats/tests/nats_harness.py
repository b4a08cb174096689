"""A stream on a real NATS server, for tests."""

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, StreamInfo

from onceward.jobs.job_store import JobStore
from onceward.jobs.worker import EngineMaker
from onceward.ports import Delivery, Store
from onceward_nats.connection import StreamNames, close_client
from onceward_nats.jetstream import JetStreamEngine, jetstream
from onceward_testing.servers import RealNats
from packages.onceward.tests.support.jobs_harness import TENANT, TIMEOUT_SECONDS, eventually


class NatsLab:
    """A new stream for each test, so that no test gets the messages of another."""

    def __init__(self, url: str) -> None:
        self.url = url
        name = secrets.token_hex(4)
        self.stream, self.subject = f"JOBS_{name}", f"jobs.{name}"

    def options(self, **more: Any) -> dict[str, Any]:
        return {"url": self.url, "stream": self.stream, "subject": self.subject, **more}

    def engine(self, **more: Any) -> EngineMaker:
        """Return an ``EngineMaker`` for a worker."""
        return jetstream(**self.options(**more))

    def engine_of(
        self, table: JobStore, *queues: str, worker: str = "test-worker", **more: Any
    ) -> JetStreamEngine:
        """Return an engine without a worker."""
        more = {"lease_seconds": 30.0, **more}
        return JetStreamEngine(table, queues, worker=worker, **self.options(**more))

    @asynccontextmanager
    async def broker(self) -> AsyncIterator[JetStreamContext]:
        client = Client()
        try:
            await client.connect(self.url.split(","))
            yield client.jetstream()
        finally:
            await close_client(client)

    async def names(self, store: Store) -> StreamNames:
        return StreamNames.of(self.stream, self.subject, await store.secret())

    async def stream_info(self) -> StreamInfo:
        async with self.broker() as broker:
            return await broker.stream_info(self.stream)

    async def messages(self) -> int:
        """Return how many messages the stream holds."""
        return (await self.stream_info()).state.messages

    async def consumer_info(self, store: Store, queue: str = "default") -> ConsumerInfo:
        async with self.broker() as broker:
            name = (await self.names(store)).consumer_of(queue)
            info: ConsumerInfo = await broker.consumer_info(self.stream, name)
            return info

    async def until_consumer(self, store: Store) -> None:
        """Wait until an engine has created its consumer."""

        async def is_there() -> bool:
            try:
                await self.consumer_info(store)
            except Exception:  # noqa: BLE001 - not there yet
                return False
            return True

        await eventually(is_there)

    async def send(
        self, store: Store, data: bytes, *, queue: str = "default", times: int = 1
    ) -> None:
        """Publish without the relay, each message with a new id."""
        subject = (await self.names(store)).subject_of(queue)
        async with self.broker() as broker:
            for _ in range(times):
                await broker.publish(subject, data, headers={"Nats-Msg-Id": secrets.token_hex(8)})

    async def send_job(self, store: Store, job_id: str, *, times: int = 1) -> None:
        """Publish a job once more."""
        data = msgspec.json.encode({"tenant": TENANT, "job_id": job_id})
        await self.send(store, data, times=times)

    async def until_empty(self, *, seconds: float = TIMEOUT_SECONDS) -> None:
        """Wait until every message has been acknowledged."""

        async def check() -> bool:
            return await self.messages() == 0

        await eventually(check, seconds=seconds)


async def taken(engine: JetStreamEngine, *, seconds: float = TIMEOUT_SECONDS) -> Delivery:
    """Take exactly one job."""

    async def take() -> list[Delivery]:
        return list(await engine.take(10, 0.2))

    (delivery,) = await eventually(take, seconds=seconds, pause=0)
    return delivery


@pytest.fixture
def nats(nats_server: RealNats) -> NatsLab:
    nats_server.start()
    return NatsLab(nats_server.url())


@pytest.fixture(scope="session")
def faulty_nats() -> Iterator[RealNats]:
    with RealNats() as server:
        yield server


@pytest.fixture
def own_nats(faulty_nats: RealNats) -> Iterator[RealNats]:
    """Return a server that a test may freeze and stop, and whose files it may delete."""
    faulty_nats.start()
    yield faulty_nats
    faulty_nats.thaw()
