"""Bugs that were planted on purpose: loaded from a checkout, put in place, and hunted.

They are no part of what is installed. Each is a function in ``tests/planted`` that breaks the real
code while its ``with`` block lasts. One that has itself gone wrong, because the code around it has
changed since, breaks promises too: what it does then says nothing, and is no catch.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.context import SpawnContext
from multiprocessing.pool import Pool
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec

import holdfast_lab.planted
from holdfast_lab.simulation.faulty_vfs import do_without_locks
from holdfast_lab.simulation.runner import Failure, collecting_seldom, deaf, told
from holdfast_lab.simulation.scenario import run_seed
from holdfast_lab.simulation.shrinking import shrink
from holdfast_lab.simulation.templates import Templates, place_for_worlds

__all__ = ["MOST_SEEDS", "Bug", "Catch", "hunt", "hunt_here", "load_bugs"]

MOST_SEEDS: Final = 3000
"""How long one bug is looked for. Most are found within a few dozen seeds."""

_TRACED_SEEDS: Final = 5
"""Seeds in which a plant that breaks nothing is looked at for errors that it hides."""

# Where the code of planted bugs is.
_PLACES: tuple[str, ...] = (str(Path(holdfast_lab.planted.__file__).parent),)

Bug = Callable[[], AbstractContextManager[None]]


# What Python raises where code does not fit the code around it. Faults of the world are none of
# these, nor is anything that a plant raises on purpose.
_STALE: Final = (
    TypeError,
    NameError,
    AttributeError,
    AssertionError,
    LookupError,
    ValueError,
    ImportError,
)
# The same of SQLite, by its words: there are two drivers, with exceptions of their own.
_STALE_SQL: Final = ("no such table", "no such column", "has no column", "syntax error", "binding")


class Catch(msgspec.Struct):
    """One planted bug, and how it was found, if it was.

    ``broken`` says what is wrong with the plant itself; then nothing was found.
    """

    bug: str
    seeds: int
    failure: Failure | None = None
    broken: str | None = None


def load_bugs() -> Mapping[str, Bug]:
    """Return the planted bugs by name."""
    bugs: Mapping[str, Bug] = holdfast_lab.planted.BUGS
    return bugs


def hunt(names: list[str], *, jobs: int) -> Iterator[Catch]:
    """Look for each bug, several at a time; gives each as soon as it is found or given up."""
    os.environ["PYTHONHASHSEED"] = "0"
    context = multiprocessing.get_context("spawn")
    # A process for each, so that no bug meets what another has left behind.
    with place_for_worlds() as place, _pool(context, jobs) as pool:
        tasks = [(name, place) for name in names]
        yield from pool.imap_unordered(_hunt_one, tasks, chunksize=1)


def _pool(context: SpawnContext, jobs: int) -> Pool:
    with deaf():
        return context.Pool(jobs, maxtasksperchild=1)


def _hunt_one(task: tuple[str, str]) -> Catch:
    name, place = task
    do_without_locks()
    with collecting_seldom(), Templates(place) as templates:
        return hunt_here(name, templates)


def hunt_here(
    name: str, templates: Templates, *, most_seeds: int = MOST_SEEDS, shrinks: bool = True
) -> Catch:
    """Look for one bug in this process, and for the fewest faults that show it."""
    bug = load_bugs()[name]
    own = _errors_of(bug, templates, seeds=())
    if own:
        return Catch(name, 0, broken=own[0])
    failure: Failure | None = None
    looked = 0
    with bug():
        for seed in range(most_seeds):
            looked += 1
            try:
                outcome = run_seed(seed, templates)
            except _STALE:
                break
            if outcome.violations:
                failure = told(shrink(outcome, templates) if shrinks else outcome)
                break
    # A trace takes its time, so that it is made only where there is something to decide.
    is_caught = looked < most_seeds or failure is not None
    suspects = (looked - 1,) if is_caught else range(min(looked, _TRACED_SEEDS))
    own = _errors_of(bug, templates, seeds=suspects)
    return Catch(name, looked, None if own else failure, broken=own[0] if own else None)


def _errors_of(bug: Bug, templates: Templates, *, seeds: Iterable[int]) -> list[str]:
    """Return what goes wrong in the plant itself, while it is planted and in these seeds."""
    with _own_errors() as own, bug():
        for seed in seeds:
            run_seed(seed, templates)
            if own:
                break
    return own


@contextmanager
def _own_errors() -> Iterator[list[str]]:
    """Note every error that arises in a plant's own code, whoever catches it afterwards.

    By a trace, as the product may well turn such an error into an answer or another attempt: from
    the outside it then looks like the broken promise one was looking for.
    """
    own: list[str] = []

    def on_call(frame: FrameType, _event: str, _arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PLACES):
            return None
        frame.f_trace_lines = False
        return on_event

    def on_event(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception":
            _, error, trace = arg
            if (trace.tb_next is None and isinstance(error, _STALE)) or _is_stale_sql(error):
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                own.append(f"{where}: {type(error).__name__}: {error}")
        return on_event

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield own
    except _STALE as error:
        if not own:  # not the plant: the torture itself
            raise
        own.append(str(error))
    finally:
        sys.settrace(before)


def _is_stale_sql(error: BaseException | None) -> bool:
    """Say whether it comes from a statement that does not fit the tables."""
    while error is not None:
        if any(words in str(error) for words in _STALE_SQL):
            return True
        error = error.__cause__ or error.__context__
    return False
