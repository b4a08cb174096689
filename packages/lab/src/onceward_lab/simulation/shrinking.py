"""Shrinks a failing seed to few faults that still violate the same guarantee."""

from typing import Final

from onceward_lab.simulation.faults import Mask
from onceward_lab.simulation.scenario import Outcome, run_seed
from onceward_lab.simulation.templates import Templates

__all__ = ["shrink"]

_MAX_RUNS: Final = 60


def shrink(outcome: Outcome, templates: Templates, *, max_runs: int = _MAX_RUNS) -> Outcome:
    """Omit faults while the same guarantee is violated; returns the shortest run found.

    Omitting a fault changes what happens after it, so the result is a real run, but not always the
    shortest one.
    """
    rules = {violation.rule for violation in outcome.violations}
    best, runs = outcome, 0

    def attempt(mask: Mask) -> Outcome | None:
        nonlocal runs
        runs += 1
        found = run_seed(outcome.seed, templates, mask)
        return found if rules & {violation.rule for violation in found.violations} else None

    low, high = 0, outcome.fault_count
    while low < high and runs < max_runs // 3:
        middle = (low + high) // 2
        found = attempt(Mask(only_first=middle))
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    excluded: frozenset[int] = frozenset()
    for number in range(high, 0, -1):
        if runs >= max_runs:
            break
        found = attempt(Mask(only_first=high, excluded=excluded | {number}))
        if found is not None:
            best, excluded = found, excluded | {number}
    return best
