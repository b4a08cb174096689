"""The engine for more than one machine: NATS JetStream says what to look at, the tables decide.

Whatever the broker does (deliver twice, lose everything, take an acknowledgement that is long out
of date), a job takes effect once: the lease and the marker are in the database. So an
acknowledgement need not be waited for either; one that is lost brings the message back, the table
says that the job is done, and it is acknowledged then.

What the operator sees to: three nodes, and on each ``jetstream { sync_interval: always }``. The
default lets an acknowledged message be up to two minutes away from the disk. Nothing is lost by
that here, but what the broker forgets has to be published again, which takes a while to notice.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

import msgspec

from holdfast.core.job import LeasedJob
from holdfast.errors import ConfigurationError, StoreError
from holdfast.jobs.engines.broker import PULL_SECONDS, Arrival, Broker, Names
from holdfast.jobs.engines.relay import Relay
from holdfast.jobs.table import JobTable
from holdfast.ports import Bell, ComesBack, Delivery, Ended, Ending, Engine, FaultPoints

__all__ = ["JetStreamEngine", "jetstream"]

_ACK: Final = b"+ACK"
_TERM: Final = b"+TERM"
_PROGRESS: Final = b"+WPI"
# A request is taken for lost so long after its time.
_SLACK_SECONDS: Final = 0.5
# The message should not come before the job may be taken.
_LATER_SECONDS: Final = 0.02
_TROUBLE_SECONDS: Final = 1.0

_log = logging.getLogger("holdfast.jobs")


class _Named(msgspec.Struct):
    """What a message says."""

    tenant: str
    job_id: UUID


class _Line:
    """What this process has asked of one queue."""

    def __init__(self) -> None:
        self.asked = 0
        self.until = 0.0


class JetStreamEngine:
    """Jobs of one database, named to workers on many machines by NATS JetStream."""

    name = "jetstream"

    def __init__(
        self,
        table: JobTable,
        queues: Sequence[str],
        *,
        worker: str,
        lease_seconds: float,
        url: str,
        bell: Bell | None = None,
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
        With ``relay`` off, another process has to tell the broker of jobs.
        """
        if not again_after_seconds > 0:
            raise ConfigurationError("again_after_seconds should be above 0")
        self._table = table
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._stream, self._subject = stream, subject
        self._bell = bell or table.store.bell()
        self._broker = Broker(
            url,
            queues,
            names=self._names,
            client_name=worker,
            ack_wait_seconds=lease_seconds,
            replicas=replicas,
            options=options or {},
            arrived=self._arrived,
            ended=self._ended,
            renewed=self._renewed,
        )
        self._relay: Relay | None = None
        if relay:
            self._relay = Relay(
                table,
                queues,
                self._broker,
                bell=self._bell,
                name=stream,
                again_after_seconds=again_after_seconds,
                faults=faults,
            )
        self._relaying: asyncio.Task[None] | None = None
        self._lines = {queue: _Line() for queue in queues}
        self._here: list[Arrival] = []
        self._room = 0
        self._something = asyncio.Event()

    async def open(self) -> None:
        """Begin to connect, and to tell the broker of what is due."""
        await self._broker.open()
        if self._relay is not None and self._relaying is None:
            await self._bell.open()
            self._relaying = asyncio.create_task(self._relay.run(), name="holdfast-jobs-relay")

    async def close(self) -> None:
        """Give back what nobody has looked at, and let go of everything."""
        relaying, self._relaying = self._relaying, None
        if relaying is not None:
            relaying.cancel()
            with suppress(asyncio.CancelledError):
                await relaying
        self._room = 0
        await self._broker.stop_pulling()
        for arrival in self._here:
            await self._broker.say(arrival.receipt, _nak(0.0))
        self._here = []
        await self._broker.close()
        await self._bell.close()

    # -- taking -----------------------------------------------------------------------------------

    async def take(self, limit: int, wait_seconds: float) -> Sequence[Delivery]:
        """Ask for messages, wait for the first, and lease the jobs they name.

        While the broker is down this waits and returns nothing; so it does after a wait in which
        nothing came, and when a request has had its time.
        """
        self._room = limit
        await self._ask(limit)
        if not self._here and wait_seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._something.wait()
        await asyncio.sleep(0)  # what came in the same packet comes along
        self._something.clear()
        arrivals, self._here = self._here[:limit], self._here[limit:]
        self._room = limit - len(arrivals)
        return await self._lease(arrivals) if arrivals else []

    async def _ask(self, limit: int) -> None:
        """Ask each queue for what is missing, unless that has been asked for."""
        now = asyncio.get_running_loop().time()
        for queue, line in self._lines.items():
            if now > line.until:
                line.asked = 0
            missing = limit - len(self._here) - line.asked
            if missing * 2 >= limit and await self._broker.pull(queue, missing):
                line.asked += missing
                line.until = now + PULL_SECONDS + _SLACK_SECONDS

    async def _lease(self, arrivals: Sequence[Arrival]) -> list[Delivery]:
        named = [(arrival, job) for arrival in arrivals if (job := await self._read(arrival))]
        try:
            leased = await self._claim({job for _, job in named})
        except StoreError:
            for arrival in arrivals:
                await self._broker.say(arrival.receipt, _nak(_TROUBLE_SECONDS))
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

    async def _claim(self, jobs: set[tuple[str, str]]) -> dict[tuple[str, str], LeasedJob]:
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
                # Finished. Or in line behind another: when its turn comes, the relay names it,
                # as it has not named that row before.
                word = _ACK
            elif free_in > 0:
                word = _nak(free_in + _LATER_SECONDS)
            else:  # somebody has just this row in hand
                word = _nak(min(1.0, _LATER_SECONDS * 2 ** min(arrival.deliveries, 6)))
            await self._broker.say(arrival.receipt, word)

    async def _read(self, arrival: Arrival) -> tuple[str, str] | None:
        try:
            job = msgspec.json.decode(arrival.data, type=_Named)
        except msgspec.DecodeError as error:
            return await self._refuse(arrival, str(error))
        if "\x00" in job.tenant:
            return await self._refuse(arrival, "no tenant has such a name")
        return job.tenant, str(job.job_id)

    async def _refuse(self, arrival: Arrival, reason: str) -> None:
        _log.error("a message in the queue %s names no job: %s", arrival.queue, reason)
        await self._broker.say(arrival.receipt, _TERM)

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
            case Ended():
                await self._broker.say(delivery.receipt, _ACK)
            case ComesBack(seconds):
                await self._broker.say(delivery.receipt, _nak(seconds and seconds + _LATER_SECONDS))

    def ring(self) -> None:
        """Wake the relays, here and elsewhere: there may be something to publish."""
        self._bell.ring()

    def wake(self) -> None:
        """Let a waiting ``take`` return."""
        self._something.set()

    # -- what the broker tells --------------------------------------------------------------------

    async def _arrived(self, arrival: Arrival) -> None:
        line = self._lines[arrival.queue]
        line.asked = max(0, line.asked - 1)
        if len(self._here) < self._room:
            self._here.append(arrival)
            self._something.set()
        else:  # several queues had something: let another worker have it
            await self._broker.say(arrival.receipt, _nak(0.0))

    def _ended(self, queue: str, unserved: int | None) -> None:
        line = self._lines[queue]
        line.asked = 0 if unserved is None else max(0, line.asked - unserved)
        self._something.set()

    async def _renewed(self) -> None:
        """Publish everything again: the stream is new, and what the old one knew is gone."""
        lost = await self._table.forget_published()
        if lost:
            _log.warning("NATS has lost its stream: %d jobs are published again", lost)

    async def _names(self) -> Names:
        return Names.of(self._stream, self._subject, await self._table.store.secret())


def jetstream(url: str, **options: Any) -> Callable[[JobTable, Sequence[str], str, float], Engine]:
    """Return what makes the engine of a worker: ``Worker(store, jobs, engine=jetstream(url))``."""

    def make(table: JobTable, queues: Sequence[str], worker: str, lease_seconds: float) -> Engine:
        return JetStreamEngine(
            table, queues, worker=worker, lease_seconds=lease_seconds, url=url, **options
        )

    return make


def _nak(delay_seconds: float) -> bytes:
    """Say that a message is to come again, after some time."""
    if delay_seconds <= 0:
        return b"-NAK"
    return b"-NAK " + msgspec.json.encode({"delay": int(delay_seconds * 1e9)})
