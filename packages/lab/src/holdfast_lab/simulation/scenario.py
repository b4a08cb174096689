"""One seed: a world is set up, tortured, left alone to drain, and written down as a history."""

import logging
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.jobs.engines import relay
from holdfast_lab.checker import Violation, check
from holdfast_lab.history import Effect, FollowUp, History, JobEffect, JobState
from holdfast_lab.simulation.broker import SteppedBroker
from holdfast_lab.simulation.determinism import possessed
from holdfast_lab.simulation.device import Device
from holdfast_lab.simulation.faults import LONG_SLEEP, Faults, Mask
from holdfast_lab.simulation.loop import OUTSIDE, PROCESS, VirtualLoop
from holdfast_lab.simulation.network import Network
from holdfast_lab.simulation.person import People
from holdfast_lab.simulation.server import Server
from holdfast_lab.simulation.templates import Templates
from holdfast_lab.simulation.user_actions import Leaning, Planned, plan_taps

if TYPE_CHECKING:
    from holdfast_lab.simulation.store import SteppedConnection, SteppedNotifier

__all__ = ["Outcome", "run_seed"]

_BEGINNING: Final = datetime(2030, 1, 1, tzinfo=UTC)
_MOST_TORTURE_SECONDS: Final = 3600.0
_DRAIN_SECONDS: Final = 21_600.0
_LOOK_SECONDS: Final = 15.0
_SELDOM_SECONDS: Final = 300.0
_NIGHT_SHARE: Final = 0.12
_DAYS: Final = (2.0, 8.0, 20.0)
"""Within the lifetime of every key, past it, and far past it."""


class Outcome(msgspec.Struct, kw_only=True):
    """What one seed came to."""

    seed: int
    violations: list[Violation]
    taps: int
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
    """Torture one world, and decide."""
    chance = Random(f"holdfast simulate {seed}")  # noqa: S311 - replayed, not guessed
    with possessed(Random(chance.getrandbits(64))):  # noqa: S311
        world = World(chance, templates, mask or Mask())
        try:
            return world.live(seed)
        finally:
            world.end()


class World:
    """Everything of one seed."""

    def __init__(self, chance: Random, templates: Templates, mask: Mask) -> None:
        """Make up the world; nothing has happened yet."""

        def stream() -> Random:
            # One each, so that a fault left out changes as little else as possible.
            return Random(chance.getrandbits(64))  # noqa: S311

        self.loop = VirtualLoop()
        self.loop.on_error = self._on_error
        self._now_at, self._now = 0.0, _BEGINNING
        self._slept = 0.0
        self.faults = Faults(stream(), mask)
        self._disk_chance = stream()
        self._chance = stream()
        self.writers: list[SteppedConnection] = []
        self.notifiers: list[SteppedNotifier] = []
        self.mishaps: list[str] = []
        self.answers = 0
        self.timeline: list[tuple[float, str, str]] = []
        self._directory = templates.new_directory()
        self.database = templates.server
        self.database.begin_world(self.unix_time)
        self._rows = self.database.rows
        self.network = Network(self, stream())
        broker_chance, plan, hands = stream(), stream(), stream()
        with_broker = plan.random() < 0.2 or self.faults.favours(*relay.FAULT_POINTS)  # noqa: PLR2004
        self.broker = SteppedBroker(self.loop, self.faults, broker_chance) if with_broker else None
        self._listener = _Listener(self)
        self.servers = self._make_servers(plan)
        self.serving = [server for server in self.servers if server.serves]
        self._make_devices(plan, stream, templates)
        self.people = People(self, self.devices, hands)
        planned = plan_taps(plan, {d.name: d.users for d in self.devices}, self._leaning())
        self.taps: dict[str, Planned] = {tap.id: tap for tap in planned}
        self._planned = planned
        self._night = Night.maybe(stream())

    def _leaning(self) -> Leaning:
        favours = self.faults.favours
        if favours("expire"):  # taken for too old: the clocks are wrong from the beginning
            for device in self.devices:
                device.clock_off, device.was_set = timedelta(days=-20), True
        return Leaning(
            refusals=favours("fail", "discard"),
            conflicts=favours("conflict", "resolve"),
            by_hand=favours("resolve"),
            walks=favours("expire"),
        )

    def _make_servers(self, plan: Random) -> list[Server]:
        match plan.choice(("one", "one", "two", "apart")):
            case "one":
                shape = [("server", True, True)]
            case "two":
                shape = [("server-1", True, True), ("server-2", True, True)]
            case _:
                shape = [("server", True, False), ("worker-1", False, True)]
                if plan.random() < 0.5:  # noqa: PLR2004
                    shape.append(("worker-2", False, True))
        return [Server(self, name, serves=serves, works=works) for name, serves, works in shape]

    def _make_devices(
        self, plan: Random, stream: Callable[[], Random], templates: Templates
    ) -> None:
        self.devices: list[Device] = []
        # Most of the worlds are small: most bugs need little, and little is quick.
        sizes = (1,) if plan.random() < 0.7 else (1, 1, 2)  # noqa: PLR2004
        count = plan.choice(sizes)
        for number in range(count):
            users = [f"u{number}{letter}" for letter in "ab"[: plan.choice(sizes)]]
            self.devices.append(
                Device(
                    self,
                    f"d{number}",
                    users,
                    directory=self._directory / f"d{number}",
                    template=templates.device,
                    processes=plan.choice((1, 1, 1, 2)),
                    chance=stream(),
                )
            )

    # -- what the parts ask -----------------------------------------------------------------------

    def now(self) -> datetime:
        """Return the true time, which is the server's."""
        at = self.seconds()
        if at != self._now_at:  # asked many times within one instant
            self._now_at, self._now = at, _BEGINNING + timedelta(seconds=at)
        return self._now

    def seconds(self) -> float:
        """Return how much time has passed since the beginning, nights included."""
        return self.loop.time() + self._slept

    def unix_time(self) -> float:
        """Return the same in seconds."""
        return self.now().timestamp()

    def has_happened(self, tap: Planned) -> bool:
        """Say whether a tap has had its effect, as somebody sees who looks at the server."""
        found = self._rows.execute("SELECT 1 FROM effects WHERE tap = ?", (tap.id,))
        return found.fetchone() is not None

    def disk_seconds(self) -> float:
        """Say how long a piece of work on the server's database takes."""
        if self.faults.happens("slow disk", 0.002):
            return self.faults.between(1.0, 15.0)
        return 0.0005 + 0.002 * self._disk_chance.random()

    def ring_seconds(self) -> float | None:
        """Say how long a ring takes."""
        return None if self.faults.happens("ring lost") else 0.001

    def note(self, who: str, what: str) -> None:
        """Write a line of the timeline."""
        self.timeline.append((self.loop.time(), who, what))

    def _on_error(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "step" in context and isinstance(error, Exception):
            self.mishaps.append(f"{type(error).__name__}: {error}")

    # -- life -------------------------------------------------------------------------------------

    def live(self, seed: int) -> Outcome:
        """Torture, drain, decide."""
        self.people.begin(self._planned)
        if self.faults.favours("cancel", "edit_payload", "park", "retry"):
            # What was never sent can be changed: let there be some of that.
            for device in self.devices:
                self._cut_off(device, 150.0)
        if self._night is not None:
            self._later(self._night.at, self._sleep)
        self._every(5.0, 60.0, self._make_trouble)
        self._every(100.0, 250.0, self.people.tend)
        self.loop.run_until(_MOST_TORTURE_SECONDS, lambda: self.people.have_tapped)
        self.loop.run_until(self.loop.time() + self.faults.between(1.0, 60.0), _never)
        self._calm_down()
        deadline = self.loop.time() + _DRAIN_SECONDS
        look = _LOOK_SECONDS
        while self.loop.time() < deadline:
            self.loop.run_until(self.loop.time() + look, _never)
            if self._is_settled():
                break
            look = min(2 * look, _SELDOM_SECONDS)
        history = self._history()
        return self._outcome(seed, history)

    def _every(self, least: float, most: float, step: Callable[[], None]) -> None:
        """Do something now and then."""

        def again() -> None:
            step()
            self._later(least + (most - least) * self._chance.random(), again)

        self._later(least * self._chance.random(), again)

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        self.loop.call_later(seconds, step, context=OUTSIDE.copy())

    def _make_trouble(self) -> None:
        """Bring what comes from outside: nobody has to reach a fault point for it."""
        faults = self.faults
        device = self._chance.choice(self.devices)
        if faults.happens("network cut"):
            self._cut_off(device, faults.between(5.0, 400.0))
        if faults.happens("disk full"):
            self.note(device.name, "disk full")
            device.disk.is_full = True
            self._later(faults.between(5.0, 60.0), lambda: _make_room(device))
        if faults.happens("clock jump") and self._night is None:
            # Not with days in between: a device that has never heard from a server, and is then off
            # for days, has nothing but its clock to know how long a key has been in use.
            self.people.set_clock()
        if faults.happens("pause"):
            process = self._chance.choice([*self.servers]).process
            self.note(process.name, "pause")
            process.pause(faults.between(5.0, 150.0))
        if not faults.is_calm:
            self._let_people_act(self._chance.random())

    def _sleep(self) -> None:
        """Let days go by at once; some devices are switched off meanwhile."""
        night = self._night
        if night is None or self.faults.is_calm or not self.faults.let(LONG_SLEEP):
            return
        self.note("world", f"{night.days:g} days go by")
        self.network.forget(keys=self.people.sleep(night.days))
        for device in self.devices:
            device.oversleep()
            if night.is_off:
                device.cut_power()
        for server in self.servers:
            server.process.pauses += 1
            if server.process.is_paused:
                # It would do after days what was asked of it before them.
                server.process.kill()
        self._slept += night.days * 86_400.0

    def _cut_off(self, device: Device, seconds: float) -> None:
        self.note(device.name, f"no network for {seconds:.0f} s")
        self.network.cut_off.add(device.name)
        self._later(seconds, lambda: self.network.cut_off.discard(device.name))

    def _let_people_act(self, dice: float) -> None:
        people = self.people
        if self.faults.favours("retry", "discard", "resolve"):
            people.tend()
        for act, share in (
            (people.change_mind, 0.3),
            (people.forge, 0.45),
            (people.borrow, 0.6),
            (people.act_late, 0.65),
        ):
            if dice < share:
                act()
                return

    def _calm_down(self) -> None:
        """Let nothing go wrong any more."""
        self.faults.is_calm = True
        self.note("world", "the faults stop")
        self.network.cut_off.clear()
        for device in self.devices:
            device.disk.is_full = False
        for server in self.servers:
            server.process.resume()
        for device in self.devices:
            for life in device.lives:
                life.process.resume()

    def _is_settled(self) -> bool:
        waits = self._rows.execute("SELECT 1 FROM jobs LIMIT 1").fetchone()
        return waits is None and not any(device.unsettled() for device in self.devices)

    def _unsettled(self) -> list[str]:
        """Say what has not ended."""
        found = [
            f"{count} entries on {device.name} are not settled"
            for device in self.devices
            if (count := device.unsettled())
        ]
        jobs = self._rows.execute("SELECT count(*) FROM jobs").fetchone()[0]
        return [*found, f"{jobs} jobs wait"] if jobs else found

    def _history(self) -> History:
        rows = self._rows.execute
        effects = [
            Effect(number=number, tenant=tenant, action=tap)
            for number, tenant, tap in rows("SELECT number, tenant, tap FROM effects")
        ]
        return History(
            actions=[tap.fact() for tap in self.taps.values()],
            effects=effects,
            entries=[entry for device in self.devices for entry in device.entry_states()],
            responses=self.network.answers,
            jobs=self._jobs(),
            job_effects=[
                JobEffect(
                    number=number,
                    tenant=tenant,
                    job_id=job_id,
                    attempt=attempt,
                    order=line,
                    position=position,
                )
                for number, tenant, job_id, attempt, line, position in rows(
                    "SELECT number, tenant, job_id, attempt, line, position FROM job_effects"
                )
            ],
            follow_ups=self._follow_ups(),
            unfinished=self._unsettled(),
            errors=self.mishaps,
        )

    def _jobs(self) -> list[JobState]:
        found: dict[tuple[str, str], dict[str, Any]] = {}
        rows = self._rows.execute(
            "SELECT tenant, id, type, resource_id, 'is_waiting', 1 FROM jobs"
            " UNION ALL SELECT tenant, job_id, type, resource_id, 'marker', attempts"
            " FROM job_completions"
            " UNION ALL SELECT tenant, job_id, type, resource_id, 'is_dead', 1"
            " FROM dead_letters WHERE requeued_at IS NULL"
        )
        for tenant, job_id, job_type, tap, what, value in rows:
            facts = found.setdefault((tenant, job_id), {"writes": job_type == "follow"})
            facts["action"] = tap
            facts[what] = value if what == "marker" else True
        return [JobState(tenant=t, job_id=j, **facts) for (t, j), facts in found.items()]

    def _follow_ups(self) -> list[FollowUp]:
        """Compare what the counting jobs saw with what there is; not where one has died."""
        rows = self._rows.execute(
            "SELECT tenant, count(*), (SELECT seen FROM counts WHERE tenant = effects.tenant)"
            " FROM effects WHERE tenant NOT IN (SELECT tenant FROM dead_letters"
            " WHERE type = 'count') GROUP BY tenant"
        )
        return [
            FollowUp(tenant=tenant, name="count", wanted=wanted, seen=seen)
            for tenant, wanted, seen in rows
        ]

    def _outcome(self, seed: int, history: History) -> Outcome:
        text = "\n".join(f"{at:.6f} {who} {what}" for at, who, what in self.timeline)
        return Outcome(
            seed=seed,
            violations=check(history),
            taps=len(history.actions),
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

    def end(self) -> None:
        """Leave nothing behind."""
        self.faults.is_calm = True
        for server in self.servers:
            server.process.after_death.clear()
            server.process.kill()
        for device in self.devices:
            device.switch_off()
        self.loop.run_until(self.loop.time(), _never)
        self.loop.abandon()
        self._listener.remove()
        shutil.rmtree(self._directory, ignore_errors=True)


class Night(NamedTuple):
    """When days go by, and how many."""

    at: float
    days: float
    # The devices are off, and do not know for how long.
    is_off: bool

    @classmethod
    def maybe(cls, chance: Random) -> "Night | None":
        """Decide whether a world has one: most have none."""
        if chance.random() > _NIGHT_SHARE:
            return None
        return cls(10.0 + 150.0 * chance.random(), chance.choice(_DAYS), chance.random() < 0.5)  # noqa: PLR2004


class _Listener(logging.Handler):
    """Hears errors that the product logs instead of raising them."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world
        self._logger = logging.getLogger("holdfast")
        self._was = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.ERROR)
        self._logger.propagate = False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        if process is not None and not process.alive:  # its last words
            return
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            self._world.mishaps.append(f"{record.getMessage()}: {type(error).__name__}: {error}")

    def remove(self) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._was[0])
        self._logger.propagate = self._was[1]


def _never() -> bool:
    return False


def _make_room(device: Device) -> None:
    device.disk.is_full = False
