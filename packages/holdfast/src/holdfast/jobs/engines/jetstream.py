"""The engine for more than one machine: NATS JetStream says what to look at, the tables decide.

Whatever the broker does (deliver twice, lose everything, take an acknowledgement that is long out
of date), a job takes effect once: the lease and the marker are in the database. So an
acknowledgement need not be waited for either; one that is lost brings the message back, the table
says that the job is done, and it is acknowledged then.

What the operator sees to: three nodes, and on each ``jetstream { sync_interval: always }``. By
default an acknowledged message may be up to two minutes away from the disk. Nothing is lost by
that, as the rows stay until their jobs are done, but what the broker has forgotten must be missed
before it is published again.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from holdfast.core.job import LeasedJob
from holdfast.errors import ConfigurationError, StoreError
from holdfast.jobs.engines.nats_connection import Arrival, Broker, end_task
from holdfast.jobs.engines.nats_pull import Pulls, come_again
from holdfast.jobs.engines.nats_stream import Names
from holdfast.jobs.engines.relay import Relay
from holdfast.jobs.job_store import JobStore
from holdfast.ports import Delivery, Ending, Engine, FaultPoints, Finished, Notifier, Retry

__all__ = ["JetStreamEngine", "jetstream"]

_ACK: Final = b"+ACK"
_TERM: Final = b"+TERM"
_PROGRESS: Final = b"+WPI"
# The message should not come before the job may be taken.
_LATER_SECONDS: Final = 0.02
_TROUBLE_SECONDS: Final = 1.0

_log = logging.getLogger("holdfast.jobs")


class _Named(msgspec.Struct):
    """What a message says."""

    tenant: str
    job_id: UUID


class JetStreamEngine:
    """Jobs of one database, named to workers on many machines by NATS JetStream."""

    name = "jetstream"

    def __init__(
        self,
        table: JobStore,
        queues: Sequence[str],
        *,
        worker: str,
        lease_seconds: float,
        url: str,
        notifier: Notifier | None = None,
        stream: str = "HOLDFAST_JOBS",
        subject: str = "holdfast.jobs",
        replicas: int | None = None,
        again_after_seconds: float = 30.0,
        relay: bool = True,
        options: Mapping[str, Any] | None = None,
        faults: FaultPoints | None = None,
    ) -> None:
        """Serve these queues under this worker's name.

        ``url`` may name several servers, with commas. ``options`` are those of ``nats.connect``,
        e.g. ``user_credentials``. ``replicas`` is 3 unless told, or 1 where there are fewer nodes.
        With ``relay`` off, another worker of the same queues has to tell the broker of jobs.
        """
        if not again_after_seconds > 0:
            raise ConfigurationError("again_after_seconds should be above 0")
        self._table = table
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._stream, self._subject = stream, subject
        Names(stream, subject, "")  # refuse bad ones now, not in the background
        self._notifier = notifier or table.store.notifier()
        self._broker = Broker(
            url,
            queues,
            find_names=self._names,
            client_name=worker,
            ack_wait_seconds=lease_seconds,
            replicas=replicas,
            options=options or {},
            on_new_stream=self._publish_all_again,
        )
        self._pulls = Pulls(self._broker, queues)
        self._has_relay = relay
        self._relay = Relay(
            table,
            queues,
            self._broker,
            notifier=self._notifier,
            name=stream,
            again_after_seconds=again_after_seconds,
            faults=faults,
        )
        self._relaying: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to connect, and to tell the broker of what is due."""
        await self._broker.open(self._pulls)
        if self._has_relay and self._relaying is None:
            await self._notifier.open()
            self._relaying = asyncio.create_task(self._relay.run(), name="holdfast-jobs-relay")

    async def close(self) -> None:
        """Give back what nobody has looked at, and let go of everything."""
        relaying, self._relaying = self._relaying, None
        if relaying is not None:
            await end_task(relaying)
        await self._pulls.stop()
        await self._broker.close()
        await self._notifier.close()

    # -- taking -----------------------------------------------------------------------------------

    async def take(self, limit: int, wait_seconds: float) -> Sequence[Delivery]:
        """Wait for messages and lease the jobs they name. May return nothing before the time.

        While the broker is down this only waits.
        """
        named: list[tuple[Arrival, tuple[str, str]]] = []
        for arrival in await self._pulls.gather(limit, wait_seconds):
            job = _read(arrival)
            if job is None:
                await self._broker.say(arrival.receipt, _TERM)
            else:
                named.append((arrival, job))
        return await self._lease(named) if named else []

    async def _lease(self, named: Sequence[tuple[Arrival, tuple[str, str]]]) -> list[Delivery]:
        try:
            leased = await self._claim({job for _, job in named})
        except StoreError:
            for arrival, _ in named:
                await self._broker.say(arrival.receipt, come_again(_TROUBLE_SECONDS))
            raise
        deliveries, others = [], []
        for arrival, job in named:
            mine = leased.pop(job, None)  # of two messages about one job, the first has it
            if mine is None:
                others.append((arrival, job))
            else:
                deliveries.append(Delivery(mine, arrival.receipt))
        if others:
            await self._turn_away(others)
        return deliveries

    async def _claim(self, jobs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], LeasedJob]:
        leased = await self._table.claim_these(
            jobs, worker=self._worker, lease_seconds=self._lease_seconds
        )
        return {(job.lease.tenant, job.lease.job_id): job for job in leased}

    async def _turn_away(self, others: Sequence[tuple[Arrival, tuple[str, str]]]) -> None:
        """Answer messages about jobs that could not be leased."""
        try:
            to_do = await self._table.still_to_do({job for _, job in others})
        except StoreError:
            to_do = {job: _TROUBLE_SECONDS for _, job in others}
        for arrival, job in others:
            free_in = to_do.get(job)
            if free_in is None:
                # Finished. Or in line behind another: then this message is about a row that is
                # gone, and the relay names the new one when its turn comes.
                word = _ACK
            elif free_in > 0:
                word = come_again(free_in + _LATER_SECONDS)
            else:  # somebody has just this row in hand
                word = come_again(min(1.0, 0.01 * 2 ** min(arrival.deliveries, 7)))
            await self._broker.say(arrival.receipt, word)

    # -- holding and ending -----------------------------------------------------------------------

    async def renew(self, deliveries: Sequence[Delivery]) -> set[tuple[str, str]]:
        """Renew leases in the table, and tell the broker of those that hold."""
        held = await self._table.renew(
            (delivery.job.lease for delivery in deliveries),
            worker=self._worker,
            lease_seconds=self._lease_seconds,
        )
        for delivery in deliveries:
            lease = delivery.job.lease
            if (lease.tenant, lease.job_id) in held:
                await self._broker.say(delivery.receipt, _PROGRESS)
        return held

    async def settle(self, delivery: Delivery, ending: Ending) -> None:
        """Take the message off the queue, or let it come again."""
        match ending:
            case Finished():
                word = _ACK
            case Retry(seconds):
                word = come_again(seconds + _LATER_SECONDS if seconds else 0.0)
        await self._broker.say(delivery.receipt, word)

    def notify(self) -> None:
        """Wake the relays, here and elsewhere: there may be something to publish."""
        self._notifier.notify()

    def wake(self) -> None:
        """Let a waiting ``take`` return."""
        self._pulls.wake()

    # -- for the broker ---------------------------------------------------------------------------

    async def _names(self) -> Names:
        return Names.of(self._stream, self._subject, await self._table.store.secret())

    async def _publish_all_again(self) -> None:
        """Forget what the broker was told: the stream is new, and what the old one knew is gone."""
        lost = await self._table.forget_published()
        if lost:
            _log.warning("NATS has lost its stream: %d jobs are published again", lost)


def jetstream(url: str, **options: Any) -> Callable[[JobStore, Sequence[str], str, float], Engine]:
    """Return what makes the engine of a worker: ``Worker(store, jobs, engine=jetstream(url))``."""

    def make(table: JobStore, queues: Sequence[str], worker: str, lease_seconds: float) -> Engine:
        return JetStreamEngine(
            table, queues, worker=worker, lease_seconds=lease_seconds, url=url, **options
        )

    return make


def _read(arrival: Arrival) -> tuple[str, str] | None:
    """Return the job that a message names: what is not one must not reach the database."""
    try:
        job = msgspec.json.decode(arrival.data, type=_Named)
    except msgspec.DecodeError as error:
        _log.error("a message in the queue %s names no job: %s", arrival.queue, error)
        return None
    if "\x00" in job.tenant:
        _log.error("a message in the queue %s names no job: bad tenant", arrival.queue)
        return None
    return job.tenant, str(job.job_id)
