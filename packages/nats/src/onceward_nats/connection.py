"""NATS JetStream: the connection, the stream and its consumers, publishing and pulling.

A message names a job; the job table decides whether it may run. A broken connection is replaced
by a new client: one that reconnects by itself sends what it has buffered, and a late
acknowledgement may be about a job that another worker has leased since.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from onceward_protocol.extras import needs_extra

with needs_extra("", "onceward-nats"):
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error as NatsError
    from nats.js import JetStreamContext
    from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType, StreamConfig
    from nats.js.errors import APIError, NotFoundError

from onceward.errors import ConfigurationError, StoreError
from onceward.ports import Row
from onceward_nats.silence import SilenceTimer
from onceward_nats.url import servers_of

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

__all__ = [
    "Broker",
    "Listener",
    "Message",
    "MessageFetcher",
    "StreamNames",
    "close_client",
    "end_task",
    "nak",
]

T = TypeVar("T")

# How long the broker keeps a pull request. One that is lost, as happens when a leader dies, is
# repeated after this time.
PULL_SECONDS: Final = 2.0
_PULL_GRACE_SECONDS: Final = 0.5
_RESPONSE_SECONDS: Final = 5.0
_DRAIN_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 1.0
_PING_SECONDS: Final = 5
# A broker that responds to no pull request for this time is sent another request. Pull requests of
# an idle worker are answered before; a busy worker sends none.
_PROBE_AFTER_SECONDS: Final = PULL_SECONDS + _PULL_GRACE_SECONDS
# How often stream and consumers are checked without an error.
_CHECK_SECONDS: Final = 60.0
_RECONNECT_SECONDS: Final = (0.1, 0.2, 0.5, 1.0)
_ERRORS: Final = (NatsError, OSError, TimeoutError)

_DUPLICATES_SECONDS: Final = 120.0
# Includes jobs that wait for a retry, so it is far above what workers hold; the others wait in
# the stream.
_MAX_UNACKNOWLEDGED: Final = 65_536
_REPLICAS: Final = 3
# "replicas > 1 not supported in non-clustered mode", "no suitable peers for placement"
_TOO_FEW_NODES: Final = (10074, 10005)
# The status of a pull request that no leader has received.
_NO_RESPONDERS: Final = "503"

_WORD: Final = re.compile(r"[A-Za-z0-9_-]+")

_log = logging.getLogger("onceward.jobs")


class Message(NamedTuple):
    """A message, and the subject for its acknowledgement."""

    queue: str
    receipt: str
    data: bytes
    deliveries: int


class Listener(Protocol):
    """Receives messages from the broker."""

    async def on_message(self, message: Message) -> None:
        """Receive a message."""

    def on_pull_ended(self, queue: str, unserved: int | None) -> None:
        """Learn that a pull request ended, and how many messages are missing (None: all)."""


class StreamNames(msgspec.Struct, frozen=True):
    """Names of stream, subjects and consumers. They contain no tenant and no payload."""

    stream: str
    subject: str
    # Identifies the database: two that share a stream do not get each other's messages.
    database: str

    def __post_init__(self) -> None:
        """Raise ``ConfigurationError`` for names that NATS refuses or reads as patterns."""
        if _WORD.fullmatch(self.stream) is None:
            raise ConfigurationError(
                f"stream name {self.stream!r} must be letters, digits, - and _"
            )
        if any(_WORD.fullmatch(word) is None for word in self.subject.split(".")):
            raise ConfigurationError(
                f"subject {self.subject!r} must be words of letters, digits, - and _ with dots"
            )

    @classmethod
    def of(cls, stream: str, subject: str, secret: bytes) -> "StreamNames":
        """Identify the database by a hash of its secret, which stays when the database moves."""
        return cls(stream, subject, sha256(b"onceward.jobs.nats" + secret).hexdigest()[:12])

    def subject_of(self, queue: str) -> str:
        """Return the subject of a queue; a dot in its name would split it into two words."""
        return f"{self.subject}.{self.database}.{queue.replace('.', '~')}"

    def consumer_of(self, queue: str) -> str:
        """Return the name of the consumer of a queue."""
        return f"{self.database}-{queue.replace('.', '~')}"


async def ensure_stream(
    broker: JetStreamContext, names: StreamNames, *, replicas: int | None
) -> bool:
    """Create the stream if it is missing; return whether it is new."""
    try:
        known = await broker.stream_info(names.stream)
    except NotFoundError:
        await _add_stream(broker, names, replicas)
        return True
    if known.config.retention != RetentionPolicy.WORK_QUEUE:
        raise ConfigurationError(f"the stream {names.stream} exists, but is not a work queue")
    if replicas is None and known.cluster is not None and known.cluster.name:
        await _add_replicas(broker, known.config)
    return False


async def _add_stream(broker: JetStreamContext, names: StreamNames, replicas: int | None) -> None:
    config = StreamConfig(
        name=names.stream,
        subjects=[f"{names.subject}.>"],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        num_replicas=replicas or _REPLICAS,
        duplicate_window=_DUPLICATES_SECONDS,
    )
    try:
        await broker.add_stream(config)
    except APIError as error:
        if replicas is not None or error.err_code not in _TOO_FEW_NODES:
            raise
        _log.warning(
            "NATS has fewer than %d nodes: the stream %s gets one replica", _REPLICAS, names.stream
        )
        await broker.add_stream(config.evolve(num_replicas=1))


async def _add_replicas(broker: JetStreamContext, config: StreamConfig) -> None:
    """Add replicas to a stream that was created before the other nodes had joined the cluster.

    Creation does not wait for the nodes: a cluster of two would never have enough.
    """
    if (config.num_replicas or 1) < _REPLICAS:
        try:
            await broker.update_stream(config, num_replicas=_REPLICAS)
        except APIError as error:
            _log.debug("the stream %s keeps its number of replicas: %s", config.name, error)


async def ensure_consumer(
    broker: JetStreamContext, names: StreamNames, queue: str, *, ack_wait_seconds: float
) -> None:
    """Create the consumer that all workers of a queue share, if it is missing."""
    config = ConsumerConfig(
        name=names.consumer_of(queue),
        durable_name=names.consumer_of(queue),
        filter_subject=names.subject_of(queue),
        ack_wait=ack_wait_seconds,
        max_ack_pending=_MAX_UNACKNOWLEDGED,
        max_deliver=-1,  # attempts are counted in the job table
    )
    await broker.add_consumer(names.stream, config)


async def publish_job(broker: JetStreamContext, names: StreamNames, job: Row) -> None:
    """Publish tenant and id of a job; returns when the broker has stored the message."""
    # Two databases may have a job of the same id. ``seq`` distinguishes a requeued job from the
    # one that was dead-lettered.
    message_id = f"{names.database}:{job['job_id']}:{job['seq']}:{job['published'] + 1}"
    await broker.publish(
        names.subject_of(job["queue"]),
        msgspec.json.encode({"tenant": job["tenant"], "job_id": job["job_id"]}),
        stream=names.stream,
        headers={"Nats-Msg-Id": message_id},
    )


class Broker:
    """Keeps a connection in the background, with one stream and one consumer per queue."""

    def __init__(
        self,
        url: str,
        queues: Sequence[str],
        *,
        find_names: Callable[[], Awaitable[StreamNames]],
        client_name: str,
        ack_wait_seconds: float,
        replicas: int | None,
        options: Mapping[str, Any],
        on_new_stream: Callable[[], Awaitable[None]],
        silent_after_seconds: float,
        on_silence: Callable[[bool], None],
    ) -> None:
        """``url`` may name several servers, separated by commas. ``open`` connects.

        ``on_silence(True)`` is called when the broker has not responded for
        ``silent_after_seconds``, ``on_silence(False)`` when it responds again.
        """
        self._servers = servers_of(url)
        self._queues = tuple(queues)
        self._find_names = find_names
        self._names: StreamNames | None = None
        self._client_name = client_name
        self._ack_wait_seconds = ack_wait_seconds
        self._replicas = replicas
        self._options = dict(options)
        self._on_new_stream = on_new_stream
        self._is_new_stream = False
        self._is_down = False
        self._is_refusing = False
        self._listener: Listener | None = None
        self._client: Client | None = None
        self._inboxes: dict[str, Subscription] = {}
        self._check = asyncio.Event()
        self._lost = asyncio.Event()
        self._silence = SilenceTimer(silent_after_seconds, on_change=on_silence)
        self._task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._probe_task: asyncio.Task[None] | None = None
        self.up = asyncio.Event()

    @property
    def is_silent(self) -> bool:
        """Whether the broker has not responded for ``silent_after_seconds``."""
        return self._silence.is_over

    async def open(self, listener: Listener) -> None:
        """Start to connect. Returns at once: the broker may be down."""
        self._listener = listener
        if self._task is None:
            self._task = asyncio.create_task(self._stay_connected(), name="onceward-jobs-nats")
            self._watch_task = asyncio.create_task(self._watch(), name="onceward-jobs-nats-watch")

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        tasks = (self._watch_task, self._probe_task, self._task)
        self._watch_task = self._probe_task = self._task = None
        for task in tasks:
            if task is not None:
                await end_task(task)

    # -- requests -------------------------------------------------------------------------------

    async def publish(self, jobs: Sequence[Row]) -> list[Row]:
        """Publish jobs to their queues; return those that the broker has stored."""
        client, names = self._client, self._names
        if client is None or names is None:
            return []
        stream = client.jetstream(timeout=_RESPONSE_SECONDS)
        sending = asyncio.gather(
            *(publish_job(stream, names, job) for job in jobs), return_exceptions=True
        )
        try:
            results = await self._unless_lost(sending)
        except ConnectionError:
            return []  # some may be stored; all are published again
        if client.is_closed:
            return []
        errors = [result for result in results if result is not None]
        for error in errors:
            if not isinstance(error, _ERRORS):
                raise error
        if len(errors) < len(results):
            self._silence.heard()
        if errors:
            self._check_stream(errors[0])
        self._log_refusal(errors)
        return [job for job, result in zip(jobs, results, strict=True) if result is None]

    async def pull(self, queue: str, count: int) -> bool:
        """Request ``count`` messages of a queue; False while there is no connection."""
        client, names, inbox = self._client, self._names, self._inboxes.get(queue)
        if client is None or names is None or inbox is None or not self.up.is_set():
            return False
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{names.stream}.{names.consumer_of(queue)}"
        request = msgspec.json.encode({"batch": count, "expires": int(PULL_SECONDS * 1e9)})
        try:
            await client.publish(subject, request, inbox.subject)
        except _ERRORS:
            return False
        return True

    async def stop_pulling(self) -> None:
        """Stop receiving; messages on their way arrive before this returns."""
        inboxes, self._inboxes = self._inboxes, {}
        with suppress(*_ERRORS):
            async with asyncio.timeout(_DRAIN_SECONDS):
                for inbox in inboxes.values():
                    await inbox.drain()  # type: ignore[no-untyped-call]

    async def acknowledge(self, receipt: str, reply: bytes) -> None:
        """Acknowledge a message. If this is lost, the message is delivered again."""
        if self._client is not None:
            with suppress(*_ERRORS):
                await self._client.publish(receipt, reply)

    # -- connection -------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        failures = 0
        while True:
            try:
                if self._names is None:
                    self._names = await self._find_names()
                client = await self._connect()
                try:
                    await self._use(client, self._names)
                finally:
                    self.up.clear()
                    self._client, self._inboxes = None, {}
                    await close_client(client)
                failures = 0
            except (*_ERRORS, StoreError, ConfigurationError) as error:
                self._log_down(error)
            except Exception:  # noqa: BLE001 - the client may raise anything; the loop must go on
                _log.exception("the connection to NATS failed, connecting again")
            await asyncio.sleep(_RECONNECT_SECONDS[min(failures, len(_RECONNECT_SECONDS) - 1)])
            failures += 1

    async def _unless_lost(self, work: Awaitable[T]) -> T:
        """Wait for responses. Raises ``ConnectionResetError`` if the connection breaks."""
        responses = asyncio.ensure_future(work)
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait({responses, lost}, return_when=asyncio.FIRST_COMPLETED)
            if responses.done():
                return responses.result()
            raise ConnectionResetError("the connection broke")
        finally:
            for task in (responses, lost):
                task.cancel()
            await asyncio.wait({responses, lost})
            # A cancelled gather() ends with an exception that asyncio logs unless it is read.
            if not responses.cancelled():
                responses.exception()

    async def _connect(self) -> Client:
        self._lost.clear()
        client = Client()
        try:
            await client.connect(
                self._servers,
                name=self._client_name,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=_PING_SECONDS,
                error_cb=_log_error,
                closed_cb=self._closed,
                **self._options,
            )
        except BaseException:
            await close_client(client)
            raise
        self._silence.connected()
        return client

    async def _use(self, client: Client, names: StreamNames) -> None:
        """Create stream and consumers, and check them after errors, until the connection breaks."""
        now = asyncio.get_running_loop().time
        while not client.is_closed:
            self._check.clear()
            await self._unless_lost(self._ensure(client, names))
            self._client = client
            self._silence.heard()
            self._log_up()
            if not self.up.is_set():
                self.up.set()
                for queue in self._queues:
                    self._pull_ended(queue, None)
            until = now() + _CHECK_SECONDS
            while not (client.is_closed or self._check.is_set() or now() > until):
                with suppress(TimeoutError):  # the client does not report every loss
                    async with asyncio.timeout(1.0):
                        await self._check.wait()
            if self._lost.is_set() and not client.is_closed:
                raise TimeoutError(f"no response for {self._silence.limit_seconds:g} seconds")
            if self._check.is_set() and not client.is_closed:
                await asyncio.sleep(_RECONNECT_SECONDS[1])

    async def _ensure(self, client: Client, names: StreamNames) -> None:
        stream = client.jetstream(timeout=_RESPONSE_SECONDS)
        if await ensure_stream(stream, names, replicas=self._replicas):
            self._is_new_stream = True
        for queue in self._queues:
            await ensure_consumer(stream, names, queue, ack_wait_seconds=self._ack_wait_seconds)
            if queue not in self._inboxes:
                self._inboxes[queue] = await client.subscribe(
                    client.new_inbox(), cb=partial(self._receive, queue)
                )
        if self._is_new_stream:
            await self._on_new_stream()
            self._is_new_stream = False

    # -- silence ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Count the time without a response; ask for one, then give the connection up.

        The client's own pings would notice a stopped server after 15 seconds, and never a cluster
        without a leader, whose nodes respond to pings.
        """
        silence = self._silence
        probe_after_seconds = min(_PROBE_AFTER_SECONDS, silence.limit_seconds / 2)
        while True:
            await asyncio.sleep(silence.tick_seconds)
            silence.tick()
            client, names = self._client, self._names
            if client is None or names is None:
                continue
            if silence.connection_seconds >= silence.limit_seconds:
                await self._closed()
            elif silence.seconds >= probe_after_seconds and (
                self._probe_task is None or self._probe_task.done()
            ):
                self._probe_task = asyncio.create_task(self._probe(client, names))

    async def _probe(self, client: Client, names: StreamNames) -> None:
        """Ask the leader of the stream for a response."""
        stream = client.jetstream(timeout=self._silence.limit_seconds)
        try:
            await stream.stream_info(names.stream)
        except NotFoundError as error:
            self._check_stream(error)
        except _ERRORS as error:
            _log.debug("NATS: %s", _line(error))
        else:
            if client is self._client:
                self._silence.heard()

    # -- messages ---------------------------------------------------------------------------------

    async def _receive(self, queue: str, received: Msg) -> None:
        headers = received.headers or {}
        status = headers.get("Status")
        if status != _NO_RESPONDERS:
            self._silence.heard()
        if status is None:
            if self._listener is not None:
                deliveries = received.metadata.num_delivered
                message = Message(queue, received.reply, received.data, deliveries)
                await self._listener.on_message(message)
        elif status == "408":  # the pull request has expired
            self._pull_ended(queue, int(headers.get("Nats-Pending-Messages", 0)))
        elif status != "100":
            self._pull_ended(queue, None)
            self._check_stream(headers.get("Description") or f"status {status}")

    def _pull_ended(self, queue: str, unserved: int | None) -> None:
        if self._listener is not None:
            self._listener.on_pull_ended(queue, unserved)

    def _check_stream(self, reason: object) -> None:
        """Check stream and consumers soon, because of an error."""
        _log.debug("checking the stream, because NATS reported: %s", reason)
        self.up.clear()
        self._check.set()

    async def _closed(self) -> None:
        self._lost.set()
        self._check.set()

    # -- logging, once per change -----------------------------------------------------------------

    def _log_down(self, error: BaseException) -> None:
        if not self._is_down:
            self._is_down = True
            _log.warning("NATS is unavailable, connecting again: %s", _line(error))

    def _log_up(self) -> None:
        if self._is_down:
            self._is_down = False
            _log.warning("NATS is available again")

    def _log_refusal(self, errors: Sequence[BaseException]) -> None:
        if errors and not self._is_refusing:
            _log.warning("NATS does not accept jobs, trying again: %s", _line(errors[0]))
        self._is_refusing = bool(errors)


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task until it ends: nats-py and Python 3.11's ``wait_for`` may swallow the first."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)


async def _log_error(error: Exception) -> None:
    _log.debug("NATS: %s", _line(error))


async def close_client(client: Client) -> None:
    """Close a client that may be closed, half open, or never have been open."""
    try:
        with suppress(*_ERRORS, AssertionError, AttributeError):
            async with asyncio.timeout(_CLOSE_SECONDS):  # a stopped server reads nothing
                await client.close()
    finally:  # the client leaves it open if its last message fails, or if this task is cancelled
        transport = getattr(client, "_transport", None)
        with suppress(*_ERRORS, AttributeError):
            if transport is not None:
                transport.close()
                transport._io_writer.transport.abort()  # noqa: SLF001 - drops what was not sent


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _PullState:
    """How many messages were requested from one queue and have not arrived."""

    def __init__(self) -> None:
        self.requested = 0
        self.expires_at = 0.0


class MessageFetcher:
    """Pulls messages. Returns those above the worker's free slots to the broker at once."""

    def __init__(self, broker: Broker, queues: Iterable[str]) -> None:
        self._broker = broker
        self._pulls = {queue: _PullState() for queue in queues}
        self._buffer: list[Message] = []
        self._capacity = 0
        self._changed = asyncio.Event()

    async def fetch(self, limit: int, wait_seconds: float) -> list[Message]:
        """Return up to ``limit`` messages, waiting for the first.

        Returns none when a pull request has expired and the next one is due.
        """
        self._capacity = limit
        await self._pull(limit)
        if not self._buffer and wait_seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._changed.wait()
        await asyncio.sleep(0)  # messages of the same packet join
        self._changed.clear()
        messages, self._buffer = self._buffer[:limit], self._buffer[limit:]
        self._capacity = limit - len(messages)
        return messages

    def wake(self) -> None:
        """Make a waiting ``fetch`` return."""
        self._changed.set()

    async def stop(self) -> None:
        """Stop pulling and return buffered messages to the broker."""
        self._capacity = 0
        await self._broker.stop_pulling()
        for message in self._buffer:
            await self._broker.acknowledge(message.receipt, nak(0.0))
        self._buffer = []

    async def _pull(self, limit: int) -> None:
        """Request missing messages from each queue, unless most of them are requested already."""
        now = asyncio.get_running_loop().time()
        for queue, state in self._pulls.items():
            if now > state.expires_at:
                state.requested = 0
            missing = limit - len(self._buffer) - state.requested
            if missing * 2 >= limit and await self._broker.pull(queue, missing):
                state.requested += missing
                state.expires_at = now + PULL_SECONDS + _PULL_GRACE_SECONDS

    # -- Listener ---------------------------------------------------------------------------------

    async def on_message(self, message: Message) -> None:
        """Buffer a message; return it if several queues have delivered more than the limit."""
        state = self._pulls[message.queue]
        state.requested = max(0, state.requested - 1)
        if len(self._buffer) < self._capacity:
            self._buffer.append(message)
            self._changed.set()
        else:
            await self._broker.acknowledge(message.receipt, nak(0.0))

    def on_pull_ended(self, queue: str, unserved: int | None) -> None:
        """Make ``fetch`` return: the next call pulls again."""
        state = self._pulls[queue]
        state.requested = 0 if unserved is None else max(0, state.requested - unserved)
        self._changed.set()


def nak(delay_seconds: float) -> bytes:
    """Return a negative acknowledgement: deliver the message again after this time."""
    if delay_seconds <= 0:
        return b"-NAK"
    return b"-NAK " + msgspec.json.encode({"delay": int(delay_seconds * 1e9)})
