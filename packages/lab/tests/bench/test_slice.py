"""The benchmarks work, with small numbers, and the charts are drawn."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from onceward_lab.bench import (
    console,
    cpu_layers,
    fingerprint,
    growth,
    histories,
    job_growth,
    job_wake,
    jobs,
    patches,
    planning,
    plots,
    walk,
)
from onceward_lab.bench.curves import sizes
from onceward_lab.bench.idempotency import CREATE
from onceward_lab.bench.measurements import at_least, at_most, measurement
from onceward_lab.bench.races import Contender, race, ratio, served
from onceward_testing.servers import RealPostgres


@pytest.mark.long  # make proof runs a moment of each suite
def test_race_between_bare_and_guarded_gives_a_ratio(tmp_path: Path) -> None:
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


@pytest.mark.long  # make proof runs a moment of each suite
async def test_look_up_and_sweep_are_measured_on_both_databases(
    tmp_path: Path, postgres: RealPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "ROUNDS", 1)
    urls = postgres.create_database(), postgres.create_database()
    measured = await growth.measure(*urls, str(tmp_path), 2000)
    assert set(measured) == {"PostgreSQL", "SQLite"}
    for found, points in measured.values():
        assert [point.rows for point in points if point.us > 0] == [1000, 2000]
        assert found["rows"] == 1000
        assert found["swept_rows"] == 200
        assert found["lookup_ratio"] > 0


@pytest.mark.long  # make proof runs a moment of each suite
def test_cpu_time_is_measured_for_each_app(
    tmp_path: Path, postgres: RealPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_layers, "WARM_UP_SECONDS", 0.05)
    sources = cpu_layers.tree_of(Path(__file__).parents[4])
    apps = [
        cpu_layers.CpuApp("sockets", sources),
        cpu_layers.CpuApp("guard", sources),
        cpu_layers.CpuApp("guarded_sqlite", sources, f"sqlite:///{tmp_path}/cpu.db"),
    ]
    cpu_layers.measure_apps(apps, postgres, rounds=1, seconds=0.2)
    sockets, guard, on_sqlite = [app.microseconds[0] for app in apps]
    # By far: the guard has FastAPI below it, and the store a database.
    assert 0 < 2 * sockets < guard
    assert 0 < 2 * sockets < on_sqlite


def test_cost_of_a_layer_is_the_difference_of_two_apps() -> None:
    apps = {app: cpu_layers.CpuApp(app, Path()) for app, _ in cpu_layers.LAYERS.values()}
    for number, app in enumerate(apps.values()):
        app.microseconds = [100.0 * number, 100.0 * number + 10, 900.0]
    old = cpu_layers.CpuApp("guarded_postgres", Path(), microseconds=[800.0, 820.0, 1800.0])
    found = {row.name: row for row in cpu_layers.results(apps, {"guarded_postgres": old})}
    assert found["FastAPI"].figures["microseconds"] == 100
    assert found["FastAPI"].ratio == round(100 / 410, 3)
    compared = found["guarded_postgres ÷ baseline"]
    assert (compared.ratio, compared.least, compared.most) == (0.5, 0.5, 0.5)


def test_baseline_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a checkout"):
        cpu_layers.tree_of(tmp_path)


def test_fingerprint_is_measured_on_two_kilobytes() -> None:
    found = fingerprint.measure(rounds=2, calls=5)
    assert 1900 < found["body_bytes"] < 2200
    assert found["ratio"] > 0


@pytest.mark.long  # make proof runs a moment of each suite
def test_jobs_are_compared_with_peers(
    postgres: RealPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ENQUEUE", "WORK", "WRITE"):  # each contender is a process that starts slowly
        ours, *_, fastest = getattr(jobs, name)
        monkeypatch.setattr(jobs, name, (ours, fastest))
    monkeypatch.setattr(jobs, "WRITE_ROUNDS", 1)
    found = jobs.postgres(postgres, rounds=1, seconds=0.2, jobs=40)
    assert set(found) == {"jobs_enqueue_1", "jobs_enqueue_8", "jobs_worked", "jobs_that_write"}
    for rows in found.values():
        assert max(row["ratio"] for name, row in rows.items() if "Onceward" not in name) >= 1
        assert all(row["per_second"] > 0 for row in rows.values())


def test_jobs_on_sqlite_are_compared_with_a_bare_loop(tmp_path: Path) -> None:
    found = jobs.sqlite(tmp_path, rounds=1, jobs=160)
    assert found["jobs_sqlite"]["bare claim and completion"]["ratio"] == 1
    assert len(found["jobs_sqlite"]) == 3


@pytest.mark.long  # make proof runs a moment of each suite
async def test_claim_is_measured_with_finished_and_scheduled_jobs(
    tmp_path: Path, postgres: RealPostgres
) -> None:
    urls = [postgres.create_database() for _ in range(3)]
    on_postgres, points = await job_growth.postgres(urls, rows=500, rounds=1)
    assert [point.rows for point in points if point.us > 0] == [500]
    for found in (on_postgres, await job_growth.sqlite(tmp_path, rows=500, rounds=1)):
        assert found["claim_finished_ratio"] > 0
        assert found["claim_scheduled_ratio"] > 0


async def test_wake_up_is_measured_between_two_processes(postgres: RealPostgres) -> None:
    found = await job_wake.measure(postgres.create_database(), wakes=2, idle_seconds=1.0)
    assert 0 < found["wake_least_ms"] <= found["wake_ms"] <= found["wake_most_ms"]
    assert found["idle_statements_per_second"] >= 0


@pytest.mark.long  # make proof runs a moment of each suite
async def test_services_are_measured_with_and_without_the_guard(
    postgres: RealPostgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONCEWARD_HOME", str(tmp_path))
    walked = await walk.measure(postgres.create_database(), 1, 0.1, count=5_000)
    assert {name for name, row in walked.items() if row["ratio"] > 0} == {
        "tree.allocate",
        "step.ingest",
        "energy.spend",
    }
    url = postgres.create_database()
    assert (await asyncio.to_thread(patches.measure, url, 1, 0.1))["ratio"] > 0
    pages = await planning.pages(postgres.create_database(), 1, count=5)
    assert {name: row["pages"] for name, row in pages.items()} == {
        "missions": 5,
        "audit": 5,
        "activities": 5,
    }
    read = await planning.notifications(postgres.create_database(), 1, count=50)
    assert read["ratio"] > 0


@pytest.mark.long  # make proof runs a moment of each suite
async def test_reads_are_measured_with_a_long_and_a_short_history(
    tmp_path: Path, postgres: RealPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEWARD_HOME", str(tmp_path))
    monkeypatch.setattr(histories, "_REQUESTS", 1)
    for url in (postgres.create_database(), f"sqlite:///{tmp_path}/histories.db"):
        found = await histories.measure(url, rows=50, rounds=1)
        assert {path for path, row in found.items() if row["ratio"] > 0} == {
            "/sync",
            "/walker/energy",
            "/api/v1/changes",
        }


def test_measurement_reports_whether_its_target_is_met() -> None:
    row = {"ratio": 0.8, "least": 0.7, "most": 0.9, "per_second": 5}
    assert measurement("p", "n", row, at_least(0.8)).as_json()["met"] is True
    assert measurement("p", "n", row, at_least(0.81)).as_json()["met"] is False
    assert measurement("p", "n", row, at_most(0.8)).as_json()["met"] is True
    assert measurement("p", "n", row, at_most(0.79)).as_json()["met"] is False
    assert measurement("p", "n", row).as_json()["met"] is None
    assert sizes(1_000, 1_000_000) == [1_000, 10_000, 100_000, 1_000_000]


def test_command_keeps_the_results_of_other_suites(tmp_path: Path) -> None:
    kept = {"suite": "walk", "group": "w", "name": "n", "ratio": 1.0, "least": None, "most": None}
    kept |= {"target": "≥ 0.8", "met": True, "figures": {}}
    earlier = {"runs": {"walk": {}}, "measurements": [kept], "curves": []}
    (tmp_path / "latest.json").write_text(json.dumps(earlier))
    command = [
        str(Path(sys.executable).parent / "onceward"),
        "bench",
        "--only",
        "fingerprint",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert [row["suite"] for row in found["measurements"]] == ["walk", "fingerprint"]
    assert found == json.loads((tmp_path / "latest.json").read_text())
    assert (tmp_path / "at-least.svg").read_text().startswith("<svg")


def test_comparison_chart_is_drawn_from_existing_results(tmp_path: Path) -> None:
    def row(group: str, name: str, ratio: float) -> dict[str, object]:
        spread = {"ratio": ratio, "least": ratio / 2, "most": ratio * 2}
        return {"suite": "s", "group": group, "name": name, **spread, "target": None}

    found = {
        "measurements": [
            row("idempotency on PostgreSQL ÷ bare handler", "guarded", 0.84),
            row("outbox, one enqueue ÷ raw commit", "litequeue at FULL", 1.3),
            row("outbox, one enqueue ÷ raw commit", "not in the chart", 9.9),
        ]
    }
    assert plots.draw(found, tmp_path) == [tmp_path / "compare.svg"]
    svg = ET.parse(tmp_path / "compare.svg").getroot()
    texts = [element.text or "" for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "0.84x (0.42 to 1.68)" in texts
    assert "litequeue" in texts
    assert not any("9.9" in text for text in texts)


def test_missed_targets_are_first_and_marked_and_no_label_is_cut(tmp_path: Path) -> None:
    def row(name: str, ratio: float, *, met: bool) -> dict[str, object]:
        return {"group": "a ÷ b", "name": name, "ratio": ratio, "target": "≤ 2", "met": met}

    long = "the median of a neighbour beside two devices that send batches at once " * 2
    found = {"measurements": [row("kept", 1.0, met=True), row(long, 4.0, met=False)]}
    assert plots.draw(found, tmp_path) == [tmp_path / "at-most.svg"]
    text = (tmp_path / "at-most.svg").read_text()
    assert "prefers-color-scheme: dark" in text
    assert text.index(long) < text.index("a: kept")
    assert "missed: 4.00 (≤ 2)" in text
    label = next(
        each for each in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text")
        if long in (each.text or "")
    )  # fmt: skip
    # Wide letters have about seven pixels at this size.
    assert float(label.attrib["x"]) > 7.5 * len(label.text or "")


def test_growth_chart_is_drawn(tmp_path: Path) -> None:
    points = [{"rows": 1000, "us": 5.0, "ratio": 1.0}, {"rows": 10_000, "us": 6.0, "ratio": 1.2}]
    curve = {"suite": "c", "name": "claims", "unit": "jobs", "points": points}
    assert plots.draw({"curves": [curve]}, tmp_path) == [tmp_path / "growth.svg"]
    assert "10,000" in (tmp_path / "growth.svg").read_text()


@pytest.mark.long  # make proof runs a moment of each suite
async def test_pages_of_the_console_are_measured(postgres: RealPostgres) -> None:
    urls = postgres.create_database(), postgres.create_database()
    found = await console.measure_pages(*urls, console.Sizes(500, 100), rounds=1)
    assert {"overview", "records", "one record", "jobs waiting", "system"} <= set(found)
    assert all(row["ratio"] > 0 for row in found.values())


@pytest.mark.long  # make proof runs a moment of each suite
def test_guarded_requests_with_live_pages_is_measured(
    postgres: RealPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "LIVE_SLICES", 1)
    monkeypatch.setattr(console, "LIVE_PAGES", 2)
    found = console.measure_live(postgres.create_database(), 1, 0.5, lambda: None)
    assert found["ratio"] > 0
    assert found["per_second"] > 0
