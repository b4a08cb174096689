"""Ctrl-C and SIGTERM for commands that run for a while: both end them in good order, with 0."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from holdfast.cli.output import complain

__all__ = ["stop_asked", "until_stopped"]

_STOPPED: Final = "stopped before the end: what was not reached is not decided"


def until_stopped(work: Callable[[], int]) -> int:
    """Run something that undoes what it began when it is interrupted; returns the exit code."""
    # As Ctrl-C, which asyncio turns into a cancellation: whatever was started is ended.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return work()
    except KeyboardInterrupt:
        complain(_STOPPED)
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_asked() -> Iterator[Callable[[], bool]]:
    """Give what tells whether to stop, for work that ends by itself. A second signal ends it."""
    asked = False

    def ask(_number: int, _frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
