"""Devices, from tap to power cut: the real queue and the real drain, one or two processes each."""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

import apsw

from holdfast.core.outbox_entry import Status
from holdfast.errors import HoldfastError, OutboxFileError
from holdfast.outbox.drain import Drain
from holdfast.outbox.queue import OutboxQueue
from holdfast.outbox.transport import NoResponse, Request, Response
from holdfast_lab.history import EntryState
from holdfast_lab.simulation.cooperative_threads import Strand
from holdfast_lab.simulation.faults import Faults
from holdfast_lab.simulation.faulty_vfs import Disk, DiskDoor
from holdfast_lab.simulation.loop import OUTSIDE, Killed, Process, VirtualLoop
from holdfast_lab.simulation.network import Network

__all__ = ["Device", "DeviceWorld", "Life"]

_FILE: Final = "outbox.db"
_IDLE_SECONDS: Final = 600.0
_PATIENT_SHARE: Final = 0.05
_EARLY_SECONDS: Final = 0.5


class DeviceWorld(Protocol):
    """What a device needs to know of the world it is in."""

    loop: VirtualLoop
    faults: Faults
    network: Network
    mishaps: list[str]

    def now(self) -> datetime:
        """Return the true time."""

    def seconds(self) -> float:
        """Return how much time has passed since the beginning."""

    def note(self, who: str, what: str) -> None:
        """Write a line of the timeline."""


class _SteppedQueue(OutboxQueue):
    """The real queue, which can say when some time has passed."""

    process: Process

    def every(self, seconds: float, beat: Callable[[], bool]) -> None:
        """Do something again and again, as long as it says so."""
        process = self.process

        def again() -> None:
            if beat():
                process.loop.call_later(seconds, again, context=process.context.copy())

        process.loop.call_later(seconds, again, context=process.context.copy())


class _DeviceClock:
    """A clock that people set, on a device that is restarted."""

    def __init__(self, device: "Device") -> None:
        self._device = device

    def now(self) -> datetime:
        return self._device.true_now() + self._device.clock_off

    def monotonic(self) -> float:
        return self._device.seconds_since_boot()

    def boot_id(self) -> str:
        return f"boot-{self._device.boots}"


class Life:
    """One process on a device, from its start to its death."""

    def __init__(self, device: "Device", name: str) -> None:
        """Open the file and drain it for ever."""
        self._device = device
        self._world = device.world
        self.name = name
        self.process = Process(self._world.loop, name)
        self.queue: _SteppedQueue | None = None
        self._door = DiskDoor(device.disk)
        self._rings: list[Callable[[Any], None]] = []
        # Keys that a server asked to stay away, and until when.
        self._not_before: dict[str, tuple[float, int]] = {}
        self.process.at_death.append(self._shut)
        self._strand = Strand(self.process, self._live)
        self.process.after_death += [self._close, lambda: device.died(self)]

    # -- the process ------------------------------------------------------------------------------

    def _live(self, strand: Strand) -> None:
        while True:
            try:
                self._work(strand)
            except OutboxFileError as error:  # a full disk: the app tries again later
                self._world.note(self.name, f"cannot use its file: {type(error).__name__}")
                self.wait(strand, 20.0)
            except HoldfastError as error:
                self._world.mishaps.append(f"{self.name}: {type(error).__name__}: {error}")
                return

    def _work(self, strand: Strand) -> None:
        device = self._device
        queue = self.queue
        if queue is None:
            queue = _SteppedQueue.open(
                device.path,
                clock=_DeviceClock(device),
                fault_points=self,
                driver="apsw",
                vfs=self._door.name,
            )
            queue.process = self.process
            self.queue = queue
        for user in device.users:
            queue.add_user(user)
        drain = Drain(
            queue,
            _Carrier(self, strand),
            token=self._token,
            clock=_DeviceClock(device),
            fault_points=self,
        )
        while True:
            soonest = _IDLE_SECONDS
            for user in device.users:
                # Without a limit it does not wait; with one it does, and looks around meanwhile.
                seconds = 4.0 if device.throw_dice() < _PATIENT_SHARE else None
                flag: Any = _Flag(self, strand)
                report = drain.run(user, max_seconds=seconds, stop=flag)
                if report.next_due_seconds is not None:
                    soonest = min(soonest, report.next_due_seconds)
            drain.wake_up()
            self.wait(strand, max(0.1, soonest))

    def _token(self, user: str) -> str | None:
        """Return who they are, unless they have to sign in again."""
        if self._world.faults.happens("signed out"):
            self._world.note(self.name, f"{user} is signed out")
            return None
        return user

    def wait(self, strand: Strand, seconds: float) -> None:
        """Let the strand wait for a time, or for a ring."""
        loop = self._world.loop

        def arrange(give: Callable[[Any], None]) -> None:
            loop.call_later(seconds, give, None, context=OUTSIDE.copy())
            self._rings = [give]

        strand.wait(arrange)

    def notify(self) -> None:
        """Wake the drain: something was queued."""
        for give in self._rings:
            give(None)

    def send(self, strand: Strand, request: Request) -> Response | NoResponse:
        """Carry one request, from the drain's side."""
        loop, key = self._world.loop, request.headers.get("Idempotency-Key", "")
        until, pauses = self._not_before.pop(key, (0.0, 0))
        if loop.time() < until - _EARLY_SECONDS and pauses == self.process.pauses:
            self._world.mishaps.append(
                f"{key[:8]} was sent {until - loop.time():.0f} s before Retry-After allows it"
            )
        self._device.begin_send(key, self)
        try:
            answer: Response | NoResponse = strand.wait(
                lambda give: self._world.network.send(self._device.name, request, give)
            )
        finally:
            self._device.end_send(key, self)
        if isinstance(answer, Response) and "retry-after" in answer.headers:
            after = float(answer.headers["retry-after"])
            self._not_before[key] = (loop.time() + after, self.process.pauses)
        return answer

    def let_go(self, key: str) -> None:
        """Forget that a key has to stay away: a person wants it sent."""
        self._not_before.pop(key, None)

    def reach(self, point: str) -> None:
        """Pass a fault point, or not."""
        process, world = self.process, self._world
        if not process.alive:
            return
        struck = world.faults.strike(point)
        if struck is None:
            return
        if struck == "pause":
            seconds = world.faults.between(60.0, 400.0)
            world.note(self.name, f"pause at {point} for {seconds:.0f} s")
            process.pause(seconds)
            self._strand.wait(lambda give: give(None))
            return
        world.note(self.name, f"{struck} at {point}")
        if struck == "power cut":
            self._device.cut_power()
        else:
            process.kill()
        raise Killed

    # -- its end ----------------------------------------------------------------------------------

    def _shut(self) -> None:
        self._door.is_shut = True

    def _close(self) -> None:
        if self.queue is not None:
            # The connection alone: a process that was killed does not take leave of its file.
            database: Any = self.queue._transactions._database  # noqa: SLF001
            with suppress(apsw.ConnectionClosedError):
                database.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            database.close()
        self._door.remove()
        error = self._strand.error
        if error is not None and not isinstance(error, HoldfastError):
            self._world.mishaps.append(f"{self.name}: {type(error).__name__}: {error}")


class _Carrier:
    """The transport of one strand."""

    def __init__(self, life: Life, strand: Strand) -> None:
        self._life = life
        self._strand = strand

    def send(self, request: Request) -> Response | NoResponse:
        return self._life.send(self._strand, request)


class _Flag:
    """What a drain waits with: virtual time, never set."""

    def __init__(self, life: Life, strand: Strand) -> None:
        self._life = life
        self._strand = strand

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self._life.wait(self._strand, seconds)
        return False


class Device:
    """One device: a disk, a clock that people set, and one or two processes."""

    def __init__(
        self,
        world: DeviceWorld,
        name: str,
        users: list[str],
        *,
        directory: Path,
        template: bytes,
        processes: int,
        chance: Random,
    ) -> None:
        """Switch it on."""
        self.world = world
        self.name = name
        self.users = users
        self.disk = Disk(directory, {_FILE: template})
        self.path = directory / _FILE
        self.clock_off = timedelta(0)
        self.was_set = False
        self.boots = 1
        self._booted_at = 0.0
        self._chance = chance
        self._is_off = False
        self._sending: dict[str, Life] = {}
        self._starts = [0] * processes
        self.lives = [Life(self, f"{name}/{number}") for number in range(processes)]

    @property
    def app(self) -> Life | None:
        """The process that people tap in, while it runs and has its file open."""
        for life in self.lives:
            process = life.process
            if process.alive and not process.is_paused and life.queue is not None:
                return life
        return None

    def throw_dice(self) -> float:
        """Return a number between 0 and 1."""
        return self._chance.random()

    def true_now(self) -> datetime:
        """Return the true time."""
        return self.world.now()

    def seconds_since_boot(self) -> float:
        """Return what the boot clock shows."""
        return self.world.seconds() - self._booted_at

    def died(self, life: Life) -> None:
        """Start a process again, some time after its death; not while there is no power."""
        if not self._is_off and life in self.lives:
            self._start_later(self.lives.index(life))

    def _start_later(self, number: int) -> None:
        self._starts[number] += 1
        turn = self._starts[number]

        def start() -> None:
            if turn == self._starts[number] and not self._is_off:
                self.lives[number] = Life(self, self.lives[number].name)

        self.world.loop.call_later(
            0.5 + 30.0 * self._chance.random(), start, context=OUTSIDE.copy()
        )

    def cut_power(self) -> None:
        """End everything on it, and lose what was not synced."""
        self._is_off = True
        for life in self.lives:
            life.process.kill()
        self.world.loop.call_soon(self._lose, context=OUTSIDE.copy())

    def _lose(self) -> None:
        lost = self.disk.cut_power(self._chance)
        self.world.note(self.name, f"power is back, {lost} unsynced pieces are gone")
        self.boots += 1
        self._booted_at = self.world.seconds()
        self._is_off = False
        for number in range(len(self.lives)):
            self._start_later(number)

    def oversleep(self) -> None:
        """Let its processes wake up after days: what they held is no longer theirs."""
        for life in self.lives:
            life.process.pauses += 1

    def begin_send(self, key: str, life: Life) -> None:
        """Note who sends what: an entry is sent by one process only, as long as its lease holds.

        A process that was paused, or whose renewals found a full disk, may have lost its lease.
        """
        if not key:  # only a look at the server's side
            return
        other = self._sending.get(key, life)
        paused = life.process.pauses + other.process.pauses
        if other is not life and other.process.alive and not paused and not self.disk.was_full:
            self.world.mishaps.append(f"{key[:8]} was sent by two processes at the same time")
        self._sending[key] = life

    def end_send(self, key: str, life: Life) -> None:
        """Note that an answer, or none, has come."""
        if self._sending.get(key) is life:
            del self._sending[key]

    def switch_off(self) -> None:
        """End everything on it for good."""
        self._is_off = True
        for life in self.lives:
            life.process.kill()

    # -- what the checker reads -------------------------------------------------------------------

    def unsettled(self) -> int:
        """Return how many entries are not settled; one if nobody can tell."""
        life = self.app
        if life is None or life.queue is None:
            return 1
        queue = life.queue
        return sum(queue.unsent(user) for user in self.users)

    def entry_states(self) -> list[EntryState]:
        """Return what the file says of every tap."""
        life = self.app
        if life is None or life.queue is None:
            return []
        return [
            EntryState(
                action=entry.decoded()["tap"],
                status=Status(entry.status),
                key=entry.idempotency_key,
                outcome_unknown=entry.outcome_unknown,
            )
            for user in self.users
            for entry in life.queue.entries(user, limit=1000)
        ]
