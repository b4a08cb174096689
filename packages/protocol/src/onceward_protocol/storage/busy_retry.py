"""Retry SQLite operations for which ``busy_timeout`` has no effect."""

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

__all__ = ["until_free"]

_PAUSE_SECONDS: Final = 0.002


def until_free(work: Callable[[], T], *, is_busy: Callable[[Exception], bool], seconds: float) -> T:
    """Call ``work`` until it no longer fails as busy; after ``seconds``, raise its error.

    To switch a new file to WAL, SQLite turns a read lock into a write lock. If two processes do so
    at once, it fails one of them at once and ignores ``busy_timeout``, because they would wait for
    each other. The next try may succeed.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return work()
        except Exception as error:
            if not is_busy(error) or time.monotonic() >= end:
                raise
        # A random pause, so that two processes do not collide again.
        time.sleep(_PAUSE_SECONDS * (1 + random.random()))  # noqa: S311
