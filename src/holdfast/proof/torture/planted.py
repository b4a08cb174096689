"""Bugs that were planted on purpose: loaded from a checkout, put in place, and hunted.

They are no part of what is installed. Each is a function in ``tests/planted`` that breaks the real
code while its ``with`` block lasts.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import msgspec

import holdfast
from holdfast.errors import UsageError
from holdfast.proof.torture.campaign import Failure, collecting_seldom, told
from holdfast.proof.torture.disk import do_without_locks
from holdfast.proof.torture.shrinking import shrink
from holdfast.proof.torture.templates import Templates, place_for_worlds
from holdfast.proof.torture.world import run_seed

__all__ = ["MOST_SEEDS", "Bug", "Catch", "hunt", "hunt_here", "load_bugs"]

MOST_SEEDS: Final = 3000
"""How long one bug is looked for. Most are found within a few dozen seeds."""

Bug = Callable[[], AbstractContextManager[None]]

_PLACE: Final = Path("tests") / "planted"
_MODULE: Final = "tests.planted"


class Catch(msgspec.Struct):
    """One planted bug, and how it was found, if it was."""

    bug: str
    seeds: int
    failure: Failure | None = None


def load_bugs() -> Mapping[str, Bug]:
    """Return the planted bugs by name. Raises ``UsageError`` where there is no checkout."""
    checkout = str(_find())
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    bugs: Mapping[str, Bug] = importlib.import_module(_MODULE).BUGS
    return bugs


def _find() -> Path:
    installed = Path(holdfast.__file__).resolve()
    for base in (installed.parents[2], Path.cwd()):
        if (base / _PLACE / "__init__.py").is_file():
            return base
    raise UsageError("the planted bugs are in the source tree only: run this in a checkout")


def hunt(names: list[str], *, jobs: int) -> Iterator[Catch]:
    """Look for each bug, several at a time; gives each as soon as it is found or given up."""
    os.environ["PYTHONHASHSEED"] = "0"
    context = multiprocessing.get_context("spawn")
    # A process for each, so that no bug meets what another has left behind.
    with place_for_worlds() as place, context.Pool(jobs, _begin, maxtasksperchild=1) as pool:
        tasks = [(name, place) for name in names]
        yield from pool.imap_unordered(_hunt_one, tasks, chunksize=1)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends us


def _hunt_one(task: tuple[str, str]) -> Catch:
    name, place = task
    do_without_locks()
    with collecting_seldom(), Templates(place) as templates:
        return hunt_here(name, templates)


def hunt_here(
    name: str, templates: Templates, *, most_seeds: int = MOST_SEEDS, shrinks: bool = True
) -> Catch:
    """Look for one bug in this process, and for the fewest faults that show it."""
    with load_bugs()[name]():
        for seed in range(most_seeds):
            outcome = run_seed(seed, templates)
            if outcome.violations:
                shortest = shrink(outcome, templates) if shrinks else outcome
                return Catch(name, seed + 1, told(shortest))
    return Catch(name, most_seeds)
