"""Servers, workers and devices are killed and stopped, and no guarantee is violated.

``HOLDFAST_CHAOS_SECONDS`` is the total time with faults, divided among the databases.
"""

import asyncio
import os

import pytest

from holdfast_lab.chaos import Report, run_chaos

# Starting and draining take extra time.
SECONDS = float(os.environ.get("HOLDFAST_CHAOS_SECONDS", "60"))
DATABASES = [("sqlite", False), ("postgres", False), ("postgres", True)]


@pytest.mark.parametrize(
    ("kind", "nats"), DATABASES, ids=["sqlite", "postgres", "postgres and nats"]
)
def test_killed_processes_lose_and_double_nothing(kind: str, nats: bool) -> None:
    report = asyncio.run(run_chaos(SECONDS / len(DATABASES), kind=kind, nats=nats))  # type: ignore[arg-type]
    assert report.violations == ()
    assert (report.doubled, report.lost) == (0, 0)
    assert had_faults(report)
    assert ("postgres" in report.kills, "nats" in report.kills) == (kind == "postgres", nats)


def had_faults(report: Report) -> bool:
    """Return whether there were enough faults and actions: a run without them must not pass."""
    minutes = report.fault_seconds / 60
    return (
        sum(report.kills.values()) >= 10 * minutes
        and report.acknowledged >= 200
        and report.outcomes["response_lost"] > 0
        and report.jobs > 0
    )
