"""The fewest faults that still break a promise: what a person has to read of a failing seed."""

from typing import Final

from holdfast_lab.simulation.faults import Mask
from holdfast_lab.simulation.scenario import Outcome, run_seed
from holdfast_lab.simulation.templates import Templates

__all__ = ["shrink"]

_MOST_RUNS: Final = 60


def shrink(outcome: Outcome, templates: Templates, *, most_runs: int = _MOST_RUNS) -> Outcome:
    """Leave out faults while the same promise stays broken; returns the shortest run found.

    Leaving one out changes what comes after it, so this is a search and not a proof: what it
    returns has really happened, and is not always the shortest there is.
    """
    rules = {violation.rule for violation in outcome.violations}
    best, runs = outcome, 0

    def attempt(mask: Mask) -> Outcome | None:
        nonlocal runs
        runs += 1
        found = run_seed(outcome.seed, templates, mask)
        return found if rules & {violation.rule for violation in found.violations} else None

    low, high = 0, outcome.fault_count
    while low < high and runs < most_runs // 3:
        middle = (low + high) // 2
        found = attempt(Mask(only_first=middle))
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    without: frozenset[int] = frozenset()
    for number in range(high, 0, -1):
        if runs >= most_runs:
            break
        found = attempt(Mask(only_first=high, without=without | {number}))
        if found is not None:
            best, without = found, without | {number}
    return best
