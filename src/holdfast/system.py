"""The machine's clocks, and ids made of time and chance. The rules get them as arguments."""

import os
import time
from datetime import UTC, datetime
from typing import Final

__all__ = ["SystemClock", "new_id", "new_request_id"]


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        """Return the wall clock in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()


class _Entropy:
    """Random bytes, fetched by the page: a system call per id would also give up the GIL."""

    def __init__(self) -> None:
        self._page = b""
        self._at = 0
        os.register_at_fork(after_in_child=self._turn_page)

    def take(self, count: int) -> str:
        """Return fresh random bytes in hexadecimal."""
        if self._at + count > len(self._page):
            self._turn_page()
        piece = self._page[self._at : self._at + count]
        self._at += count
        return piece.hex()

    def _turn_page(self) -> None:
        self._page, self._at = os.urandom(4096), 0


_entropy: Final = _Entropy()


def new_id(now: datetime) -> str:
    """Make an id that grows with time (UUID version 7), so that pages by id are pages by time."""
    millis = int(now.timestamp() * 1000)
    tail = _entropy.take(10)
    head = f"{millis:012x}"
    return (
        f"{head[:8]}-{head[8:]}-7{tail[1:4]}-{'89ab'[int(tail[4], 16) & 3]}{tail[5:8]}-{tail[8:]}"
    )


def new_request_id() -> str:
    """Make an id for a request that came without one."""
    return _entropy.take(16)
