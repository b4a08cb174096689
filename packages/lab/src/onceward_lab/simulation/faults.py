"""Which faults occur and when: determined by the seed, counted, and omitted by a mask."""

from collections import Counter
from random import Random
from typing import Final

from onceward.guard import chunk as batch_chunk
from onceward.guard import idempotency
from onceward.jobs import executor
from onceward_nats import relay
from onceward_outbox import drain

__all__ = [
    "DEVICE_POINTS",
    "KINDS",
    "LONG_SLEEP",
    "POINTS",
    "RESTORE",
    "SERVER_POINTS",
    "SILENCE",
    "STALL",
    "STANDBY_AWAY",
    "Faults",
    "Mask",
]

_COMMITS: Final = (
    "add_user",
    "cancel",
    "discard",
    "discard_all",
    "edit_payload",
    "enqueue",
    "enqueue_many",
    "expire_stale",
    "learn_server_time",
    "map_local_id",
    "note_sign_in",
    "park",
    "prune",
    "purge_user",
    "renew",
    "resolve",
    "retry",
    "retry_all",
    "save_clock",
    "transaction",
    "warn_of_expiry",
    "watchdog",
)
_WITHIN_TRANSACTION: Final = (
    "claim",
    "record",
    "save_batch_offer",
    "save_holds",
)
"""Operations that the drain only uses within ``transaction``, which commits them."""

SERVER_POINTS: Final = (
    *idempotency.FAULT_POINTS,
    *batch_chunk.FAULT_POINTS,
    *executor.FAULT_POINTS,
    *relay.FAULT_POINTS,
)
DEVICE_POINTS: Final = (
    *drain.FAULT_POINTS,
    *(f"{name}.before_commit" for name in (*_COMMITS, *_WITHIN_TRANSACTION)),
    *(f"{name}.after_commit" for name in _COMMITS),
)
POINTS: Final = (*SERVER_POINTS, *DEVICE_POINTS)
"""All fault points. A long run must inject a fault at each."""

_PAUSABLE: Final = frozenset((*SERVER_POINTS, *drain.FAULT_POINTS))
"""At other points a lock is held, for which other threads would wait in real time."""

LONG_SLEEP: Final = "long sleep"
"""Days are skipped: keys expire on the server, and actions become stale."""

RESTORE: Final = "database restored"
"""The server's database goes back to an earlier state, while the server runs."""

STALL: Final = "worker stalled"
"""A worker is paused with a job that it has claimed, until another one has claimed the job, too."""

SILENCE: Final = "server silent"
"""No response reaches a device for so long that an entry could be sent as often as it may be."""

STANDBY_AWAY: Final = "standby away"
"""The standby of the server's database gets nothing for a while, and is then promoted or not."""

_RANDOM_KINDS: Final = (
    "request lost",
    "response lost",
    "request doubled",
    "request late",
    "response late",
    "network cut",
    "foreign edit",
    "outage",
    "endpoint limited",
    "batch refused",
    "connection silent",
    "captive portal",
    "attestation refused",
    "server error",
    "slow handler",
    "slow job",
    "slow disk",
    "commit cut",
    "notification lost",
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
KINDS: Final = (*_RANDOM_KINDS, LONG_SLEEP, RESTORE, STALL, SILENCE, STANDBY_AWAY)

_MAX_CRASHES: Final = 3
_MAX_PAUSES: Final = 3
_FOCUS_RATE: Final = 0.25
_RARE_FOCUS_RATE: Final = 0.7
_RARE_OPERATIONS: Final = frozenset(
    {
        "begin_stream",
        "cancel",
        "chunk_after_commit",
        "conflict",
        "discard",
        "discard_all",
        "edit_payload",
        "expire",
        "fail",
        "map_local_id",
        "park",
        "prune",
        "purge_user",
        "rebase",
        "release",
        "renew",
        "renumber",
        "resend",
        "resolve",
        "retry",
        "retry_all",
        "warn_of_expiry",
    }
)
"""Rare operations of a device, and the commit of a chunk, of which a client needs only a few.

A focus on one of them injects a fault almost every time."""


class Mask:
    """Omits some faults of a seed, for shrinking. Faults are numbered from 1."""

    def __init__(
        self, *, only_first: int | None = None, excluded: frozenset[int] = frozenset()
    ) -> None:
        self.only_first = only_first
        self.excluded = excluded

    def includes(self, number: int) -> bool:
        """Return whether the fault with this number occurs."""
        return number not in self.excluded and (
            self.only_first is None or number <= self.only_first
        )


class Faults:
    """The faults of one seed.

    Each seed has its own rates: some kinds of faults are frequent, some rare, some absent. Faults
    are more frequent at three points, the focus points.
    """

    def __init__(self, rng: Random, mask: Mask) -> None:
        self._rng = rng
        self._mask = mask
        self.is_stopped = False
        self.number = 0
        self.by_kind: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self._rates = {
            kind: rng.choice((0.0, 0.0, 0.02, 0.06, 0.2)) * (0.5 + rng.random())
            for kind in _RANDOM_KINDS
        }
        self._crash_rate = rng.choice((0.0, 0.003, 0.01))
        self.focus_points = frozenset(rng.sample(POINTS, 3))
        self._crashes = _MAX_CRASHES
        self._pauses = _MAX_PAUSES

    def focuses_on(self, *operations: str) -> bool:
        """Return whether a focus point belongs to one of these operations."""
        return any(point.partition(".")[0] in operations for point in self.focus_points)

    def focus_on(self, point: str) -> None:
        """Add a focus point."""
        self.focus_points |= {point}

    def happens(self, kind: str, rate: float | None = None) -> bool:
        """Decide whether a fault of this kind occurs now, and count it."""
        if self.is_stopped:
            return False
        if self._rng.random() >= (self._rates[kind] if rate is None else rate):
            return False
        return self.record(kind)

    def inject(self, point: str) -> str | None:
        """Return the fault to inject at a point: ``crash``, ``power cut``, ``pause`` or None."""
        self.reached[point] += 1
        if self.is_stopped:
            return None
        rate, is_rare = self._crash_rate, False
        if point in self.focus_points:
            is_rare = point.partition(".")[0] in _RARE_OPERATIONS
            rate = _RARE_FOCUS_RATE if is_rare else _FOCUS_RATE
        if self._rng.random() >= rate:
            return None
        draw = self._rng.random()
        if point in _PAUSABLE and draw < self._rates["pause"] * 4:
            if self._pauses and self.record("pause"):
                self._pauses -= 1
                self.struck[point] += 1
                return "pause"
            return None
        kind = "power cut" if point in DEVICE_POINTS and draw > 0.5 else "crash"  # noqa: PLR2004
        # A rare focus point has its fault, also if all others were spent before it was reached.
        is_left = self._crashes > 0 or (is_rare and not self.struck[point])
        if is_left and self.record(kind):
            self._crashes -= 1
            self.struck[point] += 1
            return kind
        return None

    def between(self, low: float, high: float) -> float:
        """Return a uniformly distributed number."""
        return low + (high - low) * self._rng.random()

    def record(self, kind: str) -> bool:
        """Count a fault; returns False if the mask omits it."""
        self.number += 1
        if not self._mask.includes(self.number):
            return False
        self.by_kind[kind] += 1
        return True
