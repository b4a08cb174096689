"""Waiting for a lock that SQLite does not wait for by itself."""

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

__all__ = ["until_free"]

_PAUSE_SECONDS: Final = 0.002


def until_free(work: Callable[[], T], *, is_busy: Callable[[Exception], bool], seconds: float) -> T:
    """Do what SQLite may refuse as busy, again and again until it goes through.

    To switch a new file to WAL, SQLite turns a read lock into a write lock, and where two are at it
    at once it refuses one of them without a look at ``busy_timeout``: each waiting for the other,
    neither would ever let go. After the refusal the lock is free, so the next try may go through.
    The last refusal is raised.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return work()
        except Exception as error:
            if not is_busy(error) or time.monotonic() >= end:
                raise
        # Chance, so that two who met do not meet again.
        time.sleep(_PAUSE_SECONDS * (1 + random.random()))  # noqa: S311
