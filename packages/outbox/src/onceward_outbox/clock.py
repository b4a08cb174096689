"""The outbox's clock: elapsed time that a change of the device's wall clock cannot affect.

A wall clock that is set forward must not expire entries, and one set back must not revive them.
So age is measured in *elapsed milliseconds of the file*, a number that only grows:

- While the device is on, it follows the boot clock, which counts sleep and cannot be set. All
  processes of one boot read the same clock, so they agree without writing anything.
- After a restart the boot clock starts at zero. The time since the start has certainly passed; how
  long the device was off is unknown. The number continues from its last value plus the time since
  the start, and the position is stored as a *gap*.
- The server's ``Date`` fills the gap: the server's time since the last ``Date``, less what was
  counted, was missed. It is added, and entries queued after the gap began are moved along, because
  the missing time may have passed before them. So an entry ages only by time that has certainly
  passed; the server, which also checks age, decides.

A gap before the first ``Date`` cannot be filled, and for an entry's age need not be. For entries
sent before it without a response the wall clock is used: the server may have expired their keys.
"""

import time
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec

from onceward_protocol.clock import Clock, SystemClock

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

SAVE_AFTER_MS: Final = 300_000
"""Elapsed time is written every five minutes: a sudden restart loses at most that."""

_MAX_SERVER_MS: Final = (datetime(2200, 1, 1, tzinfo=UTC) - _EPOCH) // _MILLISECOND
"""Later server times are ignored: they are wrong, and sums with them would overflow dates."""

_SIGNIFICANT_MS: Final = 2_000
"""``Date`` has whole seconds; a smaller difference is not worth a commit."""

_REFRESH_MS: Final = 3_600_000
"""A server time this old is replaced, so that the next gap is measured from a recent one."""


@runtime_checkable
class DeviceClock(Clock, Protocol):
    """A clock whose ``monotonic()`` runs while the device sleeps, and that identifies the boot."""

    def boot_id(self) -> str:
        """Return a text that changes with every restart; empty if the system has none."""


class SystemDeviceClock(SystemClock):
    """The device's own clocks."""

    def monotonic(self) -> float:
        """Return seconds since the device was started, sleep included."""
        return _since_boot()

    def boot_id(self) -> str:
        """Return the kernel's id of this boot."""
        return _boot_id()


def as_device_clock(clock: Clock) -> DeviceClock:
    """Return the clock as a ``DeviceClock``; a plain ``Clock`` gets an empty boot id.

    If ``monotonic()`` of such a clock goes back, that counts as a restart.
    """
    return clock if isinstance(clock, DeviceClock) else _ClockWithoutBootId(clock)


class _ClockWithoutBootId:
    def __init__(self, clock: Clock) -> None:
        self.now = clock.now
        self.monotonic = clock.monotonic

    def boot_id(self) -> str:
        return ""


class ClockRow(msgspec.Struct, frozen=True):
    """The stored clock: ``elapsed_ms`` had passed when the boot clock was at ``boot_ms``."""

    boot_id: str
    boot_ms: int
    elapsed_ms: int
    gap_ms: int | None = None
    # The server's time, the elapsed time of its arrival, and the offset of the wall clock.
    server_ms: int | None = None
    server_at_ms: int | None = None
    server_offset_ms: int | None = None


class ClockReading(NamedTuple):
    """One reading of all clocks."""

    wall: datetime
    ms: int
    row: ClockRow
    restarted: bool
    # The row has to be written: a restart was seen, or five minutes have passed.
    save: bool


class ClockUpdate(NamedTuple):
    """Changes by a ``Date``: the new row, and how much time was missed since where."""

    row: ClockRow
    missed_ms: int
    since_ms: int
    # There was a gap and no ``Date`` from before it: its length stays unknown.
    gap_unknown: bool


def read_clock(
    row: ClockRow | None, boot_id: str, boot_seconds: float, wall: datetime, newest_ms: Any = None
) -> ClockReading:
    """Compute the file's time. ``newest_ms`` is the highest time stored in the file, or None.

    A boot clock behind the stored one has restarted, also where boots have no ids. One that is
    ahead adds the difference, which is never more than what has passed.
    """
    boot_ms = int(boot_seconds * 1000)
    if row is None:
        return ClockReading(wall, 0, ClockRow(boot_id, boot_ms, 0), restarted=False, save=True)
    if row.boot_id == boot_id and boot_ms >= row.boot_ms:
        passed = boot_ms - row.boot_ms
        elapsed = row.elapsed_ms + passed
        if passed < SAVE_AFTER_MS:
            return ClockReading(wall, elapsed, row, restarted=False, save=False)
        saved = msgspec.structs.replace(row, boot_ms=boot_ms, elapsed_ms=elapsed)
        return ClockReading(wall, elapsed, saved, restarted=False, save=True)
    before = max(row.elapsed_ms, newest_ms or 0)
    elapsed = before + boot_ms
    restarted = msgspec.structs.replace(
        row,
        boot_id=boot_id,
        boot_ms=boot_ms,
        elapsed_ms=elapsed,
        gap_ms=before if row.gap_ms is None else row.gap_ms,
    )
    return ClockReading(wall, elapsed, restarted, restarted=True, save=True)


def update_from_server(reading: ClockReading, server_now: datetime) -> ClockUpdate | None:
    """Apply the server's time; None if it changes nothing or is impossible."""
    row, now = reading.row, reading.ms
    server_ms = _to_ms(server_now)
    if not 0 <= server_ms < _MAX_SERVER_MS:
        return None
    offset = server_ms - _to_ms(reading.wall)
    missed, since = 0, now
    if row.server_ms is not None and row.server_at_ms is not None:
        uncounted = (server_ms - row.server_ms) - (now - row.server_at_ms)
        if row.gap_ms is not None:
            missed, since = max(0, uncounted), row.gap_ms
        elif (
            abs(uncounted) < _SIGNIFICANT_MS
            and now - row.server_at_ms < _REFRESH_MS
            and abs(offset - (row.server_offset_ms or 0)) < _SIGNIFICANT_MS
        ):
            return None
    changed = msgspec.structs.replace(
        row,
        elapsed_ms=row.elapsed_ms + missed,
        gap_ms=None,
        server_ms=server_ms,
        server_at_ms=now + missed,
        server_offset_ms=offset,
    )
    if row.gap_ms is None or row.server_ms is not None:
        return ClockUpdate(changed, missed, since, gap_unknown=False)
    return ClockUpdate(changed, 0, row.gap_ms, gap_unknown=True)


def server_time(reading: ClockReading) -> datetime:
    """Return the server's time as far as it is known, otherwise the device's.

    Counted from the last ``Date`` by the elapsed clock. After a gap that is not filled that may be
    far behind; then the wall clock is used, if it is ahead.
    """
    row = reading.row
    if row.server_ms is None or row.server_at_ms is None:
        return reading.wall
    counted = row.server_ms + reading.ms - row.server_at_ms
    if row.gap_ms is not None:
        counted = max(counted, _to_ms(reading.wall) + (row.server_offset_ms or 0))
    return _EPOCH + timedelta(milliseconds=min(max(counted, 0), _MAX_SERVER_MS))


def _to_ms(at: datetime) -> int:
    return (at - _EPOCH) // _MILLISECOND


@cache
def _boot_id() -> str:
    # Systems other than Linux have no boot id that is independent of the wall clock. Without one,
    # a restart is still seen when the boot clock goes back.
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


if hasattr(time, "CLOCK_BOOTTIME"):

    def _since_boot() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:  # pragma: no cover - macOS and Windows count sleep in their monotonic clock

    def _since_boot() -> float:
        return time.monotonic()
