"""A broker that loses, repeats and forgets messages, behind the real engine and the real relay."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import msgspec

from holdfast.jobs.engines.jetstream import JetStreamEngine
from holdfast.jobs.engines.nats_connection import Listener, Message, MessageFetcher
from holdfast.jobs.engines.relay import Relay
from holdfast.jobs.job_store import JobStore
from holdfast.ports import Engine, FaultPoints, Row
from holdfast_lab.simulation.faults import Faults
from holdfast_lab.simulation.loop import OUTSIDE, Process, VirtualLoop

__all__ = ["SteppedBroker", "stepped_jetstream"]

_DEDUP_SECONDS: Final = 120.0
_ACK_WAIT_SECONDS: Final = 30.0
_AGAIN_AFTER_SECONDS: Final = 30.0


class _Message(msgspec.Struct):
    queue: str
    data: bytes
    deliveries: int = 0
    is_out: bool = False


class SteppedBroker:
    """The broker of a world: one stream, which outlives every process but not every fault."""

    def __init__(self, loop: VirtualLoop, faults: Faults, chance: Random) -> None:
        """Hold nothing."""
        self.loop = loop
        self._faults = faults
        self._chance = chance
        self._messages: dict[int, _Message] = {}
        self._numbers: dict[str, float] = {}
        self._next = 0
        self._lines: list[_Line] = []

    def connect(self, line: "_Line") -> None:
        """Serve a process."""
        self._lines.append(line)

    def disconnect(self, line: "_Line") -> None:
        """Forget a process."""
        if line in self._lines:
            self._lines.remove(line)

    def publish(self, job: Row) -> None:
        """Take a message, unless its number came before."""
        now = self.loop.time()
        number = f"{job['job_id']}:{job['seq']}:{job['published'] + 1}"
        if now - self._numbers.get(number, -_DEDUP_SECONDS) < _DEDUP_SECONDS:
            return
        self._numbers[number] = now
        if self._faults.happens("broker forgets"):  # a crash before it was on the broker's disk
            return
        self._next += 1
        data = msgspec.json.encode({"tenant": job["tenant"], "job_id": job["job_id"]})
        self._messages[self._next] = _Message(job["queue"], data)
        self._soon(self.deliver)

    def say(self, receipt: str, word: bytes) -> None:
        """Hear what became of a message. A stale word is believed, as the real one does."""
        number = int(receipt.partition(".")[0])
        message = self._messages.get(number)
        if message is None or self._faults.happens("message lost"):
            return
        if word in {b"+ACK", b"+TERM"}:
            del self._messages[number]
        elif word.startswith(b"-NAK"):
            delay = msgspec.json.decode(word[4:])["delay"] / 1e9 if len(word) > 4 else 0.0  # noqa: PLR2004
            self.loop.call_later(delay, self._come_back, number, context=OUTSIDE.copy())

    def deliver(self) -> None:
        """Give what is ready to whoever has asked."""
        for number, message in list(self._messages.items()):
            if message.is_out:
                continue
            asking = [line for line in self._lines if line.wants(message.queue)]
            if not asking:
                continue
            self._send(number, message, self._chance.choice(asking))
            if self._faults.happens("message repeated"):
                self._send(number, message, self._chance.choice(asking))

    def _send(self, number: int, message: _Message, line: "_Line") -> None:
        message.deliveries += 1
        message.is_out = True
        receipt = f"{number}.{message.deliveries}"
        line.take(Message(message.queue, receipt, message.data, message.deliveries))
        self.loop.call_later(
            _ACK_WAIT_SECONDS, self._miss, number, message.deliveries, context=OUTSIDE.copy()
        )

    def _miss(self, number: int, deliveries: int) -> None:
        message = self._messages.get(number)
        if message is not None and message.deliveries == deliveries:
            self._come_back(number)

    def _come_back(self, number: int) -> None:
        message = self._messages.get(number)
        if message is not None:
            message.is_out = False
            self.deliver()

    def _soon(self, step: Callable[[], None]) -> None:
        self.loop.call_later(0.002, step, context=OUTSIDE.copy())


class _Line:
    """One process's line to the broker: what ``Broker`` is for the engine, without a socket."""

    def __init__(self, broker: SteppedBroker, process: Process) -> None:
        self._broker = broker
        self._process = process
        self._listener: Listener | None = None
        self._asked: dict[str, int] = {}
        self.up = asyncio.Event()

    async def open(self, listener: Listener) -> None:
        self._listener = listener
        self.up.set()
        self._broker.connect(self)
        self._process.at_death.append(self._hang_up)

    async def close(self) -> None:
        self._hang_up()

    async def publish(self, jobs: Sequence[Row]) -> list[Row]:
        await asyncio.sleep(0.001)
        for job in jobs:
            self._broker.publish(job)
        return list(jobs)

    async def pull(self, queue: str, count: int) -> bool:
        self._asked[queue] = count
        self._broker.deliver()
        return True

    async def stop_pulling(self) -> None:
        self._asked.clear()

    async def acknowledge(self, receipt: str, reply: bytes) -> None:
        self._broker.say(receipt, reply)

    def wants(self, queue: str) -> bool:
        return self._asked.get(queue, 0) > 0

    def take(self, arrival: Message) -> None:
        """Bring a message into the process, a moment later."""
        self._asked[arrival.queue] -= 1
        if self._listener is not None:
            self._process.spawn(self._listener.on_message(arrival))

    def _hang_up(self) -> None:
        self._broker.disconnect(self)


class _SteppedJetStream(JetStreamEngine):
    """The real engine on a line without a socket."""

    def __init__(
        self,
        table: JobStore,
        queues: Sequence[str],
        *,
        worker: str,
        lease_seconds: float,
        line: Any,
        faults: FaultPoints,
    ) -> None:
        super().__init__(
            table, queues, worker=worker, lease_seconds=lease_seconds, url="nats://torture"
        )
        self._broker = line
        self._fetcher = MessageFetcher(line, queues)
        self._relay = Relay(
            table,
            queues,
            line,
            notifier=self._notifier,
            name="simulate",
            again_after_seconds=_AGAIN_AFTER_SECONDS,
            faults=faults,
        )


def stepped_jetstream(
    broker: SteppedBroker, process: Process, *, faults: FaultPoints
) -> Callable[[JobStore, Sequence[str], str, float], Engine]:
    """Return what makes the engine of a worker in this process."""

    def make(table: JobStore, queues: Sequence[str], worker: str, lease_seconds: float) -> Engine:
        return _SteppedJetStream(
            table,
            queues,
            worker=worker,
            lease_seconds=lease_seconds,
            line=_Line(broker, process),
            faults=faults,
        )

    return make
