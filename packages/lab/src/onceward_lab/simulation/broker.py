"""A simulated JetStream broker that loses and repeats messages, for the real engine and relay."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import msgspec

from onceward.jobs.job_store import JobStore
from onceward.ports import Engine, FaultPoints, Row
from onceward_lab.simulation.faults import Faults
from onceward_lab.simulation.loop import NO_PROCESS, Process, VirtualLoop
from onceward_nats.connection import Listener, Message, MessageFetcher
from onceward_nats.jetstream import JetStreamEngine
from onceward_nats.relay import Relay

__all__ = ["SimulatedBroker", "simulated_jetstream"]

_DEDUP_SECONDS: Final = 120.0
_ACK_WAIT_SECONDS: Final = 30.0
_REPUBLISH_AFTER_SECONDS: Final = 30.0


class _Message(msgspec.Struct):
    queue: str
    data: bytes
    deliveries: int = 0
    is_delivered: bool = False


class SimulatedBroker:
    """The broker of a world: one stream, which survives every process but not every fault."""

    def __init__(self, loop: VirtualLoop, faults: Faults, rng: Random) -> None:
        self.loop = loop
        self._faults = faults
        self._rng = rng
        self._messages: dict[int, _Message] = {}
        self._published_ids: dict[str, float] = {}
        self._last_sequence = 0
        self._connections: list[_BrokerConnection] = []

    def connect(self, connection: "_BrokerConnection") -> None:
        """Deliver messages to a process."""
        self._connections.append(connection)

    def disconnect(self, connection: "_BrokerConnection") -> None:
        """Stop delivering to a process."""
        if connection in self._connections:
            self._connections.remove(connection)

    def publish(self, job: Row) -> None:
        """Store a message, unless its id was published before."""
        now = self.loop.time()
        message_id = f"{job['job_id']}:{job['seq']}:{job['published'] + 1}"
        if now - self._published_ids.get(message_id, -_DEDUP_SECONDS) < _DEDUP_SECONDS:
            return
        self._published_ids[message_id] = now
        if self._faults.happens("broker forgets"):  # it crashes before the message is synced
            return
        self._last_sequence += 1
        data = msgspec.json.encode({"tenant": job["tenant"], "job_id": job["job_id"]})
        self._messages[self._last_sequence] = _Message(job["queue"], data)
        self._call_soon(self.deliver)

    def acknowledge(self, receipt: str, reply: bytes) -> None:
        """Acknowledge or reject a message. A stale receipt is accepted, as by the real broker."""
        number = int(receipt.partition(".")[0])
        message = self._messages.get(number)
        if message is None or self._faults.happens("message lost"):
            return
        if reply in {b"+ACK", b"+TERM"}:
            del self._messages[number]
        elif reply.startswith(b"-NAK"):
            delay = msgspec.json.decode(reply[4:])["delay"] / 1e9 if len(reply) > 4 else 0.0  # noqa: PLR2004
            self.loop.call_later(delay, self._redeliver, number, context=NO_PROCESS.copy())

    def deliver(self) -> None:
        """Deliver pending messages to connections that have requested some."""
        for number, message in list(self._messages.items()):
            if message.is_delivered:
                continue
            ready = [
                connection
                for connection in self._connections
                if connection.has_demand(message.queue)
            ]
            if not ready:
                continue
            self._send(number, message, self._rng.choice(ready))
            if self._faults.happens("message repeated"):
                self._send(number, message, self._rng.choice(ready))

    def _send(self, number: int, message: _Message, connection: "_BrokerConnection") -> None:
        message.deliveries += 1
        message.is_delivered = True
        receipt = f"{number}.{message.deliveries}"
        connection.receive(Message(message.queue, receipt, message.data, message.deliveries))
        self.loop.call_later(
            _ACK_WAIT_SECONDS,
            self._on_ack_timeout,
            number,
            message.deliveries,
            context=NO_PROCESS.copy(),
        )

    def _on_ack_timeout(self, number: int, deliveries: int) -> None:
        message = self._messages.get(number)
        if message is not None and message.deliveries == deliveries:
            self._redeliver(number)

    def _redeliver(self, number: int) -> None:
        message = self._messages.get(number)
        if message is not None:
            message.is_delivered = False
            self.deliver()

    def _call_soon(self, step: Callable[[], None]) -> None:
        self.loop.call_later(0.002, step, context=NO_PROCESS.copy())


class _BrokerConnection:
    """The connection of one process to the broker, without a socket."""

    def __init__(self, broker: SimulatedBroker, process: Process) -> None:
        self._broker = broker
        self._process = process
        self._listener: Listener | None = None
        self._requested: dict[str, int] = {}
        self.up = asyncio.Event()
        # It loses and repeats messages, and always responds.
        self.is_silent = False

    async def open(self, listener: Listener) -> None:
        self._listener = listener
        self.up.set()
        self._broker.connect(self)
        self._process.on_kill.append(self._disconnect)

    async def close(self) -> None:
        self._disconnect()

    async def publish(self, jobs: Sequence[Row]) -> list[Row]:
        await asyncio.sleep(0.001)
        for job in jobs:
            self._broker.publish(job)
        return list(jobs)

    async def pull(self, queue: str, count: int) -> bool:
        self._requested[queue] = count
        self._broker.deliver()
        return True

    async def stop_pulling(self) -> None:
        self._requested.clear()

    async def acknowledge(self, receipt: str, reply: bytes) -> None:
        self._broker.acknowledge(receipt, reply)

    def has_demand(self, queue: str) -> bool:
        return self._requested.get(queue, 0) > 0

    def receive(self, message: Message) -> None:
        """Pass a message to the process, in a later step."""
        self._requested[message.queue] -= 1
        if self._listener is not None:
            self._process.spawn(self._listener.on_message(message))

    def _disconnect(self) -> None:
        self._broker.disconnect(self)


class _SimulatedJetStreamEngine(JetStreamEngine):
    """The real engine on a simulated connection."""

    def __init__(
        self,
        job_store: JobStore,
        queues: Sequence[str],
        *,
        worker: str,
        lease_seconds: float,
        connection: Any,
        faults: FaultPoints,
    ) -> None:
        super().__init__(
            job_store, queues, worker=worker, lease_seconds=lease_seconds, url="nats://simulation"
        )
        self._broker = connection
        self._fetcher = MessageFetcher(connection, queues)
        self._relay = Relay(
            job_store,
            queues,
            connection,
            notifier=self._notifier,
            name="simulate",
            again_after_seconds=_REPUBLISH_AFTER_SECONDS,
            faults=faults,
        )


def simulated_jetstream(
    broker: SimulatedBroker, process: Process, *, faults: FaultPoints
) -> Callable[[JobStore, Sequence[str], str, float], Engine]:
    """Return the engine factory of the worker in this process."""

    def make(
        job_store: JobStore, queues: Sequence[str], worker: str, lease_seconds: float
    ) -> Engine:
        return _SimulatedJetStreamEngine(
            job_store,
            queues,
            worker=worker,
            lease_seconds=lease_seconds,
            connection=_BrokerConnection(broker, process),
            faults=faults,
        )

    return make
