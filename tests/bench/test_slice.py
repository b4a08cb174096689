"""A short slice of each benchmark runs with the tests: it must work, not be fast."""

import sqlite3
from pathlib import Path

from bench.__main__ import CREATE
from bench.races import Contender, race, ratio, served

from bench import fingerprint, growth
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
