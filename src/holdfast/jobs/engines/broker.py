"""The line to NATS: one stream, one consumer per queue, all made again whenever they are missing.

The only file that knows ``nats-py``. It decides nothing: a message names a job, and whoever gets it
asks the table. A connection is used until it breaks and then thrown away for a new one: a client
that reconnects by itself keeps what it could not send, and an acknowledgement that is late may be
about a job that has long been another's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError

from holdfast.errors import ConfigurationError, StoreError
from holdfast.ports import Row

__all__ = ["PULL_SECONDS", "Arrival", "Broker", "Names"]

# How long the broker keeps a request for messages. One that is lost, as happens when a leader
# dies, is missed for so long.
PULL_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 5.0
_PING_SECONDS: Final = 5
_DUPLICATES_SECONDS: Final = 120.0
# Jobs that wait for a retry count too, so it is far above what workers have in hand; what is
# above it waits in the stream.
_MOST_UNACKNOWLEDGED: Final = 65_536
_PAUSES: Final = (0.1, 0.2, 0.5, 1.0)
_REPLICAS: Final = 3
# "replicas > 1 not supported in non-clustered mode", "no suitable peers for placement"
_TOO_FEW_NODES: Final = (10074, 10005)
_TROUBLES: Final = (NatsError, OSError, TimeoutError)

_log = logging.getLogger("holdfast.jobs")


class Names(msgspec.Struct, frozen=True):
    """What things are called at the broker. No tenant and no payload is part of any name."""

    stream: str
    subject: str
    # Stands for the database: two that share a stream do not get each other's messages.
    database: str

    @classmethod
    def of(cls, stream: str, subject: str, secret: bytes) -> "Names":
        """Name the database by a hash, as it has no name that it keeps when it moves."""
        return cls(stream, subject, sha256(b"holdfast.jobs.nats" + secret).hexdigest()[:12])

    @property
    def subjects(self) -> str:
        """Everything the stream takes."""
        return f"{self.subject}.>"

    def subject_of(self, queue: str) -> str:
        """Return where jobs of a queue are published: a dot would make two words of its name."""
        return f"{self.subject}.{self.database}.{queue.replace('.', '~')}"

    def consumer_of(self, queue: str) -> str:
        """Return the name of a queue's consumer."""
        return f"{self.database}-{queue.replace('.', '~')}"


class Arrival(NamedTuple):
    """A message, and where to say what became of it."""

    queue: str
    receipt: str
    data: bytes
    deliveries: int


class Broker:
    """One connection at a time, kept up in the background."""

    def __init__(
        self,
        url: str,
        queues: Sequence[str],
        *,
        names: Callable[[], Awaitable[Names]],
        client_name: str,
        ack_wait_seconds: float,
        replicas: int | None,
        options: Mapping[str, Any],
        arrived: Callable[[Arrival], Awaitable[None]],
        ended: Callable[[str, int | None], None],
        renewed: Callable[[], Awaitable[None]],
    ) -> None:
        """Tell ``arrived`` of messages, ``ended`` of requests that are over, ``renewed`` of a loss.

        ``ended`` gets the queue and how many messages did not come; None: nobody knows.
        """
        self._servers = [server.strip() for server in url.split(",") if server.strip()]
        if not self._servers:
            raise ConfigurationError("write the address of NATS as nats://host:4222")
        self._queues = tuple(queues)
        self._find_names = names
        self._names = Names("", "", "")
        self._client_name = client_name
        self._ack_wait_seconds = ack_wait_seconds
        self._replicas = replicas
        self._options = dict(options)
        self._arrived = arrived
        self._ended = ended
        self._renewed = renewed
        self._client: Client | None = None
        self._inboxes: dict[str, Subscription] = {}
        self._doubt = asyncio.Event()
        self._is_new = False
        self._is_down = False
        self._is_refusing = False
        self._task: asyncio.Task[None] | None = None
        self.up = asyncio.Event()

    async def open(self) -> None:
        """Begin to connect. Returns at once: the broker may be down, and jobs can wait."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="holdfast-jobs-nats")

    async def close(self) -> None:
        """Let go of the connection. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    # -- talking --------------------------------------------------------------------------------

    async def publish(self, jobs: Sequence[Row]) -> list[Row]:
        """Name these jobs to their queues; returns those that the broker has on its disk."""
        client = self._client
        if client is None:
            return []
        stream = client.jetstream(timeout=_ANSWER_SECONDS)
        results = await asyncio.gather(
            *(self._publish(stream, job) for job in jobs), return_exceptions=True
        )
        troubles = [result for result in results if isinstance(result, BaseException)]
        for trouble in troubles:
            if not isinstance(trouble, _TROUBLES):
                raise trouble
        if troubles:
            self._doubted(troubles[0])
        self._say_refused(troubles)
        return [
            job
            for job, result in zip(jobs, results, strict=True)
            if not isinstance(result, BaseException)
        ]

    async def _publish(self, stream: JetStreamContext, job: Row) -> None:
        # The number of the row tells a requeued job from the one that was given up.
        number = f"{job['job_id']}:{job['seq']}:{job['published'] + 1}"
        await stream.publish(
            self._names.subject_of(job["queue"]),
            msgspec.json.encode({"tenant": job["tenant"], "job_id": job["job_id"]}),
            stream=self._names.stream,
            headers={"Nats-Msg-Id": number},
        )

    async def pull(self, queue: str, count: int) -> bool:
        """Ask for so many messages of a queue; False when there is nobody to ask."""
        client, inbox = self._client, self._inboxes.get(queue)
        if client is None or inbox is None:
            return False
        consumer = f"{self._names.stream}.{self._names.consumer_of(queue)}"
        request = {"batch": count, "expires": int(PULL_SECONDS * 1e9)}
        try:
            await client.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{consumer}", msgspec.json.encode(request), inbox.subject
            )
        except _TROUBLES:
            return False
        return True

    async def stop_pulling(self) -> None:
        """Take no more messages; those on their way arrive before this returns."""
        inboxes, self._inboxes = self._inboxes, {}
        with suppress(*_TROUBLES):
            async with asyncio.timeout(_ANSWER_SECONDS):
                for inbox in inboxes.values():
                    await inbox.drain()

    async def say(self, receipt: str, word: bytes) -> None:
        """Say what became of a message. May be lost: then it comes again, and the table knows."""
        if self._client is not None:
            with suppress(*_TROUBLES):
                await self._client.publish(receipt, word)

    # -- staying connected ------------------------------------------------------------------------

    async def _keep(self) -> None:
        attempts = 0
        while True:
            try:
                if not self._names.stream:
                    self._names = await self._find_names()
                client = await self._connect()
                try:
                    await self._use(client)
                finally:
                    self.up.clear()
                    self._client, self._inboxes = None, {}
                    await _let_go(client)
                attempts = 0
            except (*_TROUBLES, StoreError, ConfigurationError) as error:
                self._say_down(error)
            await asyncio.sleep(_PAUSES[min(attempts, len(_PAUSES) - 1)])
            attempts += 1

    async def _connect(self) -> Client:
        client = Client()
        try:
            await client.connect(
                self._servers,
                name=self._client_name,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=_PING_SECONDS,
                error_cb=_hear,
                closed_cb=self._closed,
                **self._options,
            )
        except BaseException:
            await _let_go(client)
            raise
        return client

    async def _use(self, client: Client) -> None:
        """Prepare what is needed, and again when that is in doubt, until the connection breaks."""
        while not client.is_closed:
            self._doubt.clear()
            await self._prepare(client)
            self._client = client
            self._say_up()
            self.up.set()
            while not (client.is_closed or self._doubt.is_set()):
                with suppress(TimeoutError):  # to be told is not certain
                    await asyncio.wait_for(self._doubt.wait(), 1.0)
            self.up.clear()
            if not client.is_closed:
                await asyncio.sleep(_PAUSES[1])

    async def _prepare(self, client: Client) -> None:
        """Make the stream and the consumers, unless they are there."""
        names, stream = self._names, client.jetstream(timeout=_ANSWER_SECONDS)
        await self._make_stream(stream)
        for queue in self._queues:
            await stream.add_consumer(
                names.stream,
                ConsumerConfig(
                    name=names.consumer_of(queue),
                    durable_name=names.consumer_of(queue),
                    filter_subject=names.subject_of(queue),
                    ack_wait=self._ack_wait_seconds,
                    max_ack_pending=_MOST_UNACKNOWLEDGED,
                    max_deliver=-1,  # the table counts attempts
                ),
            )
            if queue not in self._inboxes:
                self._inboxes[queue] = await client.subscribe(
                    client.new_inbox(), cb=partial(self._hear, queue)
                )
            self._ended(queue, None)
        if self._is_new:
            await self._renewed()
            self._is_new = False

    async def _make_stream(self, stream: JetStreamContext) -> None:
        name = self._names.stream
        try:
            known = await stream.stream_info(name)
        except NotFoundError:
            await self._add_stream(stream)
            self._is_new = True
            return
        if known.config.retention != RetentionPolicy.WORK_QUEUE:
            raise ConfigurationError(f"the stream {name} is there, but it is no work queue")

    async def _add_stream(self, stream: JetStreamContext) -> None:
        config = StreamConfig(
            name=self._names.stream,
            subjects=[self._names.subjects],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            num_replicas=self._replicas or _REPLICAS,
            duplicate_window=_DUPLICATES_SECONDS,
        )
        try:
            await stream.add_stream(config)
        except APIError as error:
            if self._replicas is not None or error.err_code not in _TOO_FEW_NODES:
                raise
            _log.warning(
                "NATS has fewer than %d nodes: the stream %s gets one replica",
                _REPLICAS,
                config.name,
            )
            await stream.add_stream(config.evolve(num_replicas=1))

    # -- hearing ----------------------------------------------------------------------------------

    async def _hear(self, queue: str, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            deliveries = message.metadata.num_delivered
            await self._arrived(Arrival(queue, message.reply, message.data, deliveries))
        elif status == "408":  # the request has had its time
            self._ended(queue, int(headers.get("Nats-Pending-Messages", 0)))
        elif status != "100":
            self._ended(queue, None)
            self._doubted(headers.get("Description") or f"status {status}")

    def _doubted(self, reason: object) -> None:
        """Look after stream and consumers, as someone did not answer as expected."""
        _log.debug("NATS did not take or give messages, looking after the stream: %s", reason)
        self.up.clear()
        self._doubt.set()

    async def _closed(self) -> None:
        self._doubt.set()

    def _say_down(self, error: BaseException) -> None:
        if not self._is_down:
            self._is_down = True
            _log.warning("NATS is not there, jobs wait in their table: %s", _line(error))

    def _say_refused(self, troubles: Sequence[BaseException]) -> None:
        if bool(troubles) != self._is_refusing:
            self._is_refusing = bool(troubles)
            if troubles:
                _log.warning("NATS does not take jobs, trying again: %s", _line(troubles[0]))

    def _say_up(self) -> None:
        if self._is_down:
            self._is_down = False
            _log.warning("NATS is back")


async def _hear(error: Exception) -> None:
    _log.debug("NATS: %s", _line(error))


async def _let_go(client: Client) -> None:
    """Close what may be closed already, or half open."""
    with suppress(*_TROUBLES, AssertionError):
        await client.close()
    transport = getattr(client, "_transport", None)
    if transport is not None:  # a client that fails to send its last words leaves it open
        with suppress(*_TROUBLES):
            transport.close()


def _line(error: BaseException) -> str:
    return str(error) or type(error).__name__
