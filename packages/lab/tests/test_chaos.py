"""Servers, workers and devices are killed and stopped, and no guarantee is violated.

``ONCEWARD_CHAOS_SECONDS`` is about the total time with faults, divided among the databases.
"""

import asyncio
import os
import time

import asyncpg
import msgspec
import pytest

from onceward_lab.chaos import Report, run_chaos
from onceward_lab.chaos.failovers import RecoveryTimes
from onceward_lab.checker import Rule, check
from onceward_lab.cli.chaos import show_chaos
from onceward_lab.effects import select
from onceward_lab.history import Effect, History, UserAction
from onceward_protocol.cli.output import CommandError
from onceward_testing.postgres_pair import RealPostgresPair

# Starting and draining take extra time.
SECONDS = float(os.environ.get("ONCEWARD_CHAOS_SECONDS", "40"))
# A third: a failover takes several seconds.
FAILOVER_SECONDS = SECONDS / 3
DATABASES = [
    pytest.param("sqlite", False, id="sqlite"),
    # With the broker, kills of servers, workers and the database are the same as without it.
    pytest.param("postgres", False, id="postgres", marks=pytest.mark.long),
    pytest.param("postgres", True, id="postgres and nats"),
]


@pytest.mark.parametrize(("kind", "nats"), DATABASES)
def test_killed_processes_lose_and_double_nothing(kind: str, nats: bool) -> None:
    report = asyncio.run(run_chaos(SECONDS / 4, kind=kind, nats=nats))  # type: ignore[arg-type]
    assert report.violations == ()
    assert (report.doubled, report.lost) == (0, 0)
    assert had_faults(report)
    assert ("postgres" in report.kills, "nats" in report.kills) == (kind == "postgres", nats)


def test_failovers_lose_and_double_nothing() -> None:
    report = asyncio.run(run_chaos(FAILOVER_SECONDS, kind="postgres-ha"))
    assert report.violations == ()
    assert (report.doubled, report.lost) == (0, 0)
    assert had_faults(report)
    assert report.failovers >= 1
    assert report.failovers == sum(report.failover_causes.values())
    assert report.kills["primary"] >= 1
    assert report.recovery_median_seconds is not None
    assert report.recovery_worst_seconds is not None
    assert report.recovery_worst_seconds >= report.recovery_median_seconds


@pytest.mark.parametrize("synchronous", [True, False], ids=["sync", "async"])
def test_the_checker_sees_the_loss_of_an_acknowledged_write(synchronous: bool) -> None:
    history = asyncio.run(write_fail_over_and_read(synchronous=synchronous))
    lost = [violation for violation in check(history) if violation.rule is Rule.EXACTLY_ONCE]
    assert bool(lost) is not synchronous


async def write_fail_over_and_read(*, synchronous: bool) -> History:
    """Write while the standby is cut off, promote it, and return what was written and what is left.

    A synchronous primary does not acknowledge the second write.
    """
    with RealPostgresPair(synchronous=synchronous) as pair:
        url = pair.create_database()
        first, second = (
            UserAction(id=f"write {n}", device="d", user="u", tenant="u", has_entry=False)
            for n in (1, 2)
        )
        await execute(url, "CREATE TABLE writes (action text)", seconds=60)
        await execute(url, f"INSERT INTO writes VALUES ('{first.id}')", seconds=60)
        await asyncio.to_thread(pair.start_standby)  # waits until it has everything
        pair.cut_network()
        try:
            await execute(url, f"INSERT INTO writes VALUES ('{second.id}')", seconds=2)
        except TimeoutError:
            second = msgspec.structs.replace(second, acknowledged=False)
        assert second.acknowledged is not synchronous
        await asyncio.to_thread(pair.kill_primary)
        await asyncio.to_thread(pair.fail_over)
        rows = await select(url, "SELECT action FROM writes")
        effects = [Effect(tenant="u", action=row["action"], number=n) for n, row in enumerate(rows)]
        return History(actions=[first, second], effects=effects)


async def execute(url: str, sql: str, *, seconds: float) -> None:
    connection = await asyncpg.connect(url, timeout=60)
    try:
        async with asyncio.timeout(seconds):
            await connection.execute(sql)
    finally:
        connection.terminate()


@pytest.mark.parametrize(
    ("database", "replication", "message"),
    [
        ("mysql", None, "--database should be one of sqlite, postgres, postgres-ha"),
        ("postgres-ha", "none", "--replication should be sync or async"),
        ("postgres", "async", "--replication needs --database postgres-ha"),
    ],
)
def test_wrong_options_are_refused(database: str, replication: str | None, message: str) -> None:
    with pytest.raises(CommandError, match=message) as raised:
        show_chaos(
            seconds=1, database=database, replication=replication, nats=False, seed=1, as_json=True
        )
    assert raised.value.code == 2


def test_recovery_ends_with_the_success_of_a_request_sent_after_the_loss() -> None:
    times = RecoveryTimes()
    assert (times.median, times.worst) == (None, None)
    times.succeeded(sent_at=time.monotonic())
    sent_before = time.monotonic()
    times.primary_lost()
    times.succeeded(sent_before)
    assert times.seconds == []
    times.succeeded(time.monotonic() + 1)
    times.succeeded(time.monotonic() + 1)
    assert len(times.seconds) == 1
    assert times.median == times.worst


def had_faults(report: Report) -> bool:
    """Return whether there were enough faults and actions: a run without them must not pass."""
    minutes = report.fault_seconds / 60
    return (
        sum(report.kills.values()) >= 10 * minutes
        and report.acknowledged >= 200
        and report.outcomes["response_lost"] > 0
        and report.jobs > 0
    )
