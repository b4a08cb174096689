"""``onceward bench``: runs the benchmarks in a subprocess."""

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from onceward_protocol.cli.output import CommandError

__all__ = ["run_bench"]


def run_bench(arguments: Sequence[str]) -> int:
    """Run the benchmarks and return their exit code.

    Raises ``CommandError`` if the extra ``bench`` is not installed.
    """
    if importlib.util.find_spec("idemkit") is None:
        raise CommandError('the benchmarks need more packages: pip install "onceward-lab[bench]"')
    command = [sys.executable, "-m", "onceward_lab.bench", *arguments]
    started: list[subprocess.Popen[bytes]] = []

    def stop(_number: int, _frame: Any) -> None:
        for process in started:
            process.send_signal(signal.SIGINT)

    # Signals reach this process only and are passed on, so that the benchmarks stop their own
    # processes in order. Handled before the start: a child inherits signals that are ignored, as
    # SIGINT is for a command in the background of a script.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with subprocess.Popen(command, start_new_session=True) as process:  # noqa: S603 - ours
            started.append(process)
            return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
