"""The line to NATS, kept up in the background: publishing, pulling, and saying what became of it.

It decides nothing: a message names a job, and whoever gets it asks the table. A connection is used
until it breaks and is then thrown away for a new one: a client that reconnects by itself keeps what
it could not send, and an acknowledgement that is late may be about a job that has long been
another's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from holdfast.errors import ConfigurationError, StoreError
from holdfast.jobs.engines.nats_stream import Names, make_consumer, make_stream, publish_job
from holdfast.jobs.engines.nats_url import servers_of
from holdfast.ports import Row

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

__all__ = ["PULL_SECONDS", "Arrival", "Broker", "Listener", "end_task"]

T = TypeVar("T")

# How long the broker keeps a request for messages. One that is lost, as happens when a leader
# dies, is missed for so long.
PULL_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 5.0
_GOODBYE_SECONDS: Final = 2.0
_PING_SECONDS: Final = 5
# How often stream and consumers are looked after without being asked to.
_CHECK_SECONDS: Final = 60.0
_PAUSES: Final = (0.1, 0.2, 0.5, 1.0)
_TROUBLES: Final = (NatsError, OSError, TimeoutError)

_log = logging.getLogger("holdfast.jobs")


class Arrival(NamedTuple):
    """A message, and where to say what became of it."""

    queue: str
    receipt: str
    data: bytes
    deliveries: int


class Listener(Protocol):
    """Hears what comes from the broker."""

    async def arrived(self, arrival: Arrival) -> None:
        """Hear of a message."""

    def ended(self, queue: str, unserved: int | None) -> None:
        """Hear that a request is over and how many messages did not come; None: all requests."""


class Broker:
    """One connection at a time, and on it one stream and one consumer per queue."""

    def __init__(
        self,
        url: str,
        queues: Sequence[str],
        *,
        find_names: Callable[[], Awaitable[Names]],
        client_name: str,
        ack_wait_seconds: float,
        replicas: int | None,
        options: Mapping[str, Any],
        on_new_stream: Callable[[], Awaitable[None]],
    ) -> None:
        """Take the addresses; nothing is connected before ``open``."""
        self._servers = servers_of(url)
        self._queues = tuple(queues)
        self._find_names = find_names
        self._names: Names | None = None
        self._client_name = client_name
        self._ack_wait_seconds = ack_wait_seconds
        self._replicas = replicas
        self._options = dict(options)
        self._on_new_stream = on_new_stream
        self._is_new = False
        self._is_down = False
        self._is_refusing = False
        self._listener: Listener | None = None
        self._client: Client | None = None
        self._inboxes: dict[str, Subscription] = {}
        self._doubt = asyncio.Event()
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.up = asyncio.Event()

    async def open(self, listener: Listener) -> None:
        """Begin to connect. Returns at once: the broker may be down, and jobs can wait."""
        self._listener = listener
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="holdfast-jobs-nats")

    async def close(self) -> None:
        """Let go of the connection. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_task(task)

    # -- talking --------------------------------------------------------------------------------

    async def publish(self, jobs: Sequence[Row]) -> list[Row]:
        """Name these jobs to their queues; returns those that the broker has on its disk."""
        client, names = self._client, self._names
        if client is None or names is None:
            return []
        stream = client.jetstream(timeout=_ANSWER_SECONDS)
        sending = asyncio.gather(
            *(publish_job(stream, names, job) for job in jobs), return_exceptions=True
        )
        try:
            results = await self._unless_lost(sending)
        except ConnectionError:
            return []  # some may have come through; all are published again
        if client.is_closed:
            return []
        troubles = [result for result in results if result is not None]
        for trouble in troubles:
            if not isinstance(trouble, _TROUBLES):
                raise trouble
        if troubles:
            self._look_again(troubles[0])
        self._say_refusing(troubles)
        return [job for job, result in zip(jobs, results, strict=True) if result is None]

    async def pull(self, queue: str, count: int) -> bool:
        """Ask for so many messages of a queue; False when there is nobody to ask."""
        client, names, inbox = self._client, self._names, self._inboxes.get(queue)
        if client is None or names is None or inbox is None or not self.up.is_set():
            return False
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{names.stream}.{names.consumer_of(queue)}"
        request = msgspec.json.encode({"batch": count, "expires": int(PULL_SECONDS * 1e9)})
        try:
            await client.publish(subject, request, inbox.subject)
        except _TROUBLES:
            return False
        return True

    async def stop_pulling(self) -> None:
        """Take no more messages; those on their way arrive before this returns."""
        inboxes, self._inboxes = self._inboxes, {}
        with suppress(*_TROUBLES):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                for inbox in inboxes.values():
                    await inbox.drain()  # type: ignore[no-untyped-call]

    async def say(self, receipt: str, word: bytes) -> None:
        """Say what became of a message. May be lost: then it comes again, and the table knows."""
        if self._client is not None:
            with suppress(*_TROUBLES):
                await self._client.publish(receipt, word)

    # -- staying connected ------------------------------------------------------------------------

    async def _keep(self) -> None:
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
                    await _let_go(client)
                failures = 0
            except (*_TROUBLES, StoreError, ConfigurationError) as error:
                self._say_down(error)
            except Exception:  # noqa: BLE001 - a client's trouble has many names; none may end us
                _log.exception("the line to NATS broke, connecting again")
            await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
            failures += 1

    async def _unless_lost(self, work: Awaitable[T]) -> T:
        """Wait for answers, but not for those of a broken connection: they would never come."""
        answers = asyncio.ensure_future(work)
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait({answers, lost}, return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                return answers.result()
            raise ConnectionResetError("the connection broke")
        finally:
            for task in (answers, lost):
                task.cancel()
            await asyncio.wait({answers, lost})
            # A gathering that is cancelled ends with an exception, which asyncio wants looked at.
            if not answers.cancelled():
                answers.exception()

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
                error_cb=_note,
                closed_cb=self._closed,
                **self._options,
            )
        except BaseException:
            await _let_go(client)
            raise
        return client

    async def _use(self, client: Client, names: Names) -> None:
        """Prepare what is needed, and again when that is in doubt, until the connection breaks."""
        now = asyncio.get_running_loop().time
        while not client.is_closed:
            self._doubt.clear()
            await self._unless_lost(self._prepare(client, names))
            self._client = client
            self._say_up()
            if not self.up.is_set():
                self.up.set()
                for queue in self._queues:
                    self._tell_ended(queue, None)
            until = now() + _CHECK_SECONDS
            while not (client.is_closed or self._doubt.is_set() or now() > until):
                with suppress(TimeoutError):  # the client forgets to tell when its last words fail
                    async with asyncio.timeout(1.0):
                        await self._doubt.wait()
            if self._doubt.is_set() and not client.is_closed:
                await asyncio.sleep(_PAUSES[1])

    async def _prepare(self, client: Client, names: Names) -> None:
        stream = client.jetstream(timeout=_ANSWER_SECONDS)
        if await make_stream(stream, names, replicas=self._replicas):
            self._is_new = True
        for queue in self._queues:
            await make_consumer(stream, names, queue, ack_wait_seconds=self._ack_wait_seconds)
            if queue not in self._inboxes:
                self._inboxes[queue] = await client.subscribe(
                    client.new_inbox(), cb=partial(self._hear, queue)
                )
        if self._is_new:
            await self._on_new_stream()
            self._is_new = False

    # -- hearing ----------------------------------------------------------------------------------

    async def _hear(self, queue: str, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            if self._listener is not None:
                deliveries = message.metadata.num_delivered
                arrival = Arrival(queue, message.reply, message.data, deliveries)
                await self._listener.arrived(arrival)
        elif status == "408":  # the request has had its time
            self._tell_ended(queue, int(headers.get("Nats-Pending-Messages", 0)))
        elif status != "100":
            self._tell_ended(queue, None)
            self._look_again(headers.get("Description") or f"status {status}")

    def _tell_ended(self, queue: str, unserved: int | None) -> None:
        if self._listener is not None:
            self._listener.ended(queue, unserved)

    def _look_again(self, reason: object) -> None:
        """Look after stream and consumers: someone did not answer as they do."""
        _log.debug("looking after the stream, as NATS said: %s", reason)
        self.up.clear()
        self._doubt.set()

    async def _closed(self) -> None:
        self._lost.set()
        self._doubt.set()

    # -- telling people, once per change ----------------------------------------------------------

    def _say_down(self, error: BaseException) -> None:
        if not self._is_down:
            self._is_down = True
            _log.warning("NATS is not there, jobs wait in their table: %s", _line(error))

    def _say_up(self) -> None:
        if self._is_down:
            self._is_down = False
            _log.warning("NATS is back")

    def _say_refusing(self, troubles: Sequence[BaseException]) -> None:
        if troubles and not self._is_refusing:
            _log.warning("NATS does not take jobs, trying again: %s", _line(troubles[0]))
        self._is_refusing = bool(troubles)


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel until it ends: nats-py, and ``wait_for`` before Python 3.12, may swallow the first."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)


async def _note(error: Exception) -> None:
    _log.debug("NATS: %s", _line(error))


async def _let_go(client: Client) -> None:
    """Close what may be closed already, half open, or never have been open."""
    with suppress(*_TROUBLES, AssertionError, AttributeError):
        await client.close()
    transport = getattr(client, "_transport", None)
    with suppress(*_TROUBLES, AttributeError):
        if transport is not None:  # a client whose last words fail leaves it open
            transport.close()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
