"""What goes wrong, and when: decided by the seed alone, counted, and droppable one by one."""

from collections import Counter
from random import Random
from typing import Final

from holdfast.jobs import executor as attempt
from holdfast.jobs.engines import relay
from holdfast.outbox import drain
from holdfast.server import idempotency

__all__ = ["DEVICE_POINTS", "KINDS", "LONG_SLEEP", "POINTS", "SERVER_POINTS", "Faults", "Mask"]

_COMMITS: Final = (
    "add_user",
    "cancel",
    "discard",
    "edit_payload",
    "enqueue",
    "enqueue_many",
    "expire_stale",
    "learn_server_time",
    "map_local_id",
    "park",
    "prune",
    "purge_user",
    "renew",
    "resolve",
    "retry",
    "save_clock",
    "transaction",
    "watchdog",
)
_IN_A_GROUP: Final = ("claim", "conflict", "expire", "fail", "release", "schedule_retry", "succeed")
"""What the drain does only as a part of ``transaction``, whose commit is theirs."""

SERVER_POINTS: Final = (*idempotency.FAULT_POINTS, *attempt.FAULT_POINTS, *relay.FAULT_POINTS)
DEVICE_POINTS: Final = (
    *drain.FAULT_POINTS,
    *(f"{name}.before_commit" for name in (*_COMMITS, *_IN_A_GROUP)),
    *(f"{name}.after_commit" for name in _COMMITS),
)
POINTS: Final = (*SERVER_POINTS, *DEVICE_POINTS)
"""Every named instant at which something may die here. None may stay unvisited in a long run."""

_PAUSABLE: Final = frozenset((*SERVER_POINTS, *drain.FAULT_POINTS))
"""Elsewhere a lock is held that other threads of the same process would wait for, in real time."""

LONG_SLEEP: Final = "long sleep"
"""Days go by in which nobody does anything: keys are forgotten, actions become too old."""

_WEATHER: Final = (
    "request lost",
    "answer lost",
    "request doubled",
    "request late",
    "answer late",
    "network cut",
    "server error",
    "slow handler",
    "slow job",
    "slow disk",
    "ring lost",
    "job error",
    "crash",
    "power cut",
    "pause",
    "clock jump",
    "disk full",
    "signed out",
    "broker forgets",
    "message repeated",
    "message lost",
)
KINDS: Final = (*_WEATHER, LONG_SLEEP)

_MOST_CRASHES: Final = 3
_MOST_PAUSES: Final = 3
_FAVOURED_SHARE: Final = 0.25
_SELDOM_SHARE: Final = 0.7
_SELDOM: Final = frozenset(
    {
        "cancel",
        "conflict",
        "discard",
        "edit_payload",
        "expire",
        "fail",
        "map_local_id",
        "park",
        "prune",
        "purge_user",
        "release",
        "renew",
        "resolve",
        "retry",
    }
)
"""What a device does once in a while: a favourite of these is struck as soon as it is reached."""


class Mask:
    """Which of a seed's faults do not happen after all: for shrinking."""

    def __init__(
        self, *, only_first: int | None = None, without: frozenset[int] = frozenset()
    ) -> None:
        """Let everything happen, unless told otherwise."""
        self.only_first = only_first
        self.without = without

    def lets(self, number: int) -> bool:
        """Say whether the n-th fault happens."""
        return number not in self.without and (self.only_first is None or number <= self.only_first)


class Faults:
    """The weather of one seed."""

    def __init__(self, chance: Random, mask: Mask) -> None:
        """Make up a climate: some kinds of trouble are frequent, some seldom, some never."""
        self._chance = chance
        self._mask = mask
        self.is_calm = False
        self.number = 0
        self.by_kind: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.log: list[str] = []
        self._rates = {
            kind: chance.choice((0.0, 0.0, 0.02, 0.06, 0.2)) * (0.5 + chance.random())
            for kind in _WEATHER
        }
        self._crash_rate = chance.choice((0.0, 0.003, 0.01))
        self.favoured = frozenset(chance.sample(POINTS, 3))
        self._crashes = _MOST_CRASHES
        self._pauses = _MOST_PAUSES

    def favours(self, *operations: str) -> bool:
        """Say whether one of these operations of the device is to be struck often."""
        return any(point.partition(".")[0] in operations for point in self.favoured)

    def happens(self, kind: str, rate: float | None = None) -> bool:
        """Throw the dice for one possible fault."""
        if self.is_calm:
            return False
        if self._chance.random() >= (self._rates[kind] if rate is None else rate):
            return False
        return self.let(kind)

    def strike(self, point: str) -> str | None:
        """Say what happens at a fault point: ``crash``, ``power cut``, ``pause`` or nothing."""
        self.reached[point] += 1
        if self.is_calm:
            return None
        rate = self._crash_rate
        if point in self.favoured:
            rate = _SELDOM_SHARE if point.partition(".")[0] in _SELDOM else _FAVOURED_SHARE
        if self._chance.random() >= rate:
            return None
        dice = self._chance.random()
        if point in _PAUSABLE and dice < self._rates["pause"] * 4:
            if self._pauses and self.let("pause"):
                self._pauses -= 1
                self.struck[point] += 1
                return "pause"
            return None
        kind = "power cut" if point in DEVICE_POINTS and dice > 0.5 else "crash"  # noqa: PLR2004
        if self._crashes and self.let(kind):
            self._crashes -= 1
            self.struck[point] += 1
            return kind
        return None

    def between(self, least: float, most: float) -> float:
        """Say how long or how much, evenly."""
        return least + (most - least) * self._chance.random()

    def let(self, kind: str) -> bool:
        """Count a fault that was decided on; False if it is one of those left out."""
        self.number += 1
        if not self._mask.lets(self.number):
            return False
        self.by_kind[kind] += 1
        return True
