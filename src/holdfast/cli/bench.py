"""`holdfast bench`: hands over to the benchmarks of the checkout, which are not installed."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.cli.output import Failure

__all__ = ["run_bench"]


def run_bench(arguments: Sequence[str]) -> int:
    """Run the benchmarks of the checkout that the current directory is in; returns the exit code.

    Raises what a person is told where there are none, or the peers are not installed.
    """
    root = _checkout()
    if importlib.util.find_spec("pygal") is None:
        raise Failure("the peers are not installed: pip install 'holdfast[all,bench]'")
    command = [sys.executable, "-m", "bench", *arguments]
    environment = os.environ | {"PYTHONPATH": str(root)}
    # Ctrl-C is for us, and we pass it on: else everything it has started would end by itself.
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:  # noqa: S603 - ours

        def stop(_number: int, _frame: Any) -> None:
            process.send_signal(signal.SIGINT)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _checkout() -> Path:
    here = Path.cwd()
    # An editable install lies in its checkout, wherever one stands.
    candidates = [here, *here.parents, Path(__file__).parents[3]]
    for folder in candidates:
        if (folder / "bench" / "parts.py").is_file():
            return folder
    raise Failure("the benchmarks are part of the source: run this in a checkout of Holdfast")
