"""The benchmark suites: each function returns the measurements and curves of one suite."""

import asyncio
from collections.abc import Callable, Sequence

import uvloop

from onceward_lab.bench import (
    batch,
    console,
    cpu_layers,
    fingerprint,
    growth,
    histories,
    idempotency,
    job_growth,
    job_wake,
    jobs,
    outbox_suite,
    patches,
    planning,
    sync_frameworks,
    walk,
)
from onceward_lab.bench.curves import Curve
from onceward_lab.bench.environment import Environment
from onceward_lab.bench.measurements import Measurement, at_least, at_most, measurement

__all__ = ["SUITES"]


# Twice the rounds for the two idempotency suites: over HTTP the ratios vary most.
def measure_postgres(environment: Environment) -> list[Measurement]:
    found = idempotency.postgres(
        environment.database(), 2 * environment.rounds, environment.seconds, lambda: None
    )
    targets = {
        "guarded": at_least(0.8),
        "replays from the store": at_least(1.0),
        "replays from memory": at_least(3.0),
    }
    return [
        measurement("idempotency on PostgreSQL ÷ bare handler", name, row, targets.get(name))
        for name, row in found.items()
    ]


def measure_sqlalchemy(environment: Environment) -> list[Measurement]:
    """One insert by the ORM, in a session per request, on PostgreSQL."""
    found = idempotency.sqlalchemy(
        environment.database(), 2 * environment.rounds, environment.seconds, lambda: None
    )
    targets = {"guarded": at_least(0.7), "guarded, claimed late": at_least(0.7)}
    return [
        measurement("sqlalchemy async guarded ÷ bare", name, row, targets.get(name))
        for name, row in found.items()
    ]


def measure_sqlite(environment: Environment) -> list[Measurement]:
    directory = environment.new_directory("idempotency")
    found = idempotency.sqlite(directory, 2 * environment.rounds, environment.seconds, lambda: None)
    targets = {
        "guarded": at_least(0.80),
        "replays from the store": at_least(1.0),
        "replays from memory": at_least(3.0),
    }
    return [
        measurement("idempotency on SQLite ÷ bare handler", name, row, targets.get(name))
        for name, row in found.items()
    ]


def measure_flask(environment: Environment) -> list[Measurement]:
    found = sync_frameworks.flask(
        environment.database(), 2 * environment.rounds, environment.seconds, lambda: None
    )
    return [
        measurement(
            "sync handlers (Flask, one insert, PostgreSQL) ÷ bare",
            name,
            row,
            at_least(0.7) if name.endswith("guarded") else None,
        )
        for name, row in found.items()
    ]


def measure_django(environment: Environment) -> list[Measurement]:
    found = sync_frameworks.django(
        environment.database, 2 * environment.rounds, environment.seconds, lambda: None
    )
    targets = {"guarded": at_least(0.70)}
    return [
        measurement("Django on PostgreSQL ÷ bare view", name, row, targets.get(name))
        for name, row in found.items()
    ]


def measure_fingerprint(_environment: Environment) -> list[Measurement]:
    row = fingerprint.measure()
    return [measurement("fingerprint", "2 KB body ÷ parsing and hashing it", row, at_most(3.0))]


def measure_records(environment: Environment) -> list[Measurement | Curve]:
    """Look-ups of unknown keys, which every new request needs, as the table grows."""
    urls = environment.database(), environment.database()
    directory = str(environment.new_directory("records"))
    found: list[Measurement | Curve] = []
    measured = asyncio.run(growth.measure(*urls, directory, environment.rows, environment.on_step))
    for database, (figures, points) in measured.items():
        row = {"ratio": figures["lookup_ratio"], **figures}
        name = f"{database}: look-up with {figures['rows']:,} records ÷ with none"
        found.append(measurement("records", name, row, at_most(1.3)))
        found.append(Curve(f"look-up of a key, {database}", "records", points))
    return found


def measure_jobs(environment: Environment) -> list[Measurement]:
    found = jobs.postgres(
        environment.server, rounds=environment.rounds, seconds=environment.seconds
    )
    found |= jobs.sqlite(environment.new_directory("jobs"), rounds=environment.rounds)
    groups = {
        "jobs_enqueue_1": ("enqueue in a transaction, 1 connection ÷ best peer", at_least(1.0)),
        "jobs_enqueue_8": ("enqueue in a transaction, 8 connections ÷ best peer", at_least(1.0)),
        "jobs_worked": ("no-op jobs ÷ best peer", at_least(1.0)),
        "jobs_that_write": ("jobs that write a row ÷ best peer", at_least(1.0)),
        "jobs_sqlite": ("jobs on SQLite ÷ raw claim and completion", at_least(0.5)),
    }
    measurements = []
    for key, (group, target) in groups.items():
        ours = {
            name: row["ratio"]
            for name, row in found[key].items()
            if "Onceward" in name and "without" not in name
        }
        best = max(ours, key=lambda name: ours[name])
        for name, row in found[key].items():
            measurements.append(measurement(group, name, row, target if name == best else None))
    return measurements


def measure_idle_workers(environment: Environment) -> list[Measurement]:
    """Milliseconds until an idle worker starts a job, ÷ the limit of 50."""
    measurements = []
    for name, url in (
        ("PostgreSQL", environment.database()),
        ("SQLite", f"sqlite:///{environment.new_directory('wake')}/wake.db"),
    ):
        found = uvloop.run(job_wake.measure(url))
        row = {"ratio": found["wake_ms"] / 50, **found}
        measurements.append(
            measurement("jobs, idle", f"{name}: wake-up ÷ 50 ms", row, at_most(1.0))
        )
    return measurements


def measure_many_jobs(environment: Environment) -> list[Measurement | Curve]:
    rows = min(environment.rows, job_growth.ROWS)
    environment.on_step(f"claims with {rows:,} other jobs")
    on_postgres, points = asyncio.run(
        job_growth.postgres([environment.database() for _ in range(3)], rows)
    )
    on_sqlite = asyncio.run(job_growth.sqlite(environment.new_directory("claims"), rows))
    measurements: list[Measurement | Curve] = []
    for database, found in (("PostgreSQL", on_postgres), ("SQLite", on_sqlite)):
        for state in ("finished", "scheduled"):
            row = {
                "ratio": found[f"claim_{state}_ratio"],
                "least": found[f"claim_{state}_ratio_least"],
                "most": found[f"claim_{state}_ratio_most"],
                "claim_ms": found[f"claim_{state}_ms"],
            }
            name = f"{database}: claim with {rows:,} {state} jobs ÷ with none"
            measurements.append(measurement("jobs, many", name, row, at_most(1.3)))
    return [*measurements, Curve("claim of 16 jobs, PostgreSQL", "finished jobs", points)]


def measure_walk(environment: Environment) -> list[Measurement]:
    found = uvloop.run(
        walk.measure(environment.database(), environment.rounds, environment.seconds)
    )
    group = "walk on PostgreSQL"
    measurements = [
        measurement(group, f"{name}, guarded ÷ bare", row, at_least(0.8))
        for name, row in found.items()
    ]
    history = uvloop.run(walk.history(environment.database()))
    name = "walker with a history of 10,000 ÷ a new one"
    return [*measurements, measurement(group, name, history, at_most(1.3))]


def measure_planning(environment: Environment) -> list[Measurement]:
    group = "planning and field on PostgreSQL"
    row = patches.measure(environment.database(), environment.rounds, environment.seconds)
    measurements = [measurement(group, "versioned PATCH, guarded ÷ bare", row, at_least(0.75))]
    environment.on_step("reading ten thousand pages")
    for resource, found in uvloop.run(planning.pages(environment.database(), 40)).items():
        name = f"{resource}: page {found['pages']:,} ÷ page 1"
        measurements.append(measurement(group, name, found, at_most(1.3)))
    environment.on_step("a person with a million notifications")
    row = uvloop.run(planning.notifications(environment.database(), 40))
    name = f"notifications of a person with {row['notifications']:,} ÷ with 1"
    measurements.append(measurement(group, name, row, at_most(1.3)))
    return measurements


def measure_histories(environment: Environment) -> list[Measurement]:
    """Reads of a user with a long history ÷ those of users with one row."""
    rows = min(environment.rows, histories.ROWS)
    urls = {
        "PostgreSQL": environment.database(),
        "SQLite": f"sqlite:///{environment.new_directory('histories')}/histories.db",
    }
    measurements = []
    for database, url in urls.items():
        environment.on_step(f"{database}: a history of {rows:,} rows")
        found = uvloop.run(histories.measure(url, rows, 5 * environment.rounds))
        for path, row in found.items():
            name = f"{database}: GET {path} with {rows:,} rows ÷ with 1"
            measurements.append(measurement("histories", name, row, at_most(1.3)))
    return measurements


SUITES: dict[str, Callable[[Environment], Sequence[Measurement | Curve]]] = {
    "postgres": measure_postgres,
    "sqlalchemy": measure_sqlalchemy,
    "sqlite": measure_sqlite,
    "flask": measure_flask,
    "django": measure_django,
    "cpu": cpu_layers.measure,
    "fingerprint": measure_fingerprint,
    "jobs": measure_jobs,
    "idle": measure_idle_workers,
    "walk": measure_walk,
    "histories": measure_histories,
    "planning": measure_planning,
    "batch": batch.measure,
    "outbox": outbox_suite.measure,
    "batch-drain": outbox_suite.measure_batches,
    "records": measure_records,
    "many-jobs": measure_many_jobs,
    "console": console.measure,
}
