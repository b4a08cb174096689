"""`holdfast bench`: hands over to the benchmarks of the checkout, which are not installed."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
    return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 - ours


def _checkout() -> Path:
    here = Path.cwd()
    # An editable install lies in its checkout, wherever one stands.
    candidates = [here, *here.parents, Path(__file__).parents[3]]
    for folder in candidates:
        if (folder / "bench" / "parts.py").is_file():
            return folder
    raise Failure("the benchmarks are part of the source: run this in a checkout of Holdfast")
