"""A short slice of each benchmark runs with the tests: it must work, not be fast."""

import sqlite3
from pathlib import Path

from bench.__main__ import CREATE
from bench.races import Contender, race, ratio, served

from bench import fingerprint, growth, job_growth, job_wake, jobs
from holdfast.testing.servers import RealPostgres


def test_a_race_between_bare_and_guarded_yields_a_ratio(tmp_path: Path) -> None:
    contenders = []
    for name in ("bare_sqlite", "guarded"):
        path = tmp_path / f"{name}.db"
        with sqlite3.connect(path) as db:
            db.execute(CREATE)
        db.close()
        contenders.append(Contender(name, name, f"sqlite:///{path}"))
    contenders.append(Contender("replays", "guarded", contenders[1].database, replay=True))
    with served(contenders):
        race(contenders, rounds=1, seconds=0.3, step=lambda: None)
    for contender in contenders:
        assert ratio(contender, contenders[0])[0] > 0


async def test_look_up_and_sweep_are_measured_on_both_databases(
    tmp_path: Path, postgres: RealPostgres
) -> None:
    urls = postgres.create_database(), postgres.create_database()
    for found in (
        await growth.sqlite(str(tmp_path), 2000),
        await growth.postgres(*urls, 2000),
    ):
        assert found["swept_rows"] == 200
        assert found["lookup_ratio"] > 0


def test_the_fingerprint_is_measured_on_two_kilobytes() -> None:
    found = fingerprint.measure(rounds=2, calls=5)
    assert 1900 < found["body_bytes"] < 2200
    assert found["ratio"] > 0


def test_jobs_race_against_their_peers(postgres: RealPostgres) -> None:
    found = jobs.postgres(postgres, rounds=1, seconds=0.2, jobs=40)
    assert set(found) == {"jobs_enqueue_1", "jobs_enqueue_8", "jobs_worked", "jobs_that_write"}
    for rows in found.values():
        assert max(row["ratio"] for name, row in rows.items() if "Holdfast" not in name) >= 1
        assert all(row["per_second"] > 0 for row in rows.values())


def test_jobs_on_sqlite_race_against_a_bare_loop(tmp_path: Path) -> None:
    found = jobs.sqlite(tmp_path, rounds=1, jobs=160)
    assert found["jobs_sqlite"]["bare claim and completion"]["ratio"] == 1
    assert len(found["jobs_sqlite"]) == 3


async def test_the_claim_is_measured_beside_finished_and_later_jobs(
    tmp_path: Path, postgres: RealPostgres
) -> None:
    urls = [postgres.create_database() for _ in range(3)]
    for found in (
        await job_growth.postgres(urls, rows=500, rounds=1),
        await job_growth.sqlite(tmp_path, rows=500, rounds=1),
    ):
        assert found["claim_finished_ratio"] > 0
        assert found["claim_later_ratio"] > 0


async def test_the_wake_up_is_measured_between_two_processes(postgres: RealPostgres) -> None:
    found = await job_wake.measure(postgres.create_database(), wakes=2, idle_seconds=1.0)
    assert 0 < found["wake_least_ms"] <= found["wake_ms"] <= found["wake_most_ms"]
    assert found["idle_statements_per_second"] >= 0
