"""Every part of the benchmark, and the lines and curves it draws. One function each."""

import asyncio
from collections.abc import Callable, Sequence

import uvloop

from holdfast_lab.bench import (
    fingerprint,
    growth,
    idempotency,
    job_growth,
    job_wake,
    jobs,
    outbox_lines,
    patches,
    planning,
    walk,
)
from holdfast_lab.bench.curves import Curve
from holdfast_lab.bench.lines import Line, at_least, at_most, line
from holdfast_lab.bench.world import World

__all__ = ["PARTS"]


# The intake is what all else stands on, and over HTTP it swings most: twice the rounds for it.
def on_postgres(world: World) -> list[Line]:
    found = idempotency.postgres(world.database(), 2 * world.rounds, world.seconds, lambda: None)
    part = "intake on PostgreSQL ÷ bare insert"
    targets = {
        "guarded": at_least(0.75),
        "replays from the store": at_least(1.0),
        "replays from memory": at_least(3.0),
    }
    return [line(part, name, row, targets.get(name)) for name, row in found.items()]


def on_sqlite(world: World) -> list[Line]:
    folder = world.new_folder("intake")
    found = idempotency.sqlite(folder, 2 * world.rounds, world.seconds, lambda: None)
    part = "intake on SQLite ÷ bare insert"
    targets = {
        "guarded": at_least(0.80),
        "replays from the store": at_least(1.0),
        "replays from memory": at_least(3.0),
    }
    return [line(part, name, row, targets.get(name)) for name, row in found.items()]


def of_a_fingerprint(_world: World) -> list[Line]:
    row = fingerprint.measure()
    return [line("fingerprint", "2 KB body ÷ parsing and hashing it", row, at_most(3.0))]


def of_records(world: World) -> list[Line | Curve]:
    """Look-up beside half of the records, and beside ever more of them."""
    urls, folder = (world.database(), world.database()), str(world.new_folder("records"))
    found: list[Line | Curve] = []
    measured = asyncio.run(growth.measure(*urls, folder, world.rows, world.say))
    for name, (figures, points) in measured.items():
        row = {"ratio": figures["lookup_ratio"], **figures}
        told = f"{name}: look-up with {figures['rows']:,} records ÷ with none"
        found.append(line("records", told, row, at_most(1.3)))
        # What every fresh request pays: a look for a key that is not there.
        found.append(Curve(f"look-up of a key, {name}", "records", points))
    return found


def of_jobs(world: World) -> list[Line]:
    found = jobs.postgres(world.server, rounds=world.rounds, seconds=world.seconds)
    found |= jobs.sqlite(world.new_folder("jobs"), rounds=world.rounds)
    parts = {
        "jobs_enqueue_1": ("enqueue in a transaction, 1 connection ÷ best peer", at_least(1.0)),
        "jobs_enqueue_8": ("enqueue in a transaction, 8 connections ÷ best peer", at_least(1.0)),
        "jobs_worked": ("no-op jobs worked ÷ best peer", at_least(1.0)),
        "jobs_that_write": ("jobs that write a row ÷ best peer", None),
        "jobs_sqlite": ("jobs on SQLite ÷ raw claim and completion", at_least(0.5)),
    }
    lines = []
    for key, (part, target) in parts.items():
        ours = {
            name: row["ratio"]
            for name, row in found[key].items()
            if "Holdfast" in name and "without" not in name
        }
        best = max(ours, key=lambda name: ours[name])
        for name, row in found[key].items():
            lines.append(line(part, name, row, target if name == best else None))
    return lines


def of_idle_workers(world: World) -> list[Line]:
    """How soon a sleeping worker hears of a job: milliseconds, of which 50 are allowed."""
    lines = []
    for name, url in (
        ("PostgreSQL", world.database()),
        ("SQLite", f"sqlite:///{world.new_folder('wake')}/wake.db"),
    ):
        found = uvloop.run(job_wake.measure(url))
        row = {"ratio": found["wake_ms"] / 50, **found}
        lines.append(line("jobs, idle", f"{name}: wake-up ÷ 50 ms", row, at_most(1.0)))
    return lines


def of_many_jobs(world: World) -> list[Line | Curve]:
    rows = min(world.rows, job_growth.ROWS)
    world.say(f"claiming beside {rows:,} other jobs")
    on_postgres, points = asyncio.run(
        job_growth.postgres([world.database() for _ in range(3)], rows)
    )
    on_sqlite = asyncio.run(job_growth.sqlite(world.new_folder("claims"), rows))
    lines: list[Line | Curve] = []
    for name, found in (("PostgreSQL", on_postgres), ("SQLite", on_sqlite)):
        for what in ("finished", "later"):
            row = {
                "ratio": found[f"claim_{what}_ratio"],
                "least": found[f"claim_{what}_ratio_least"],
                "most": found[f"claim_{what}_ratio_most"],
                "claim_ms": found[f"claim_{what}_ms"],
            }
            told = f"{name}: claim beside {rows:,} {what} jobs ÷ beside none"
            lines.append(line("jobs, many", told, row, at_most(1.3)))
    return [*lines, Curve("claim of 16 jobs, PostgreSQL", "finished jobs", points)]


def of_walk(world: World) -> list[Line]:
    found = uvloop.run(walk.measure(world.database(), world.rounds, world.seconds))
    part = "walk on PostgreSQL"
    lines = [
        line(part, f"{name}, guarded ÷ bare", row, at_least(0.8)) for name, row in found.items()
    ]
    old = uvloop.run(walk.history(world.database()))
    return [*lines, line(part, "walker with a history of 10,000 ÷ a new one", old, at_most(1.3))]


def of_planning(world: World) -> list[Line]:
    part = "planning and field on PostgreSQL"
    row = patches.measure(world.database(), world.rounds, world.seconds)
    lines = [line(part, "versioned PATCH, guarded ÷ bare", row, at_least(0.75))]
    world.say("turning ten thousand pages")
    for name, found in uvloop.run(planning.pages(world.database(), 40)).items():
        told = f"{name}: page {found['pages_turned']:,} ÷ page 1"
        lines.append(line(part, told, found, at_most(1.3)))
    return lines


def of_the_outbox(world: World) -> list[Line | Curve]:
    return outbox_lines.lines(world)


PARTS: dict[str, Callable[[World], Sequence[Line | Curve]]] = {
    "postgres": on_postgres,
    "sqlite": on_sqlite,
    "fingerprint": of_a_fingerprint,
    "jobs": of_jobs,
    "idle": of_idle_workers,
    "walk": of_walk,
    "planning": of_planning,
    "outbox": of_the_outbox,
    "records": of_records,
    "many-jobs": of_many_jobs,
}
