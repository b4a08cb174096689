"""Batches compared with one request per entry, over HTTP, and what a neighbour notices of them.

The device of the targets is alone on the server, as in the comparisons over a slow link: it waits
for each response before it sends the next request. Several devices at once share one core of the
server, so there a batch saves CPU time only, and no waiting.
"""

import asyncio
import os
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from onceward.sign_in.jwt_auth import mint_token
from onceward_lab.bench.environment import Environment
from onceward_lab.bench.idempotency import CREATE, create_orders
from onceward_lab.bench.in_process import spread
from onceward_lab.bench.measurements import Measurement, Target, at_least, at_most, measurement
from onceward_lab.bench.races import free_port, wait_until_up

__all__ = ["measure"]

SEVERAL = 4
NEIGHBOURS = 2
SLICES = 3
SECRET = "a secret for benchmarks, long enough for HS256"


@dataclass(frozen=True)
class Server:
    """One app on one database."""

    name: str
    app: str
    url: str
    kind: str
    # Entries of one device in batches ÷ one by one.
    target: Target | None
    # The median of single requests beside two devices with batches ÷ alone.
    beside: Target | None = None


Load = Callable[[str, float, int], tuple[float, float, float]]


def measure(environment: Environment) -> list[Measurement]:
    """Return the ratios of batches and of neighbours."""
    postgres = environment.database()
    asyncio.run(create_orders(postgres))
    services = environment.database()
    directory = environment.new_directory("batch")
    path = directory / "orders.db"
    with sqlite3.connect(path) as db:
        db.execute(CREATE)
    db.close()
    sqlite = f"sqlite:///{path}"
    servers = [
        Server("PostgreSQL", "batching_by_fastapi", postgres, "orders", at_least(2.0)),
        Server(
            *("PostgreSQL, direct caller", "batching", postgres, "orders"),
            at_least(2.8),
            at_most(2.0),
        ),
        Server("SQLite", "batching", sqlite, "orders", at_least(2.2), at_most(5.0)),
        Server(
            "services' activities, PostgreSQL", "services", services, "activities", at_least(1.6)
        ),
    ]
    found: list[Measurement] = []
    for server in servers:
        environment.on_step(server.name)
        found += _measure_one(server, environment, directory)
    return found


def _measure_one(server: Server, environment: Environment, home: Path) -> list[Measurement]:
    group = "batch of 50 ÷ one request per entry"
    rates: dict[int, list[dict[str, float]]] = {1: [], SEVERAL: []}
    beside = []
    with ExitStack() as stack:
        load = stack.enter_context(_served(server, home))
        for mode in ("single", "batch"):
            load(mode, 1.0, SEVERAL)  # warms up connections, caches and prepared statements
        for _ in range(environment.rounds):
            for devices, found in rates.items():
                found.append(_rates(load, environment.seconds, devices))
            if server.beside is not None:
                alone = load("single", environment.seconds, 1)[2]
                beside.append(load("beside", environment.seconds, NEIGHBOURS)[2] / alone)
    measurements = [
        measurement(group, server.name, _row(rates[1]), server.target),
        measurement(group, f"{server.name}, {SEVERAL} devices at once", _row(rates[SEVERAL])),
    ]
    if server.beside is not None:
        name = f"{server.name}: median of a neighbour beside two batching devices ÷ alone"
        measurements.append(measurement(group, name, spread(beside), server.beside))
    return measurements


def _rates(load: Load, seconds: float, devices: int) -> dict[str, float]:
    """Return the entries per second of both ways to send, interleaved."""
    entries = {"single": 0.0, "batch": 0.0}
    took = dict(entries)
    for turn in range(SLICES):
        modes = list(entries)
        for mode in modes if turn % 2 == 0 else reversed(modes):
            count, spent, _ = load(mode, seconds, devices)
            entries[mode] += count
            took[mode] += spent
    return {mode: entries[mode] / took[mode] for mode in entries}


def _row(rates: list[dict[str, float]]) -> dict[str, float]:
    return {
        **spread([rate["batch"] / rate["single"] for rate in rates]),
        "batch_per_second": round(statistics.median(r["batch"] for r in rates), 1),
        "single_per_second": round(statistics.median(r["single"] for r in rates), 1),
    }


@contextmanager
def _served(server: Server, home: Path) -> Iterator[Load]:
    """Start a server and a load generator; yield a function that runs one task."""
    port = free_port()
    token = mint_token(SECRET, sub="ada", lifetime=timedelta(hours=2), now=datetime.now(UTC))
    own = {"BENCH_DATABASE": server.url, "BENCH_TOKEN": token}
    command = [sys.executable, "-m", "uvicorn", f"onceward_lab.bench.batch_apps:{server.app}"]
    command += ["--factory", "--port", str(port), "--no-access-log", "--log-level", "warning"]
    environment = os.environ | own | {"ONCEWARD_JWT_SECRET": SECRET, "ONCEWARD_HOME": str(home)}
    serving = subprocess.Popen(command, env=environment)
    loading = subprocess.Popen(
        [sys.executable, "-m", "onceward_lab.bench.batch_load"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    tasks, results = loading.stdin, loading.stdout
    assert tasks is not None
    assert results is not None

    def load(mode: str, seconds: float, connections: int) -> tuple[float, float, float]:
        tasks.write(f"{port} {seconds} {mode} {connections} {server.kind}\n")
        tasks.flush()
        result = results.readline().split()
        if not result:
            raise RuntimeError(f"the load generator ended during {server.name}, {mode}")
        return float(result[0]), float(result[1]), float(result[2])

    try:
        wait_until_up(port)
        yield load
    finally:
        loading.communicate()
        serving.terminate()
        serving.wait()
