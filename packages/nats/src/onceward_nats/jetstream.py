"""The engine for several machines: NATS JetStream delivers, the job table decides.

The broker may deliver twice, lose messages or accept an outdated acknowledgement: the lease and
the completion marker are in the database, so a job still takes effect once. Acknowledgements are
not waited for. After a lost one the message is delivered again, the job is found completed, and
the message is acknowledged then.

Operators should run three nodes with ``jetstream { sync_interval: always }``. By default NATS may
write an acknowledged message to disk up to two minutes later. A crash then delays jobs, until
their messages are published again, but loses none: the rows stay until the jobs are done.

While the broker is silent, workers lease due jobs from the table, as the engine ``sql`` does. While
it responds, an idle worker leases the jobs that have been due for too long: the broker has lost or
refused their messages, or has delivered them to a connection that broke.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypedDict, Unpack
from uuid import UUID

import msgspec

from onceward.errors import ConfigurationError, StoreError
from onceward.jobs.engines import SqlEngine
from onceward.jobs.job import LeasedJob
from onceward.jobs.job_store import JobStore
from onceward.jobs.published_jobs import PublishedJobs, ToDo
from onceward.observability.noop import NullBrokerMetrics
from onceward.ports import (
    BrokerMetrics,
    Delivery,
    Ending,
    Engine,
    FaultPoints,
    Finished,
    Notifier,
    Retry,
)
from onceward_nats.connection import (
    Broker,
    Message,
    MessageFetcher,
    StreamNames,
    end_task,
    nak,
)
from onceward_nats.relay import Relay
from onceward_nats.url import servers_of

__all__ = ["JetStreamEngine", "JetStreamOptions", "jetstream"]

_ACK: Final = b"+ACK"
_TERM: Final = b"+TERM"
_PROGRESS: Final = b"+WPI"
# A message should not be delivered before its job can be leased.
_DELIVERY_MARGIN_SECONDS: Final = 0.02
_ERROR_SECONDS: Final = 1.0

_log = logging.getLogger("onceward.jobs")


class _MessageBody(msgspec.Struct):
    """The content of a message."""

    tenant: str
    job_id: UUID


class JetStreamEngine:
    """Delivers the jobs of one database to workers on many machines."""

    # The name in logs and metrics.
    name = "jetstream"

    def __init__(
        self,
        job_store: JobStore,
        queues: Sequence[str],
        *,
        worker: str,
        lease_seconds: float,
        url: str,
        notifier: Notifier | None = None,
        stream: str = "ONCEWARD_JOBS",
        subject: str = "onceward.jobs",
        replicas: int | None = None,
        again_after_seconds: float = 30.0,
        table_after_seconds: float = 5.0,
        relay: bool = True,
        options: Mapping[str, Any] | None = None,
        faults: FaultPoints | None = None,
    ) -> None:
        """``url`` may name several servers, separated by commas.

        A broker that does not respond for ``table_after_seconds`` is bypassed: jobs are leased from
        the table until it responds again.

        ``options`` are those of ``nats.connect``, e.g. ``user_credentials``. ``replicas`` is 3 by
        default, or 1 with fewer than three nodes. Without ``relay``, another worker of the same
        queues must publish jobs.
        """
        if not again_after_seconds > 0:
            raise ConfigurationError("again_after_seconds must be above 0")
        if not table_after_seconds > 0:
            raise ConfigurationError("table_after_seconds must be above 0")
        self._job_store = job_store
        self._published = PublishedJobs(job_store)
        self._queues = tuple(queues)
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._stream, self._subject = stream, subject
        StreamNames(stream, subject, "")  # raises for bad names
        self._notifier = notifier or job_store.store.notifier()
        self._broker = Broker(
            url,
            queues,
            find_names=self._names,
            client_name=worker,
            ack_wait_seconds=lease_seconds,
            replicas=replicas,
            options=options or {},
            on_new_stream=self._publish_all_again,
            silent_after_seconds=table_after_seconds,
            on_silence=self._on_silence,
        )
        self._fetcher = MessageFetcher(self._broker, queues)
        # Leases jobs from the table while the broker is silent.
        self._table = SqlEngine(
            job_store,
            queues,
            worker=worker,
            lease_seconds=lease_seconds,
            notifier=self._notifier,
        )
        self._table_after_seconds = table_after_seconds
        self._look_for_overdue_at = 0.0
        self._metrics: BrokerMetrics = NullBrokerMetrics()
        self._has_relay = relay
        self._relay = Relay(
            job_store,
            queues,
            self._broker,
            notifier=self._notifier,
            name=stream,
            again_after_seconds=again_after_seconds,
            faults=faults,
        )
        self._relay_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start to connect and to publish due jobs."""
        await self._table.open()
        await self._broker.open(self._fetcher)
        if self._has_relay and self._relay_task is None:
            self._relay_task = asyncio.create_task(self._relay.run(), name="onceward-jobs-relay")

    async def close(self) -> None:
        """Return unprocessed messages to the broker and disconnect."""
        task, self._relay_task = self._relay_task, None
        if task is not None:
            await end_task(task)
        await self._fetcher.stop()
        await self._broker.close()
        await self._table.close()

    # -- fetching ---------------------------------------------------------------------------------

    async def take(
        self,
        limit: int,
        wait_seconds: float,
        *,
        alone: bool = True,
        skipped: Collection[str] = (),
    ) -> Sequence[Delivery]:
        """Wait for messages and lease the jobs they name. May return none before the time is up.

        While the broker is silent, lease due jobs of the table.
        """
        if self._broker.is_silent:
            deliveries = await self._table.take(limit, wait_seconds, alone=alone, skipped=skipped)
            self._metrics.jobs_bypassed_broker(len(deliveries))
            return deliveries
        named: list[tuple[Message, tuple[str, str]]] = []
        for message in await self._fetcher.fetch(limit, wait_seconds):
            job = _decode(message)
            if job is None:
                await self._broker.acknowledge(message.receipt, _TERM)
            else:
                named.append((message, job))
        if named:
            return await self._lease(named, alone=alone)
        return await self._lease_overdue(limit, alone=alone)

    async def _lease_overdue(self, limit: int, *, alone: bool) -> list[Delivery]:
        """Lease jobs that the broker should have delivered long ago. Called by an idle worker."""
        now = asyncio.get_running_loop().time()
        if now < self._look_for_overdue_at:
            return []
        self._look_for_overdue_at = now + self._table_after_seconds
        overdue = await self._published.overdue(
            self._queues, seconds=self._table_after_seconds, limit=limit
        )
        if not overdue:
            return []
        leased = await self._claim(overdue, alone=alone)
        if leased:
            self._look_for_overdue_at = now  # there may be more
            self._metrics.jobs_bypassed_broker(len(leased))
            _log.info("%d overdue jobs are taken from the database", len(leased))
        return [Delivery(job) for job in leased.values()]

    async def _lease(
        self, named: Sequence[tuple[Message, tuple[str, str]]], *, alone: bool
    ) -> list[Delivery]:
        try:
            leased = await self._claim({job for _, job in named}, alone=alone)
        except StoreError:
            for message, _ in named:
                await self._broker.acknowledge(message.receipt, nak(_ERROR_SECONDS))
            raise
        deliveries, others = _matched(named, leased)
        if others:
            deliveries += await self._lease_or_return(others, alone=alone)
        return deliveries

    async def _claim(
        self, jobs: Iterable[tuple[str, str]], *, alone: bool
    ) -> dict[tuple[str, str], LeasedJob]:
        leased = await self._job_store.claim_these(
            jobs, worker=self._worker, lease_seconds=self._lease_seconds, alone=alone
        )
        return {(job.lease.tenant, job.lease.job_id): job for job in leased}

    async def _lease_or_return(
        self, others: Sequence[tuple[Message, tuple[str, str]]], *, alone: bool
    ) -> list[Delivery]:
        """Try once more to lease jobs that are due; acknowledge or delay the other messages.

        A due job that could not be leased was locked by another transaction: most often by the
        relay, which marks it as published while it is delivered. The mark is short, so the lock is
        gone by now; to return the message would cost another delivery.
        """
        deliveries: list[Delivery] = []
        unpublished: set[tuple[str, str]] = set()
        try:
            to_do = await self._published.still_to_do({job for _, job in others})
            free_in_seconds = {job: found.free_in_seconds for job, found in to_do.items()}
            unpublished = await self._unpublish_paused(to_do)
            due = {job for job, seconds in free_in_seconds.items() if seconds == 0} - unpublished
            if due:
                deliveries, others = _matched(others, await self._claim(due, alone=alone))
        except StoreError:
            free_in_seconds = {job: _ERROR_SECONDS for _, job in others}
        for delivery in deliveries:  # there may be another message about it
            lease = delivery.job.lease
            free_in_seconds[lease.tenant, lease.job_id] = self._lease_seconds
        for message, job in others:
            free_in = free_in_seconds.get(job)
            if free_in is None or job in unpublished:
                # The job is finished, or its queue is paused. Or it waits for another of its order
                # key: then the message is about a deleted row, and the relay publishes the new one
                # when it is due.
                reply = _ACK
            elif free_in > 0:
                reply = nak(free_in + _DELIVERY_MARGIN_SECONDS)
            else:  # another transaction still has locked the row
                reply = nak(min(1.0, 0.01 * 2 ** min(message.deliveries, 7)))
            await self._broker.acknowledge(message.receipt, reply)
        return deliveries

    async def _unpublish_paused(
        self, to_do: Mapping[tuple[str, str], ToDo]
    ) -> set[tuple[str, str]]:
        """Mark due jobs of paused queues as unpublished; return those whose messages can go.

        The broker would deliver the messages again and again. The relay publishes the jobs when
        their queue is resumed.
        """
        due = [job for job, found in to_do.items() if found.free_in_seconds == 0]
        paused = await self._published.paused_queues() if due else set()
        held = [job for job in due if to_do[job].queue in paused]
        return await self._published.unpublish(held) if held else set()

    # -- leases and outcomes ----------------------------------------------------------------------

    async def renew(self, deliveries: Sequence[Delivery]) -> set[tuple[str, str]]:
        """Renew leases in the job table, and extend the delivery of those still held."""
        held = await self._job_store.renew(
            (delivery.job.lease for delivery in deliveries),
            worker=self._worker,
            lease_seconds=self._lease_seconds,
        )
        for delivery in deliveries:
            lease = delivery.job.lease
            if delivery.receipt is not None and (lease.tenant, lease.job_id) in held:
                await self._broker.acknowledge(delivery.receipt, _PROGRESS)
        return held

    async def settle(self, delivery: Delivery, ending: Ending) -> None:
        """Acknowledge the message, or have it delivered again.

        A job that was leased from the table has none. If one comes, it finds the job done or not
        due; and if the job must run again, the relay publishes it when it is due.
        """
        if delivery.receipt is None:
            return
        match ending:
            case Finished():
                reply = _ACK
            case Retry(seconds):
                reply = nak(seconds + _DELIVERY_MARGIN_SECONDS if seconds else 0.0)
        await self._broker.acknowledge(delivery.receipt, reply)

    def notify(self) -> None:
        """Wake the relays of all processes: there may be jobs to publish."""
        self._notifier.notify()

    def wake(self) -> None:
        """Make a waiting ``take`` return."""
        self._fetcher.wake()
        if self._broker.is_silent:
            self._table.wake()

    def report_to(self, metrics: BrokerMetrics) -> None:
        """Report silence of the broker to these metrics."""
        self._metrics = metrics

    # -- for the broker ---------------------------------------------------------------------------

    def _on_silence(self, is_silent: bool) -> None:
        if is_silent:
            _log.warning(
                "NATS has not responded for %g seconds: jobs are taken from the database",
                self._table_after_seconds,
            )
        else:
            _log.warning("NATS responds again: jobs are taken from it")
        self._fetcher.wake()
        self._metrics.broker_changed(is_silent=is_silent)

    async def _names(self) -> StreamNames:
        return StreamNames.of(self._stream, self._subject, await self._job_store.store.secret())

    async def _publish_all_again(self) -> None:
        """Mark all jobs as unpublished: the stream is new and empty."""
        lost = await self._published.reset_published()
        if lost:
            _log.warning("NATS has lost its stream: %d jobs are published again", lost)


class JetStreamOptions(TypedDict, total=False):
    """Options of ``JetStreamEngine`` that ``jetstream`` passes on."""

    # Wakes the workers of this process.
    notifier: Notifier | None
    # The name of the stream.
    stream: str
    # The prefix of all subjects.
    subject: str
    # Copies of the stream: 3 by default, or 1 with fewer than three nodes.
    replicas: int | None
    # Seconds after which a message that was not acknowledged is delivered again.
    again_after_seconds: float
    # Seconds without a response of NATS after which jobs are taken from the database.
    table_after_seconds: float
    # False if another worker of the same queues publishes the jobs.
    relay: bool
    # Options of ``nats.connect``.
    options: Mapping[str, Any] | None
    # For tests.
    faults: FaultPoints | None


def jetstream(
    url: str, **options: Unpack[JetStreamOptions]
) -> Callable[[JobStore, Sequence[str], str, float], Engine]:
    """Return an ``EngineMaker``: ``Worker(store, jobs, engine=jetstream(url))``.

    ``url`` may name several servers, separated by commas. Raises ``ConfigurationError`` for a
    malformed one.
    """
    servers_of(url)

    def make(jobs: JobStore, queues: Sequence[str], worker: str, lease_seconds: float) -> Engine:
        return JetStreamEngine(
            jobs, queues, worker=worker, lease_seconds=lease_seconds, url=url, **options
        )

    return make


def _matched(
    named: Sequence[tuple[Message, tuple[str, str]]], leased: dict[tuple[str, str], LeasedJob]
) -> tuple[list[Delivery], list[tuple[Message, tuple[str, str]]]]:
    """Return the deliveries of leased jobs, and the messages that are left."""
    deliveries, others = [], []
    for message, job in named:
        mine = leased.pop(job, None)  # the first of two messages about one job
        if mine is None:
            others.append((message, job))
        else:
            deliveries.append(Delivery(mine, message.receipt))
    return deliveries, others


def _decode(message: Message) -> tuple[str, str] | None:
    """Return the tenant and id that a message names; None if it is malformed."""
    try:
        job = msgspec.json.decode(message.data, type=_MessageBody)
    except msgspec.DecodeError as error:
        _log.error("a message in the queue %s is malformed: %s", message.queue, error)
        return None
    if "\x00" in job.tenant:
        _log.error("a message in the queue %s is malformed: bad tenant", message.queue)
        return None
    return job.tenant, str(job.job_id)
