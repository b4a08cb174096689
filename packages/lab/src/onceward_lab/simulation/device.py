"""Devices: one or two processes each, with the real queue and the real drain."""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

import apsw
import msgspec

from onceward.errors import OncewardError
from onceward_lab.history import Contact, Delay, EntryState, Idle
from onceward_lab.simulation.app import ATTESTATION, REFUSED_ATTESTATION
from onceward_lab.simulation.batches import BATCH_PATH, header_of, items_of, parts_of
from onceward_lab.simulation.cooperative_threads import CooperativeThread
from onceward_lab.simulation.exchanges import Sent, SimulatedTransport
from onceward_lab.simulation.faults import Faults
from onceward_lab.simulation.faulty_vfs import Disk, FaultyVFS
from onceward_lab.simulation.loop import NO_PROCESS, Process, ProcessKilled, VirtualLoop
from onceward_lab.simulation.network import Network
from onceward_lab.simulation.observer import DeviceObserver, action_of
from onceward_lab.simulation.profiles import PROFILES
from onceward_lab.simulation.user_actions import PlannedAction
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import DrainReport, Ended
from onceward_outbox.entry import OPEN, Entry, Reason, Status, Transition
from onceward_outbox.errors import OutboxFileError
from onceward_outbox.events import Event, EventKind
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.transport import NoResponse, Request, Response
from onceward_protocol.operation import Operation
from onceward_protocol.retry import DEVICE

__all__ = ["AppProcess", "Device", "DeviceWorld"]

_FILE: Final = "outbox.db"
_IDLE_SECONDS: Final = 600.0
_TIME_LIMIT_SHARE: Final = 0.05
_EARLY_SECONDS: Final = 0.5
_TICK_SECONDS: Final = 1e-6
# At one moment of virtual time: 59 at most in 150 seeds.
_MOST_CLOCK_READS: Final = 5_000
_OK: Final = 200
# Of an item: an earlier one did not succeed, or it can only be sent alone.
_NOT_RUN_STATUSES: Final = frozenset({400, 424})
_NOT_RUN: Final = object()
"""In place of the result of an item that was skipped, or that the server did not get to."""

_TOO_MANY: Final = 429
_HOLDS: Final = frozenset({_TOO_MANY, 502, 503, 504})
_NOTHING_TO_SEND: Final = frozenset({Ended.EMPTY, Ended.BLOCKED, Ended.WAITING, Ended.HELD})


class DeviceWorld(Protocol):
    """The parts of the world that a device uses."""

    loop: VirtualLoop
    faults: Faults
    network: Network
    errors: list[str]
    actions: dict[str, PlannedAction]

    def now(self) -> datetime:
        """Return the true time."""

    def refuses_attestation(self, payload: dict[str, Any]) -> bool:
        """Return whether the server refuses the attestation of an action now."""

    def seconds(self) -> float:
        """Return the seconds since the start, with skipped days."""

    def note(self, source: str, event: str) -> None:
        """Append an event to the timeline."""


class _SimulatedQueue(OutboxQueue):
    """The real queue, with timers in virtual time."""

    process: Process

    def every(self, seconds: float, action: Callable[[], bool]) -> None:
        """Call ``action`` every so many seconds, until it returns False."""
        process = self.process

        def again() -> None:
            if action():
                process.loop.call_later(seconds, again, context=process.context.copy())

        process.loop.call_later(seconds, again, context=process.context.copy())


class _BusyLoopError(OncewardError):
    """The device runs without end at one moment of virtual time."""


class _DeviceClock:
    """The device's clock, which users can set."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._last = 0.0
        self._reads = 0

    def now(self) -> datetime:
        return self._device.true_now() + self._device.clock_offset

    def monotonic(self) -> float:
        """Raise ``_BusyLoopError`` if it is read without end while no virtual time passes."""
        now = self._device.world.loop.time()
        self._reads = self._reads + 1 if now == self._last else 0
        self._last = now
        if self._reads > _MOST_CLOCK_READS:
            raise _BusyLoopError("the drain runs in a loop without sending or waiting")
        return self._device.seconds_since_boot()

    def boot_id(self) -> str:
        return f"boot-{self._device.boots}"


class AppProcess:
    """One process of the app on a device: opens the queue and drains it until it is killed."""

    def __init__(self, device: "Device", name: str) -> None:
        self._device = device
        self._world = device.world
        self.name = name
        self.process = Process(self._world.loop, name)
        self.queue: _SimulatedQueue | None = None
        self._vfs = FaultyVFS(device.disk)
        self._wakeups: list[Callable[[Any], None]] = []
        # Users whose drains found no network: how often in a row, and when to try again.
        self._backing_off: dict[str, tuple[int, float]] = {}
        self.connections = device.connections
        self._number = device.next_number()
        self._send_count = 0
        self._resume_send: Callable[[Any], None] = _ignore
        self._drain_began_at = 0.0
        self._drainer: Drain | None = None
        # Retry-After of each key: the earliest time, and the pauses of the process so far.
        self._not_before: dict[str, tuple[float, int]] = {}
        self.process.on_kill.append(self._stop_writes)
        self._thread = CooperativeThread(self.process, self._run)
        self.process.after_kill += [self._close, lambda: device.on_death(self)]

    # -- the process ------------------------------------------------------------------------------

    def _run(self, thread: CooperativeThread) -> None:
        while True:
            try:
                self._drain(thread)
            except OutboxFileError as error:  # the disk is full: retry later
                self._world.note(self.name, f"cannot use the queue: {type(error).__name__}")
                self.wait(thread, 20.0)
            except OncewardError as error:
                self._world.errors.append(f"{self.name}: {type(error).__name__}: {error}")
                return

    def _drain(self, thread: CooperativeThread) -> None:
        device = self._device
        queue = self.queue
        if queue is None:
            queue = _SimulatedQueue.open(
                device.path,
                clock=_DeviceClock(device),
                fault_points=self,
                driver="apsw",
                vfs=self._vfs.name,
                profiles=PROFILES,
                listeners=[self._on_event],
            )
            queue.process = self.process
            self.queue = queue
            device.observer.on_start(queue, device.users, self._world.loop.time())
        for user in device.users:
            queue.add_user(user)
        if self._drainer is None:  # one for the process: it knows of holds after an error, too
            self._drainer = Drain(
                queue,
                SimulatedTransport(self),
                token=self._token,
                at_send=self._attest,
                clock=_DeviceClock(device),
                fault_points=self,
            )
        drain = self._drainer
        while True:
            soonest = _IDLE_SECONDS
            for user in device.users:
                soonest = min(soonest, self._drain_user(thread, drain, user))
            drain.wake_up()
            self.wait(thread, max(0.1, soonest))

    def _drain_user(self, thread: CooperativeThread, drain: Drain, user: str) -> float:
        """Drain one user, unless there was no network; returns after how long to do so again.

        Backs off as ``BackgroundDrain`` does.
        """
        device, loop = self._device, self._world.loop
        failures, until = self._backing_off.get(user, (0, 0.0))
        if loop.time() < until:
            return until - loop.time()
        # Without a time limit the drain does not wait for entries that are due later.
        seconds = 4.0 if device.random() < _TIME_LIMIT_SHARE else None
        stop: Any = _NeverStop(self, thread)
        self._drain_began_at = self._world.seconds()
        report = drain.run(user, max_seconds=seconds, stop=stop)
        self._note_idle(user, report)
        if report.ended is Ended.OFFLINE:
            pause = DEVICE.delay_seconds(failures + 1, random=device.random())
            self._backing_off[user] = (failures + 1, loop.time() + pause)
            return pause
        self._backing_off.pop(user, None)
        return _IDLE_SECONDS if report.next_due_seconds is None else report.next_due_seconds

    def _note_idle(self, user: str, report: DrainReport) -> None:
        """Note an action that could be sent, if the drain ended without it and is not due soon."""
        due = report.next_due_seconds
        is_due = due is not None and due < _IDLE_SECONDS / 2
        if not (report.unsent or report.refused) or report.ended not in _NOTHING_TO_SEND or is_due:
            return
        assert self.queue is not None  # noqa: S101 - the drain uses it
        entries = self.queue.entries(user, limit=1000)
        for number, entry in enumerate(entries):
            if _is_new(entry) and not _blockers(entries, number):
                self._device.observer.idle.append(
                    Idle(action=action_of(entry), ended=report.ended, next_seconds=due)
                )
                return

    def online(self) -> None:
        """Try at once: the system reports a network."""
        self._backing_off.clear()
        self._note_contact("online")
        if self._drainer is not None:
            self._drainer.outages.probe_now()
        self.notify()

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.EXPIRING:
            self._world.note(self.name, f"{event.count} entries expire soon")
        if self.queue is not None and self.process.alive:
            self._device.observer.on_event(event, self.queue, self._world.loop.time())

    def _attest(self, entry: Entry) -> dict[str, str]:
        """Return the attestation of a step, which the server may refuse."""
        if entry.entity_type != "step" or not self._world.refuses_attestation(entry.decoded()):
            return {}
        return {ATTESTATION: REFUSED_ATTESTATION}

    def _token(self, user: str) -> str | None:
        """Return the token of a user; None if they have to sign in again."""
        if self._world.faults.happens("signed out"):
            self._world.note(self.name, f"{user} is signed out")
            return None
        return user

    def wait(self, thread: CooperativeThread, seconds: float) -> None:
        """Wait until the time is over or ``notify`` is called."""
        loop = self._world.loop

        def subscribe(resume: Callable[[Any], None]) -> None:
            loop.call_later(seconds, resume, None, context=NO_PROCESS.copy())
            self._wakeups = [resume]

        thread.wait(subscribe)

    def notify(self) -> None:
        """Wake the drain: an entry was added or changed."""
        for resume in self._wakeups:
            resume(None)

    # -- requests ---------------------------------------------------------------------------------

    def monotonic(self) -> float:
        """Return the device's monotonic clock."""
        return self._device.seconds_since_boot()

    def begin_send(self, request: Request, *, is_repeat: bool = False) -> Sent:
        """Check a request of the drain and note it."""
        actions = []
        for part in parts_of(request):
            action = self._action_of(part)
            actions.append(action)
            self._begin_part(part, action)
        self._send_count += 1
        sent = Sent(self._send_count, request, actions, is_repeat=is_repeat)
        endpoints = tuple(self._world.actions[action].endpoint for action in actions)
        self._note_contact("sent", sent, endpoints=endpoints, drain_began_at=self._drain_began_at)
        return sent

    def _begin_part(self, request: Request, action: str) -> None:
        """Check and note one request, or one item of a batch."""
        loop, key = self._world.loop, request.headers.get("Idempotency-Key", "")
        until, pauses = self._not_before.pop(key, (0.0, 0))
        if loop.time() < until - _EARLY_SECONDS and pauses == self.process.pauses:
            self._world.errors.append(
                f"{key[:8]} was sent {until - loop.time():.0f} s before Retry-After allows it"
            )
        self._device.begin_send(key, self)
        is_parallel = self._world.actions[action].is_parallel
        if self._device.name not in self._world.network.offline:  # otherwise it is not sent
            self._device.observer.on_send(request, action, loop.time(), is_parallel=is_parallel)
            planned = self._world.actions[action]
            planned.first_sent_at = min(planned.first_sent_at, loop.time())

    def carry(self, sent: Sent, on_result: Callable[[Response | NoResponse], None]) -> None:
        """Give a request to the network; only the first call of ``on_result`` counts."""
        self._world.network.send(self._device.name, sent.request, on_result)

    def end_send(self, sent: Sent, result: Response | NoResponse | None) -> None:
        """Note the result of a request, as the drain gets it; None if it does not wait for it."""
        parts = parts_of(sent.request)
        for part in parts:
            self._device.end_send(part.headers.get("Idempotency-Key", ""), self)
        if not self.process.alive:
            return
        if _kind_of(result) == "responded":
            self._device.correct_clock()
        results = _results(sent.request, parts, result)
        for action, (part, own) in zip(sent.actions, results, strict=True):
            if own is _NOT_RUN:
                self._device.observer.on_no_result(part, action)
            else:
                self._end_part(sent, part, action, own)
        if all(own is _NOT_RUN for _, own in results):
            self._note_contact("responded", sent)

    def _end_part(
        self, sent: Sent, request: Request, action: str, result: Response | NoResponse | None
    ) -> None:
        """Note the result of one request, or of one item of a batch."""
        after, loop = _retry_after(result), self._world.loop
        kind = _kind_of(result)
        if sent.is_repeat and kind != "responded":  # the first connection decides
            kind = "none"
        self._note_contact(kind, sent, after, result, action=action)
        user = (header_of(request, "Authorization") or "").removeprefix("Bearer ")
        reads_base = self._world.actions[action].profile == "field-read"
        self._device.observer.on_result(
            request,
            action,
            NoResponse("it was abandoned") if result is None else result,
            user,
            loop.time(),
            reads_base=reads_base,
        )
        key = request.headers.get("Idempotency-Key", "")
        if key and after is not None and not sent.is_repeat:
            self._not_before[key] = (loop.time() + after, self.process.pauses)

    def wait_for_result(self, seconds: float | None) -> None:
        """Wait until ``wake_for_result`` is called, or the time is over."""
        loop = self._world.loop

        def subscribe(resume: Callable[[Any], None]) -> None:
            self._resume_send = resume
            if seconds is not None:
                loop.call_later(seconds, resume, None, context=NO_PROCESS.copy())

        self._thread.wait(subscribe)

    def wake_for_result(self) -> None:
        """End the wait for a result."""
        self._resume_send(None)

    def later(self, seconds: float, step: Callable[[], None]) -> None:
        """Call a function after some virtual seconds."""
        self._world.loop.call_later(seconds, step, context=NO_PROCESS.copy())

    def _note_contact(
        self,
        what: str,
        sent: Sent | None = None,
        retry_after: float | None = None,
        result: Response | NoResponse | None = None,
        *,
        action: str | None = None,
        endpoints: tuple[str, ...] = (),
        drain_began_at: float = 0.0,
    ) -> None:
        """Note a contact; ``action`` is by default the first of what was sent."""
        device, world = self._device, self._world
        if sent is not None:
            action = action or sent.actions[0]
        device.observer.contacts.append(
            Contact(
                device=device.name,
                process=f"{self.name} {self._number}",
                at=world.seconds(),
                what=what,
                number=0 if sent is None else sent.number,
                action=action or "",
                endpoint="" if action is None else world.actions[action].endpoint,
                endpoints=endpoints,
                is_endpoint=isinstance(result, Response) and result.status == _TOO_MANY,
                retry_after_seconds=retry_after,
                drain_began_at=drain_began_at,
                clock_seconds=device.clock_offset.total_seconds(),
                clock_corrections=device.clock_corrections,
            )
        )

    def _action_of(self, request: Request) -> str:
        if request.body:
            name: str = msgspec.json.decode(request.body)["action_id"]
            return name
        assert self.queue is not None  # noqa: S101 - it has made the request
        return action_of(self.queue.get(request.headers["X-Correlation-ID"]))

    def clear_retry_after(self, key: str) -> None:
        """Allow a key before its Retry-After is over: a user has requested a retry."""
        self._not_before.pop(key, None)

    def reach(self, point: str) -> None:
        """Continue, pause the process, kill it, or cut the power of the device."""
        process, world = self.process, self._world
        if not process.alive:
            return
        if point == "drain.recorded":
            self._note_contact("stored")
        fault = world.faults.inject(point)
        if fault is None:
            return
        if fault == "pause":
            seconds = world.faults.between(60.0, 400.0)
            world.note(self.name, f"pause at {point} for {seconds:.0f} s")
            process.pause(seconds)
            self._thread.wait(lambda resume: resume(None))
            return
        world.note(self.name, f"{fault} at {point}")
        if fault == "power cut":
            self._device.cut_power()
        else:
            process.kill()
        raise ProcessKilled

    # -- cleanup --------------------------------------------------------------------------------

    def _stop_writes(self) -> None:
        self._vfs.is_dead = True

    def _close(self) -> None:
        if self.queue is not None:
            # Only the connection: a killed process does not checkpoint its file.
            database: Any = self.queue._file.transactions._database  # noqa: SLF001
            with suppress(apsw.ConnectionClosedError):
                database.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            database.close()
        self._vfs.remove()
        error = self._thread.error
        if error is not None and not isinstance(error, OncewardError):
            self._world.errors.append(f"{self.name}: {type(error).__name__}: {error}")


class _NeverStop:
    """The stop event of a drain: waits in virtual time, and is never set."""

    def __init__(self, app: AppProcess, thread: CooperativeThread) -> None:
        self._app = app
        self._thread = thread

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self._app.wait(self._thread, seconds)
        return False


class Device:
    """One device: a disk, a clock that users can set, and one or two processes."""

    def __init__(
        self,
        world: DeviceWorld,
        name: str,
        users: list[str],
        *,
        directory: Path,
        template: bytes,
        processes: int,
        connections: int,
        rng: Random,
    ) -> None:
        self.world = world
        self.name = name
        self.users = users
        self.disk = Disk(directory, {_FILE: template})
        self.path = directory / _FILE
        self.clock_offset = timedelta(0)
        self.clock_was_set = False
        self.boots = 1
        # The server's time has corrected the device's, at most once after each start.
        self.clock_corrections = 0
        self._corrected_boot = 0
        self._booted_at = 0.0
        self._last_reading = 0.0
        # How many requests a drain sends at once; 0 for one at a time.
        self.connections = connections
        self._process_count = 0
        self._rng = rng
        self._is_off = False
        self._sending: dict[str, AppProcess] = {}
        self.observer = DeviceObserver()
        self._start_counts = [0] * processes
        self.apps = [AppProcess(self, f"{name}/{number}") for number in range(processes)]

    @property
    def app(self) -> AppProcess | None:
        """The process that users see: running, with an open queue. None if there is none."""
        for app in self.apps:
            process = app.process
            if process.alive and not process.is_paused and app.queue is not None:
                return app
        return None

    def random(self) -> float:
        """Return a number between 0 and 1."""
        return self._rng.random()

    def true_now(self) -> datetime:
        """Return the true time."""
        return self.world.now()

    def next_number(self) -> int:
        """Return the number of the next process of the device."""
        self._process_count += 1
        return self._process_count

    def seconds_since_boot(self) -> float:
        """Return the monotonic clock of the device. As everywhere, it advances while code runs."""
        reading = self.world.seconds() - self._booted_at
        self._last_reading = max(reading, self._last_reading + _TICK_SECONDS)
        return self._last_reading

    def correct_clock(self) -> None:
        """Note that the server's time has arrived."""
        if self._corrected_boot != self.boots:
            self._corrected_boot = self.boots
            self.clock_corrections += 1

    def on_death(self, app: AppProcess) -> None:
        """Restart a process later, unless the device has no power."""
        if not self._is_off and app in self.apps:
            self._start_later(self.apps.index(app))

    def _start_later(self, number: int) -> None:
        self._start_counts[number] += 1
        start_number = self._start_counts[number]

        def start() -> None:
            if start_number == self._start_counts[number] and not self._is_off:
                self.apps[number] = AppProcess(self, self.apps[number].name)

        self.world.loop.call_later(
            0.5 + 30.0 * self._rng.random(), start, context=NO_PROCESS.copy()
        )

    def cut_power(self) -> None:
        """Kill all processes and lose unsynced writes; the device restarts later."""
        self._is_off = True
        for app in self.apps:
            app.process.kill()
        self.world.loop.call_soon(self._restore_power, context=NO_PROCESS.copy())

    def _restore_power(self) -> None:
        lost = self.disk.cut_power(self._rng)
        self.world.note(self.name, f"power restored, {lost} unsynced sectors lost")
        self.boots += 1
        self._booted_at = self.world.seconds()
        self._last_reading = 0.0
        self._is_off = False
        for number in range(len(self.apps)):
            self._start_later(number)

    def expire_leases(self) -> None:
        """Count the skipped days as a pause of each process: their leases have expired."""
        for app in self.apps:
            app.process.pauses += 1

    def begin_send(self, key: str, app: AppProcess) -> None:
        """Check that only one process sends an entry while its lease is valid.

        A process that was paused, or whose renewals found a full disk, may have lost its lease.
        """
        if not key:  # a GET without a key
            return
        other = self._sending.get(key, app)
        paused = app.process.pauses + other.process.pauses
        if other is not app and other.process.alive and not paused and not self.disk.was_full:
            self.world.errors.append(f"{key[:8]} was sent by two processes at the same time")
        self._sending[key] = app

    def end_send(self, key: str, app: AppProcess) -> None:
        """End a send that ``begin_send`` has recorded."""
        if self._sending.get(key) is app:
            del self._sending[key]

    def online(self) -> None:
        """Let all processes try at once: the system reports a network."""
        for app in self.apps:
            app.online()

    def shut_down(self) -> None:
        """Kill all processes; none is restarted."""
        self._is_off = True
        for app in self.apps:
            app.process.kill()

    # -- for the history --------------------------------------------------------------------------

    def unfinished_count(self) -> int:
        """Return how many entries are not finished; 1 if no process has the queue open."""
        app = self.app
        if app is None or app.queue is None:
            return 1
        queue = app.queue
        return sum(sum(queue.unsettled(user)) for user in self.users)

    def delays(self, seconds: float) -> list[Delay]:
        """Return the entries that could be sent and are not, while another one is refused."""
        app = self.app
        if app is None or app.queue is None:
            return []
        found: list[Delay] = []
        for user in self.users:
            entries = app.queue.entries(user, limit=1000)
            refused = [entry for entry in entries if _is_refused(entry)]
            for number, entry in enumerate(entries):
                if refused and _is_new(entry) and not _blockers(entries, number):
                    found.append(
                        Delay(
                            action=action_of(entry), behind=action_of(refused[0]), seconds=seconds
                        )
                    )
        return found

    def entry_states(self) -> list[EntryState]:
        """Return the final state of every entry."""
        app = self.app
        if app is None or app.queue is None:
            return []
        return [
            EntryState(
                action=entry.decoded()["action_id"],
                status=Status(entry.status),
                key=entry.idempotency_key,
                outcome_unknown=entry.outcome_unknown,
                had_conflict=_had_conflict(app.queue, entry),
            )
            for user in self.users
            for entry in app.queue.entries(user, limit=1000)
        ]


def _had_conflict(queue: OutboxQueue, entry: Entry) -> bool:
    """Return whether the server has refused one of its sends because of its version."""
    return entry.operation is Operation.PATCH and any(
        attempt.outcome is Transition.CONFLICT for attempt in queue.attempts(entry.id)
    )


def _is_new(entry: Entry) -> bool:
    return entry.status is Status.PENDING and not entry.attempt_count


def _results(
    request: Request, parts: list[Request], result: Response | NoResponse | None
) -> list[tuple[Request, Any]]:
    """Return the items of a request with their results, or ``_NOT_RUN``."""
    is_batch = request.target == BATCH_PATH
    if not is_batch or not isinstance(result, Response) or result.status != _OK:
        return [(part, result) for part in parts]
    if "results" not in (result.json() or {}):  # the page of a portal
        return [(part, result) for part in parts]
    return [
        (
            item.request or part,
            _NOT_RUN
            if item.response is None or item.response.status in _NOT_RUN_STATUSES
            else item.response,
        )
        for part, item in zip(parts, items_of(request, result), strict=True)
    ]


def _retry_after(result: Response | NoResponse | None) -> float | None:
    if isinstance(result, Response) and "retry-after" in result.headers:
        return float(result.headers["retry-after"])
    return None


def _kind_of(result: Response | NoResponse | None) -> str:
    """Return the contact that a result shows: see ``Contact``."""
    if not isinstance(result, Response):
        return "none"
    if result.status in _HOLDS:
        return "held"
    return "responded" if isinstance(result.json(), dict) else "none"


def _ignore(_value: Any) -> None:
    return


def _is_refused(entry: Entry) -> bool:
    """Return whether the server has refused an entry, or its attestation."""
    if entry.status is Status.PENDING:
        # A later send may have succeeded: what is behind it waits for its outcome.
        return entry.last_code == "ATTESTATION_INVALID" and not entry.outcome_unknown
    return (
        entry.status is Status.FAILED
        and entry.reason is Reason.RESPONSE
        and not entry.outcome_unknown
    )


def _blockers(entries: list[Entry], number: int) -> list[Entry]:
    """Return the entries to wait for: unsettled entries before it that are not refused.

    Also later ones of its lane that were sent while it had failed, and may have happened: when it
    comes back, they keep their place before it.
    """
    entry = entries[number]
    earlier = [
        before
        for before in entries[:number]
        if before.status in OPEN
        and before.reason is not Reason.DEPENDENCY
        # The order of a chain is kept: it waits for the attestation of each entry.
        and (not _is_refused(before) or (before.status is Status.PENDING and before.chain))
    ]
    later = [
        behind
        for behind in entries[number + 1 :]
        if behind.lane is not None
        and behind.lane == entry.lane
        and behind.status in OPEN
        and (behind.outcome_unknown or behind.status is Status.IN_FLIGHT)
    ]
    return earlier + later
