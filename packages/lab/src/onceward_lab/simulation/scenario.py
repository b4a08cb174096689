"""One seed: sets up a world, injects faults, lets it drain, and checks its history."""

import logging
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from onceward.guard import chunk as batch_chunk
from onceward_lab.checker import Violation, check
from onceward_lab.history import (
    Delay,
    Effect,
    FollowUp,
    History,
    JobEffect,
    JobState,
    Move,
    Write,
)
from onceward_lab.simulation.batch_clients import BatchClients, batch_options
from onceward_lab.simulation.batches import BATCH_PATH
from onceward_lab.simulation.broker import SimulatedBroker
from onceward_lab.simulation.database import Contents
from onceward_lab.simulation.determinism import deterministic
from onceward_lab.simulation.device import Device
from onceward_lab.simulation.faults import (
    LONG_SLEEP,
    RESTORE,
    SILENCE,
    STALL,
    STANDBY_AWAY,
    Faults,
    Mask,
)
from onceward_lab.simulation.loop import CURRENT_PROCESS, NO_PROCESS, VirtualLoop
from onceward_lab.simulation.network import PORTALS, SETTLED_SECONDS, Network, outage_response
from onceward_lab.simulation.operators import Operators
from onceward_lab.simulation.server import InjectedError, Server, Stall
from onceward_lab.simulation.standby import Standby
from onceward_lab.simulation.store import InjectedCutError
from onceward_lab.simulation.stream_clients import StreamClient
from onceward_lab.simulation.templates import Templates
from onceward_lab.simulation.user_actions import Bias, PlannedAction, plan_actions
from onceward_lab.simulation.users import Users
from onceward_nats import relay
from onceward_outbox.transport import Response

if TYPE_CHECKING:
    from onceward.batch.options import BatchOptions
    from onceward_lab.simulation.store import SimulatedConnection, SimulatedNotifier

__all__ = ["Outcome", "focus_points", "run_seed"]

_START: Final = datetime(2030, 1, 1, tzinfo=UTC)
_MAX_FAULT_SECONDS: Final = 3600.0
_DRAIN_SECONDS: Final = 21_600.0
_POLL_SECONDS: Final = 15.0
_MAX_POLL_SECONDS: Final = 300.0
_LONG_SLEEP_SHARE: Final = 0.12
_RESTORE_SHARE: Final = 0.5
_STANDBY_SHARE: Final = 0.5
_PROMOTED_SHARE: Final = 0.7
_APPLIED_SHARE: Final = 0.5
_OFTEN_DOWN_SHARE: Final = 0.1
_DOWN_RATE: Final = 0.5
_MAX_RESTORE_SECONDS: Final = 600.0
_CONTESTED_SHARE: Final = 0.3
_RETURNS_SHARE: Final = 0.05
_OFFLINE_EDITS: Final = (15.0, 60.0)
"""From when to when users edit without a network, in some worlds."""

_STALL_RATE: Final = 0.3
_SILENCE_SHARE: Final = 0.05
_SILENCE_SECONDS: Final = (900.0, 1500.0)
_SILENCE_POLL_SECONDS: Final = 0.3
_LOCK_SECONDS: Final = 0.05
_BATCHES_SHARE: Final = 0.1
_STREAM_SHARE: Final = 0.08
_CHUNK_FOCUS_SHARE: Final = 0.6
"""How often the servers of clients without an outbox are killed after the commit of a chunk."""

_OFFERED_SHARE: Final = 0.7
"""How often servers accept batches."""

_REPORTED_SHARE: Final = 0.5
"""How often an app gets to know that the network is back."""

_WAKE_UPS: Final = (150.0, 50.0)
"""Seconds between the wake-ups of devices while no person decides: longer than a lease."""

_ALMOST_STALE_DAYS: Final = 6.0
_DAYS: Final = (2.0, _ALMOST_STALE_DAYS, 8.0, 20.0)
"""Shorter than the lifetime of keys, longer, and much longer."""


class Outcome(msgspec.Struct, kw_only=True):
    """The result of one seed."""

    seed: int
    violations: list[Violation]
    actions: int
    requests: int
    effects: int
    jobs: int
    faults: dict[str, int]
    points: dict[str, int]
    struck: dict[str, int]
    fault_count: int
    virtual_seconds: float
    timeline: list[tuple[float, str, str]]
    fingerprint: str


def run_seed(seed: int, templates: Templates, mask: Mask | None = None) -> Outcome:
    """Simulate one seed and check it."""
    rng = _rng_of(seed)
    with deterministic(_stream(rng)):
        world = World(rng, templates, mask or Mask())
        try:
            return world.run(seed)
        finally:
            world.close()


def focus_points(seed: int) -> frozenset[str]:
    """Return where the faults of a seed are more frequent, without running it."""
    rng = _rng_of(seed)
    _stream(rng)  # the first one is for what is made deterministic
    return Faults(_stream(rng), Mask()).focus_points


def _rng_of(seed: int) -> Random:
    return Random(f"onceward simulate {seed}")  # noqa: S311 - reproducible, not secret


def _stream(rng: Random) -> Random:
    """Return the next stream: separate ones, so that omitting a fault changes little else."""
    return Random(rng.getrandbits(64))  # noqa: S311


class World:
    """Servers, devices, users, network and broker of one seed."""

    def __init__(self, rng: Random, templates: Templates, mask: Mask) -> None:
        stream = partial(_stream, rng)
        self.loop = VirtualLoop()
        self.loop.on_error = self._on_error
        self._now_at, self._now = 0.0, _START
        self._skipped_seconds = 0.0
        self.faults = Faults(stream(), mask)
        self._disk_rng = stream()
        self._rng = stream()
        self.writers: list[SimulatedConnection] = []
        self.notifiers: list[SimulatedNotifier] = []
        self.errors: list[str] = []
        self._delays: list[Delay] = []
        self._are_people_away = False
        self._attests = False
        self.response_count = 0
        self.unknown_commits = 0
        self.standby: Standby | None = None
        self.stall: Stall | None = None
        self.timeline: list[tuple[float, str, str]] = []
        self._directory = templates.new_directory()
        self.database = templates.server
        self.database.reset(self.unix_time)
        self._reader = self.database.reader
        self.network = Network(self, stream())
        broker_rng, plan_rng, users_rng = stream(), stream(), stream()
        with_broker = plan_rng.random() < 0.2 or self.faults.focuses_on(*relay.FAULT_POINTS)  # noqa: PLR2004
        self.broker = SimulatedBroker(self.loop, self.faults, broker_rng) if with_broker else None
        self._log_handler = _ErrorLogHandler(self)
        batch_rng = stream()
        self.batch_options: BatchOptions | None = batch_options(batch_rng)
        self._is_often_down = self.faults.focuses_on("save_holds") or (
            plan_rng.random() < _OFTEN_DOWN_SHARE
        )
        self.servers = self._make_servers(plan_rng)
        self.http_servers = [server for server in self.servers if server.handles_requests]
        self._make_devices(plan_rng, stream, templates)
        self.users = Users(self, self.devices, users_rng)
        self._returns = self._rng.random() < _RETURNS_SHARE
        self._is_contested = self._rng.random() < _CONTESTED_SHARE and not self._returns
        self._is_silence_due = self._rng.random() < _SILENCE_SHARE
        planned = plan_actions(plan_rng, {d.name: d.users for d in self.devices}, self._bias())
        self.actions: dict[str, PlannedAction] = {action.id: action for action in planned}
        self._planned = planned
        self.network.loses_changes = any(action.lane is not None for action in planned)
        self._plan_disasters(stream)
        self._clients = self._make_clients(batch_rng)
        # Not with a restore, which undoes what they have done.
        operators = Operators.maybe(self, self._reader, stream())
        self._operators = operators if self._restore is None else None
        if self._operators is not None:
            self._operators.schedule()

    def _plan_disasters(self, stream: Callable[[], Random]) -> None:
        self._long_sleep = LongSleep.maybe(stream())
        if self.faults.focuses_on("warn_of_expiry"):  # entries that are old, and not too old
            self._long_sleep = LongSleep(
                10.0 + 100.0 * self._rng.random(), _ALMOST_STALE_DAYS, False
            )
        if self._is_silence_due:
            self._long_sleep = None
        times = [action.at for action in self._planned]
        self._restore: Restore | None = (
            Restore.maybe(stream(), times) if self._can_restore() else None
        )
        self._is_restore_over = False
        self._absence: Absence | None = None
        if self._restore is None and self._can_restore():
            self._absence = Absence.maybe(stream(), times)
        if self._absence is not None:
            self.standby = Standby(self.database)
        self._fast_disk_until = 0.0

    def _make_clients(self, rng: Random) -> list[BatchClients | StreamClient]:
        """Make clients without an outbox in some worlds, and where the fault points are theirs."""
        is_needed = self.faults.focuses_on(*batch_chunk.FAULT_POINTS)
        draw = rng.random()
        clients: list[BatchClients | StreamClient] = []
        if draw < _BATCHES_SHARE or is_needed:
            clients.append(BatchClients(self, rng))
        if rng.random() < _STREAM_SHARE:
            clients.append(StreamClient(self, rng))
        if draw > _OFFERED_SHARE and not clients:
            self.batch_options = None
        if clients and rng.random() < _CHUNK_FOCUS_SHARE:
            self.faults.focus_on("chunk_after_commit")
        return clients

    def _can_restore(self) -> bool:
        """Return whether requests and jobs run apart: operators stop workers for a restore.

        A promotion ends their connections, too. Not with a broker, which is not restored, nor with
        skipped days, nor with a silent server.
        """
        is_apart = all(server.handles_requests != server.runs_jobs for server in self.servers)
        is_plain = self._long_sleep is None and not self._is_silence_due
        return is_apart and self.broker is None and is_plain

    def _bias(self) -> Bias:
        focuses_on = self.faults.focuses_on
        if focuses_on("expire"):  # entries seem stale if the clocks are wrong from the start
            for device in self.devices:
                device.clock_offset, device.clock_was_set = timedelta(days=-20), True
        return Bias(
            refusals=focuses_on("fail", "retry", "discard", "discard_all"),
            conflicts=focuses_on("conflict", "resolve"),
            manual_conflicts=focuses_on("resolve"),
            walks=focuses_on("expire"),
            is_contested=self._is_contested,
            reads=focuses_on("rebase"),
            lanes=focuses_on("resend"),
            moves=focuses_on("begin_stream", "renumber"),
            is_busy=self._is_often_down,
            is_silent=self._is_silence_due,
            returns=self._returns,
        )

    def _make_servers(self, plan_rng: Random) -> list[Server]:
        match plan_rng.choice(("one", "one", "two", "apart")):
            case "one":
                shape = [("server", True, True)]
            case "two":
                shape = [("server-1", True, True), ("server-2", True, True)]
            case _:
                shape = [("server", True, False), ("worker-1", False, True)]
                if plan_rng.random() < 0.5:  # noqa: PLR2004
                    shape.append(("worker-2", False, True))
        return [
            Server(self, name, handles_requests=handles_requests, runs_jobs=runs_jobs)
            for name, handles_requests, runs_jobs in shape
        ]

    def _make_devices(
        self, plan_rng: Random, stream: Callable[[], Random], templates: Templates
    ) -> None:
        self.devices: list[Device] = []
        # Most worlds are small: they are fast, and most bugs need little.
        sizes = (1,) if plan_rng.random() < 0.7 else (1, 1, 2)  # noqa: PLR2004
        count = plan_rng.choice(sizes)
        user_counts = (2,) if self._is_often_down else sizes
        connections = (0, 4) if self._is_often_down else (0, 0, 0, 4)
        # Edits are sent at the same time by two processes.
        processes = (2,) if self.faults.focuses_on("resend") else (1, 1, 1, 2)
        for number in range(count):
            users = [f"u{number}{letter}" for letter in "ab"[: plan_rng.choice(user_counts)]]
            self.devices.append(
                Device(
                    self,
                    f"d{number}",
                    users,
                    directory=self._directory / f"d{number}",
                    template=templates.device,
                    processes=plan_rng.choice(processes),
                    connections=plan_rng.choice(connections),
                    rng=stream(),
                )
            )

    # -- used by the parts ------------------------------------------------------------------------

    def now(self) -> datetime:
        """Return the true time, which the servers have."""
        at = self.seconds()
        if at != self._now_at:  # called many times per step
            self._now_at, self._now = at, _START + timedelta(seconds=at)
        return self._now

    def seconds(self) -> float:
        """Return the seconds since the start, with skipped days."""
        return self.loop.time() + self._skipped_seconds

    def unix_time(self) -> float:
        """Return the true time as Unix time."""
        return self.now().timestamp()

    def has_happened(self, action: PlannedAction) -> bool:
        """Return whether the server's database has the effect of an action."""
        found = self._reader.execute("SELECT 1 FROM effects WHERE action_id = ?", (action.id,))
        return found.fetchone() is not None

    def disk_latency(self) -> float:
        """Return the seconds that a piece of work on the server's database takes."""
        if self.loop.time() >= self._fast_disk_until and self.faults.happens("slow disk", 0.002):
            return self.faults.between(1.0, 15.0)
        return 0.0005 + 0.002 * self._disk_rng.random()

    def cut_commit(self) -> bool | None:
        """Return whether the next commit is applied, if its connection is lost; None if not."""
        if not self.faults.happens("commit cut"):
            return None
        is_applied = self.faults.between(0.0, 1.0) < _APPLIED_SHARE
        how = "applied" if is_applied else "not applied"
        self.note("database", f"a connection is lost in COMMIT, which is {how}")
        return is_applied

    def note_unknown_commit(self) -> None:
        """Count a commit whose outcome the server does not know."""
        self.unknown_commits += 1

    def notification_delay(self) -> float | None:
        """Return the seconds that a notification takes; None if it is lost."""
        return None if self.faults.happens("notification lost") else 0.001

    def note_written(self, tenant: str, note: int) -> None:
        """Let another client of the user change the note, in some worlds."""
        if self._is_contested and self.faults.happens("foreign edit", 0.4):
            seconds = self.faults.between(0.0, self._rng.choice((0.1, 5.0, 60.0)))
            self._later(seconds, partial(self.users.edit_elsewhere, tenant, note))
            if self.faults.happens("network cut", 0.4):  # the user makes several edits meanwhile
                device = next(device for device in self.devices if tenant in device.users)
                self._later(
                    0.2, partial(self._disconnect, device, self.faults.between(50.0, 300.0))
                )

    def stalls_worker(self) -> bool:
        """Decide whether to pause a worker that has claimed a job: once, and if there are two."""
        workers = sum(server.runs_jobs for server in self.servers)
        return workers > 1 and self.stall is None and self.faults.happens(STALL, _STALL_RATE)

    def note(self, source: str, event: str) -> None:
        """Append an event to the timeline."""
        self.timeline.append((self.loop.time(), source, event))

    def _on_error(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "step" in context and isinstance(error, Exception):
            self.errors.append(f"{type(error).__name__}: {error}")

    # -- the run ---------------------------------------------------------------------------------

    def run(self, seed: int) -> Outcome:
        """Inject faults, drain, check."""
        self.users.schedule(self._planned)
        for client in self._clients:
            client.schedule()
        if self.faults.focuses_on("cancel", "edit_payload", "park", "retry", "warn_of_expiry"):
            # These need entries that were never sent.
            for device in self.devices:
                self._disconnect(device, 150.0)
        if self._returns:
            self._edit_offline()
        self._schedule_disasters()
        self._repeat(5.0, 60.0, self._inject_external_faults)
        self._repeat(100.0, 250.0, self._review_failures)
        self.loop.run_until(_MAX_FAULT_SECONDS, self._is_played)
        self.loop.run_until(self.loop.time() + self.faults.between(1.0, 60.0), _never)
        self._stop_faults()
        if self._has_refusals():
            self._wait_without_people()
        self._attests = True
        deadline = self.loop.time() + _DRAIN_SECONDS
        poll_seconds = _POLL_SECONDS
        while self.loop.time() < deadline:
            self.loop.run_until(self.loop.time() + poll_seconds, _never)
            if self._is_finished():
                break
            poll_seconds = min(2 * poll_seconds, _MAX_POLL_SECONDS)
        history = self._history()
        return self._outcome(seed, history)

    def _edit_offline(self) -> None:
        """Let users edit without a network, and set an edit aside before there is one again."""
        begin, end = _OFFLINE_EDITS
        for device in self.devices:
            self._later(begin, partial(self._disconnect, device, end - begin))
        self._later(end - 1.0, self.users.set_edits_aside)

    def _schedule_disasters(self) -> None:
        if self._long_sleep is not None:
            self._later(self._long_sleep.at, self._skip_days)
        if self._restore is not None:
            self._later(self._restore.backup_at, self._back_up)
        if self._absence is not None:
            self._later(self._absence.at, self._lose_standby)
        if self._is_silence_due:
            self._silence_server()

    def _is_played(self) -> bool:
        """Return whether everything that was planned has happened."""
        is_restored = self._restore is None or self._is_restore_over
        are_done = self.users.are_done and all(client.is_done for client in self._clients)
        return are_done and is_restored and self._absence is None and not self._is_silence_due

    def _has_refusals(self) -> bool:
        return any(
            "refuse" in action.payload or "unattested" in action.payload
            for action in self.actions.values()
            if action.kind == "step" and action.acknowledged and not action.is_direct
        )

    def _wait_without_people(self) -> None:
        """Drain while no person decides about refused entries: the others must be sent."""
        self._are_people_away = True
        for seconds in _WAKE_UPS:
            for device in self.devices:
                for app in device.apps:
                    app.notify()
            self.loop.run_until(self.loop.time() + seconds, _never)
        for device in self.devices:
            self._delays += device.delays(sum(_WAKE_UPS))
        self._are_people_away = False

    def _review_failures(self) -> None:
        if not self._are_people_away:
            self.users.review_failures()

    def refuses_attestation(self, payload: dict[str, Any]) -> bool:
        """Return whether the server refuses the attestation of an action now."""
        is_refused = ("unattested" in payload and not self._attests) or (
            self.faults.happens("attestation refused")
        )
        if is_refused:
            self.actions[payload["action_id"]].first_try = False  # others may go first
        return is_refused

    def _repeat(self, low: float, high: float, step: Callable[[], None]) -> None:
        """Call ``step`` at random intervals."""

        def again() -> None:
            step()
            self._later(low + (high - low) * self._rng.random(), again)

        self._later(low * self._rng.random(), again)

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        self.loop.call_later(seconds, step, context=NO_PROCESS.copy())

    def _inject_external_faults(self) -> None:
        """Inject faults that do not need a fault point."""
        if self.network.is_server_silent:  # silence and nothing else
            return
        faults = self.faults
        device = self._rng.choice(self.devices)
        if faults.happens("network cut"):
            self._disconnect(device, faults.between(5.0, 400.0))
        self._inject_outages(device)
        if faults.happens("disk full"):
            self.note(device.name, "disk full")
            device.disk.is_full = True
            self._later(faults.between(5.0, 60.0), lambda: _free_disk(device))
        if faults.happens("clock jump") and self._long_sleep is None:
            # Not with skipped days: a device that has never received a response and is off for days
            # has only its clock to determine how long a key has been in use.
            self.users.set_clock()
        if faults.happens("pause"):
            process = self._rng.choice([*self.servers]).process
            self.note(process.name, "pause")
            process.pause(faults.between(5.0, 150.0))
        if not faults.is_stopped:
            self._let_users_act(self._rng.random())

    def _inject_outages(self, device: Device) -> None:
        """Let the server, an endpoint or the network of a device fail for a while."""
        faults, network, is_often_down = self.faults, self.network, self._is_often_down
        retry_after = self._rng.choice((None, 5, 60, 120 if is_often_down else 60))
        if faults.happens("outage", _DOWN_RATE if is_often_down else None):
            refusal = outage_response(self._rng.choice((503, 503, 502, 504)), retry_after)
            self._put("", refusal, faults.between(5.0, 60.0 if is_often_down else 600.0))
        # What was sent, did not happen and is cancelled leaves a gap in its sequence.
        has_gaps = faults.focuses_on("renumber")
        if faults.happens("endpoint limited", _DOWN_RATE if is_often_down or has_gaps else None):
            path = self._rng.choice(("/notes", "/steps", "/moves", BATCH_PATH))
            path = "/moves" if has_gaps else path
            self._put(path, outage_response(429, retry_after), faults.between(5.0, 300.0))
        if faults.happens("batch refused"):
            status = self._rng.choice((400, 404, 405, 413, 500))
            self._put(BATCH_PATH, outage_response(status, None), faults.between(5.0, 300.0))
        if faults.happens("connection silent"):
            self.note(device.name, "the connection is silent")
            network.silent.add(device.name)
            self._later(faults.between(10.0, 200.0), lambda: network.silent.discard(device.name))
        if faults.happens("captive portal"):
            self.note(device.name, "behind a captive portal")
            network.portals[device.name] = self._rng.choice(PORTALS)
            self._later(faults.between(5.0, 300.0), lambda: _remove(network.portals, device.name))

    def _silence_server(self) -> None:
        """Begin the silence after the first response: before it, each retry asks for the time."""
        if not any(device.observer.has_response for device in self.devices):
            if self.users.are_done or self.faults.is_stopped:
                self._is_silence_due = False
            else:
                self._later(_SILENCE_POLL_SECONDS, self._silence_server)
            return
        if not self.faults.record(SILENCE):
            self._is_silence_due = False
            return
        seconds = self.faults.between(*_SILENCE_SECONDS)
        self.note("net", f"the server is silent for {seconds:.0f} s")
        self.network.is_server_silent = True
        self._later(seconds, self._end_silence)

    def _end_silence(self) -> None:
        self.network.is_server_silent = self._is_silence_due = False

    def _put(self, path: str, refusal: Response, seconds: float) -> None:
        self.note("net", f"{refusal.status} to all of {path}/ for {seconds:.0f} s")
        self.network.outages[path] = refusal
        self._later(seconds, lambda: _remove(self.network.outages, path))

    def _skip_days(self) -> None:
        """Skip days at once; some devices are off meanwhile."""
        long_sleep = self._long_sleep
        if long_sleep is None or self.faults.is_stopped or not self.faults.record(LONG_SLEEP):
            return
        self.note("world", f"{long_sleep.days:g} days are skipped")
        are_keys_forgotten = self.users.skip_days(long_sleep.days)
        self.network.drop_in_flight(keys_forgotten=are_keys_forgotten)
        for client in self._clients if are_keys_forgotten else ():
            client.expire()
        for device in self.devices:
            device.expire_leases()
            if long_sleep.is_off:
                device.cut_power()
        for server in self.servers:
            server.process.pauses += 1
            if server.process.is_paused or self.network.is_serving(server.process):
                # It would continue requests from before the skipped days, whose records may have
                # expired since. No request takes days.
                server.process.kill()
        self._skipped_seconds += long_sleep.days * 86_400.0
        if long_sleep.days == _ALMOST_STALE_DAYS:
            self.users.maintain_all()

    def _back_up(self) -> None:
        restore = self._restore
        if restore is not None and not self.faults.is_stopped:
            self.note("world", "a backup is made")
            backup = self.database.back_up()
            self._later(restore.after_seconds, lambda: self._restore_backup(backup))

    def _restore_backup(self, backup: Contents) -> None:
        """Lose what was committed since the backup, while the server goes on.

        Waits until there is something to lose, if it does not take too long.
        """
        effects = self._reader.execute("SELECT count(*) FROM effects").fetchone()[0]
        has_news = effects > len(backup["effects"])
        if not has_news and not self.faults.is_stopped and self.loop.time() < _MAX_RESTORE_SECONDS:
            self._later(self.faults.between(1.0, 30.0), partial(self._restore_backup, backup))
            return
        if self.faults.is_stopped or not self.faults.record(RESTORE):
            self._is_restore_over = True
            return
        for server in self.servers:
            if server.runs_jobs and server.process.alive:
                server.process.kill()
        self._replace_database(backup)

    def _replace_database(self, backup: Contents) -> None:
        before = {action for _, _, action in backup["effects"]}
        rows = self._reader.execute("SELECT action_id FROM effects").fetchall()
        if not self.database.restore(backup, f"{self._rng.getrandbits(64):x}"):
            self._later(_LOCK_SECONDS, lambda: self._replace_database(backup))
            return
        lost = {action for (action,) in rows} - before
        self.note("world", f"the backup is restored: {len(lost)} effects are lost")
        # While the database does not respond, caches count.
        self._fast_disk_until = self.loop.time() + _MAX_FAULT_SECONDS
        self.network.database_restored()
        for action in self.users.lose(lost):
            if action.key is not None and not action.rekeyed:
                for seconds in (SETTLED_SECONDS / 3, SETTLED_SECONDS + 1.0):
                    self._later(seconds, partial(self.network.resend, action.user, action.key))
        self._later(SETTLED_SECONDS, self.users.forget_keys)
        self._later(SETTLED_SECONDS + 2.0, self._end_restore)

    def _end_restore(self) -> None:
        self._is_restore_over = True

    def _lose_standby(self) -> None:
        """Let the standby get nothing for a while."""
        absence, standby = self._absence, self.standby
        if absence is None or standby is None or self.faults.is_stopped:
            return
        if not self.faults.record(STANDBY_AWAY):
            self._absence = None
            return
        self.note("database", "the standby is away")
        standby.leave()
        next_step = self._promote if absence.is_promoted else self._end_absence
        self._later(absence.seconds, next_step)

    def _promote(self) -> None:
        """Replace the primary by the standby, which has everything that was acknowledged."""
        standby = self.standby
        if standby is None or self.faults.is_stopped:
            return
        for server in self.servers:
            if server.runs_jobs and server.process.alive:
                server.process.kill()
        lost = standby.promote(f"{self._rng.getrandbits(64):x}")
        if lost is None:  # a transaction is open
            self._later(_LOCK_SECONDS, self._promote)
            return
        self.note("database", f"the standby is promoted: {len(lost)} effects are lost")
        self._end_absence()

    def _end_absence(self) -> None:
        self._absence = None
        if self.standby is not None:
            self.standby.come_back()

    def _disconnect(self, device: Device, seconds: float) -> None:
        self.note(device.name, f"no network for {seconds:.0f} s")
        self.network.offline.add(device.name)
        self._later(seconds, partial(self._reconnect, device))

    def _reconnect(self, device: Device) -> None:
        self.network.offline.discard(device.name)
        if self._rng.random() < _REPORTED_SHARE:
            device.online()

    def _let_users_act(self, draw: float) -> None:
        users = self.users
        if self.faults.focuses_on("renumber"):
            users.change_queue()
        if self.faults.focuses_on("retry", "retry_all", "discard", "discard_all", "resolve"):
            users.review_failures()
        for act, share in (
            (users.change_queue, 0.3),
            (users.reuse_key_for_other_payload, 0.45),
            (users.reuse_key_of_other_tenant, 0.6),
            (users.send_stale_action, 0.65),
        ):
            if draw < share:
                act()
                return

    def _stop_faults(self) -> None:
        """End all faults."""
        self.faults.is_stopped = True
        self.note("world", "the faults stop")
        self.network.offline.clear()
        self.network.silent.clear()
        self.network.is_server_silent = False
        self.network.portals.clear()
        self.network.outages.clear()
        self._end_absence()
        for device in self.devices:
            device.disk.is_full = False
        for server in self.servers:
            server.process.resume()
        for device in self.devices:
            for app in device.apps:
                app.process.resume()
            device.online()

    def _is_finished(self) -> bool:
        waits = self._reader.execute("SELECT 1 FROM onceward_jobs LIMIT 1").fetchone()
        has_items = any(client.unfinished() for client in self._clients)
        is_drained = not any(device.unfinished_count() for device in self.devices)
        return waits is None and not has_items and is_drained

    def _unfinished(self) -> list[str]:
        """Return the entries and jobs that have not drained, one line each."""
        found = [
            f"{count} entries on {device.name} are not finished"
            for device in self.devices
            if (count := device.unfinished_count())
        ]
        found += [line for client in self._clients for line in client.unfinished()]
        jobs = self._reader.execute("SELECT count(*) FROM onceward_jobs").fetchone()[0]
        return [*found, f"{jobs} jobs are waiting"] if jobs else found

    def _history(self) -> History:
        rows = self._reader.execute
        effects = [
            Effect(number=number, tenant=tenant, action=action)
            for number, tenant, action in rows("SELECT number, tenant, action_id FROM effects")
        ]
        return History(
            actions=[action.to_history() for action in self.actions.values()],
            effects=effects,
            entries=[entry for device in self.devices for entry in device.entry_states()],
            responses=self.network.responses,
            unrecorded=self.network.records.differences,
            left_behind=self.network.records.left_behind,
            jobs=self._jobs(),
            job_effects=[
                JobEffect(
                    number=number,
                    tenant=tenant,
                    job_id=job_id,
                    attempt=attempt,
                    order=line,
                    position=position,
                    is_stale=bool(is_stale),
                    is_of_paused_queue=self._was_paused(claimed_at),
                )
                for number, tenant, job_id, attempt, line, position, is_stale, claimed_at in rows(
                    "SELECT number, tenant, job_id, attempt, line, position, is_stale, claimed_at"
                    " FROM job_effects"
                )
            ],
            cancelled_jobs=[] if self._operators is None else self._operators.cancelled,
            follow_ups=self._follow_ups(),
            moves=[
                Move(stream=f"{tenant} {client}", sequence=sequence, action=action, number=number)
                for number, tenant, client, sequence, action in rows("SELECT * FROM moves")
            ],
            used_numbers={
                f"{tenant} {client}": last
                for tenant, client, last in rows(
                    "SELECT tenant, client_id, last_number FROM onceward_sequences"
                )
            },
            **self._versions(),
            exhausted=self._observed("exhausted"),
            delays=self._delays,
            contacts=self._observed("contacts"),
            idle=self._observed("idle"),
            changed_retries=self._observed("changed_retries"),
            sent_after_refusal=self._observed("sent_after_refusal"),
            unfinished=self._unfinished(),
            errors=self.errors,
        )

    def _was_paused(self, claimed_at: int | None) -> bool:
        """Return whether a job was claimed, at this time in milliseconds, in a paused queue."""
        if self._operators is None or claimed_at is None:
            return False
        return self._operators.started_while_paused(claimed_at / 1000.0)

    def _observed(self, name: str) -> list[Any]:
        return [one for device in self.devices for one in getattr(device.observer, name)]

    def _versions(self) -> dict[str, Any]:
        rows = self._reader.execute("SELECT note, version, action_id, is_checked FROM note_writes")
        return {
            "writes": [
                Write(
                    entity=str(note),
                    version=version,
                    action=action,
                    is_foreign=action.startswith("foreign"),
                    is_checked=bool(is_checked),
                )
                for note, version, action, is_checked in rows
            ],
            "seen": self._observed("seen"),
            "conflicts": self._observed("conflicts"),
            "are_versions_lost": self.users.are_versions_lost,
        }

    def _jobs(self) -> list[JobState]:
        found: dict[tuple[str, str], dict[str, Any]] = {}
        rows = self._reader.execute(
            "SELECT tenant, id, type, resource_id, 'is_waiting', 1 FROM onceward_jobs"
            " UNION ALL SELECT tenant, job_id, type, resource_id, 'marker', attempts"
            " FROM onceward_job_completions"
            " UNION ALL SELECT tenant, job_id, type, resource_id, 'is_dead', 1"
            " FROM onceward_dead_letters WHERE requeued_at IS NULL"
        )
        for tenant, job_id, job_type, action, what, value in rows:
            facts = found.setdefault((tenant, job_id), {"writes": job_type == "follow"})
            facts["action"] = action
            facts[what] = value if what == "marker" else True
        return [JobState(tenant=t, job_id=j, **facts) for (t, j), facts in found.items()]

    def _follow_ups(self) -> list[FollowUp]:
        """Compare the counts of the jobs with the rows, except for dead-lettered jobs."""
        rows = self._reader.execute(
            "SELECT tenant, count(*), (SELECT seen FROM counts WHERE tenant = effects.tenant)"
            " FROM effects WHERE tenant NOT IN (SELECT tenant FROM onceward_dead_letters"
            " WHERE type = 'count') GROUP BY tenant"
        )
        return [
            FollowUp(tenant=tenant, name="count", wanted=wanted, seen=seen)
            for tenant, wanted, seen in rows
        ]

    def _outcome(self, seed: int, history: History) -> Outcome:
        text = "\n".join(f"{at:.6f} {source} {event}" for at, source, event in self.timeline)
        return Outcome(
            seed=seed,
            violations=check(history),
            actions=len(history.actions),
            requests=self.network.requests,
            effects=len(history.effects),
            jobs=len(history.jobs),
            faults=dict(self.faults.by_kind),
            points=dict(self.faults.reached),
            struck=dict(self.faults.struck),
            fault_count=self.faults.number,
            virtual_seconds=self.loop.time(),
            timeline=self.timeline,
            fingerprint=sha256(text.encode()).hexdigest(),
        )

    def close(self) -> None:
        """Kill all processes and remove the files."""
        self.faults.is_stopped = True
        for server in self.servers:
            server.process.after_kill.clear()
            server.process.kill()
        for device in self.devices:
            device.shut_down()
        if self._operators is not None:
            self._operators.process.kill()
        self.loop.run_until(self.loop.time(), _never)
        self.loop.clear()
        self._log_handler.remove()
        shutil.rmtree(self._directory, ignore_errors=True)


class LongSleep(NamedTuple):
    """When days are skipped, and how many."""

    at: float
    days: float
    # The devices are off, and cannot measure for how long.
    is_off: bool

    @classmethod
    def maybe(cls, rng: Random) -> "LongSleep | None":
        """Decide whether days are skipped; in most seeds they are not."""
        if rng.random() > _LONG_SLEEP_SHARE:
            return None
        return cls(10.0 + 150.0 * rng.random(), rng.choice(_DAYS), rng.random() < 0.5)  # noqa: PLR2004


class Restore(NamedTuple):
    """When a backup is made, and after how many seconds it is restored."""

    backup_at: float
    after_seconds: float

    @classmethod
    def maybe(cls, rng: Random, times: list[float]) -> "Restore | None":
        """Decide whether the database is restored, and lose what follows one of these times."""
        if rng.random() > _RESTORE_SHARE:
            return None
        return cls(max(1.0, rng.choice(times) - 5.0 * rng.random()), 5.0 + 60.0 * rng.random())


class Absence(NamedTuple):
    """When the standby is away, for how long, and whether it replaces the primary then."""

    at: float
    seconds: float
    is_promoted: bool

    @classmethod
    def maybe(cls, rng: Random, times: list[float]) -> "Absence | None":
        """Decide whether there is a standby that is away, at one of these times."""
        if rng.random() > _STANDBY_SHARE:
            return None
        at = max(0.5, rng.choice(times) - 3.0 * rng.random())
        return cls(at, 5.0 + 40.0 * rng.random(), rng.random() < _PROMOTED_SHARE)


class _ErrorLogHandler(logging.Handler):
    """Records errors that Onceward logs instead of raising them."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world
        loggers = [logging.getLogger(name) for name in ("onceward", "onceward_outbox")]
        self._were = [(each, each.level, each.propagate) for each in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)
            logger.propagate = False
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT_PROCESS.get()
        if process is not None and not process.alive:  # from a ``finally`` of a dead process
            return
        if hasattr(record, "reason"):  # a failed attempt at a job: the checker looks at the jobs
            return
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if isinstance(error, InjectedError | InjectedCutError):
                return
            self._world.errors.append(f"{record.getMessage()}: {type(error).__name__}: {error}")

    def remove(self) -> None:
        for logger, level, propagate in self._were:
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate


def _never() -> bool:
    return False


def _remove(table: dict[str, Any], name: str) -> None:
    table.pop(name, None)


def _free_disk(device: Device) -> None:
    device.disk.is_full = False
