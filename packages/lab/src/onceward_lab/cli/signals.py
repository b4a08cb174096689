"""Ctrl-C and SIGTERM for commands that run for a while: both end them with exit code 0."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from onceward_protocol.cli.output import print_error

__all__ = ["run_until_interrupted", "stop_requested"]

_INTERRUPTED: Final = "interrupted: the remaining checks did not run"


def run_until_interrupted(work: Callable[[], int]) -> int:
    """Call ``work`` and return its exit code, or 0 after Ctrl-C or SIGTERM.

    Both signals raise ``KeyboardInterrupt`` in ``work`` (in asyncio: they cancel the main task), so
    ``work`` should release what it started with ``finally`` or ``with``.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return work()
    except KeyboardInterrupt:
        print_error(_INTERRUPTED)
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: Any) -> None:
    # A shell starts background processes with SIGINT ignored.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM was received.

    For work that checks it between steps. The second signal raises ``KeyboardInterrupt``.
    """
    is_requested = False

    def handle(_number: int, _frame: Any) -> None:
        nonlocal is_requested
        if is_requested:
            raise KeyboardInterrupt
        is_requested = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: is_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
