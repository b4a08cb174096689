"""What the outbox needs from the world: a clock that cannot be set, and places to be interrupted.

No rules in here, and nothing of SQLite.
"""

import time
from functools import cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from holdfast.clock import SystemClock
from holdfast.ports import Clock

__all__ = ["DeviceClock", "FaultPoints", "SystemDeviceClock", "device_clock"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@runtime_checkable
class DeviceClock(Clock, Protocol):
    """A clock whose ``monotonic()`` also runs while the device sleeps, and that knows its boot."""

    def boot_id(self) -> str:
        """Return what is different after a restart of the device; empty if there is no such id."""


class SystemDeviceClock(SystemClock):
    """The device's own clocks."""

    def monotonic(self) -> float:
        """Return seconds since the device was started, sleep included."""
        return _since_boot()

    def boot_id(self) -> str:
        """Return the kernel's id of this boot."""
        return _boot_id()


class FaultPoints(Protocol):
    """Named instants at which a test may kill, delay or raise. Injected, never global.

    Every operation that writes has two: ``<operation>.before_commit`` and
    ``<operation>.after_commit``, such as ``enqueue.before_commit``.
    """

    def reach(self, point: str) -> None:
        """Pass the point, or do what the test wants done there."""


def device_clock(clock: Clock) -> DeviceClock:
    """Return the clock as one of a device; a plain ``Clock`` has no boot id.

    Should such a clock's ``monotonic()`` go back, that is taken for a restart.
    """
    return clock if isinstance(clock, DeviceClock) else _Bootless(clock)


class _Bootless:
    """A clock without boots."""

    def __init__(self, clock: Clock) -> None:
        self.now = clock.now
        self.monotonic = clock.monotonic

    def boot_id(self) -> str:
        return ""


@cache
def _boot_id() -> str:
    # Elsewhere than on Linux there is no such id that does not move with the wall clock. Without
    # one, time is still never counted twice; see time_keeping.py.
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
