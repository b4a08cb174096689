"""Servers, workers and devices are killed for a while, and every promise is kept.

``HOLDFAST_SIEGE_SECONDS`` is the time under fire of all databases together.
"""

import asyncio
import os

import pytest

from holdfast_lab.chaos import Report, run_chaos

# Starting and draining come on top.
SECONDS = float(os.environ.get("HOLDFAST_SIEGE_SECONDS", "60"))
PLACES = [("sqlite", False), ("postgres", False), ("postgres", True)]


@pytest.mark.parametrize(("kind", "nats"), PLACES, ids=["sqlite", "postgres", "postgres and nats"])
def test_whatever_is_killed_everything_happens_once_and_in_order(kind: str, nats: bool) -> None:
    report = asyncio.run(run_chaos(SECONDS / len(PLACES), kind=kind, nats=nats))  # type: ignore[arg-type]
    assert report.violations == ()
    assert (report.duplicates, report.lost) == (0, 0)
    assert under_fire(report)
    assert ("postgres" in report.kills, "nats" in report.kills) == (kind == "postgres", nats)


def under_fire(report: Report) -> bool:
    """Say whether it was a siege at all: a proof of nothing must not pass."""
    minutes = report.siege_seconds / 60
    return (
        sum(report.kills.values()) >= 10 * minutes
        and report.acknowledged >= 200
        and report.fates["lose_answer"] > 0
        and report.jobs > 0
    )
