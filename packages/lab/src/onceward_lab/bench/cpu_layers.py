"""CPU time of one guarded request by layer, in microseconds, and ÷ that of another commit.

Each app of ``cpu_server`` has one layer more than the one before it. The kernel counts the CPU time
of their processes under the same load; the difference between two apps is the cost of a layer.
Other load on the machine delays a process but is not counted as its CPU time, so these figures vary
less than rates do.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from onceward_lab.bench.environment import Environment
from onceward_lab.bench.idempotency import create_orders
from onceward_lab.bench.measurements import Measurement, at_most, measurement
from onceward_lab.bench.races import Contender, free_port, load_generator
from onceward_testing.servers import RealPostgres

__all__ = ["LAYERS", "CpuApp", "measure", "measure_apps", "results", "tree_of"]

SERVER = Path(__file__).with_name("cpu_server.py")
WARM_UP_SECONDS = 0.7
START_SECONDS = 30.0

# A layer is the first app without the second one.
LAYERS: Mapping[str, tuple[str, str | None]] = {
    "event loop and sockets": ("sockets", None),
    "HTTP (uvicorn)": ("http", "sockets"),
    "FastAPI": ("fastapi", "http"),
    "guard and hashes": ("guard", "fastapi"),
    "store, PostgreSQL": ("guarded_postgres", "guard"),
    "store, SQLite": ("guarded_sqlite", "guard"),
    "all, PostgreSQL": ("guarded_postgres", None),
    "all, SQLite": ("guarded_sqlite", None),
    "all, PostgreSQL, without the direct caller": ("guarded_postgres_by_fastapi", None),
    "all, PostgreSQL, without the guard": ("bare_postgres", None),
}
# Measured with the other commit, too, which has no direct caller: by the app of the other commit.
COMPARED = {
    "guarded_postgres": "guarded_postgres",
    "guarded_postgres_by_fastapi": "guarded_postgres",
    "guarded_sqlite": "guarded_sqlite",
    "guard": "guard",
}
TARGETS = {"guarded_postgres": 0.75, "guarded_postgres_by_fastapi": 0.85}


@dataclass
class CpuApp:
    """One app in one process, and what its requests have cost."""

    name: str
    # The checkout whose ``onceward`` it uses.
    tree: Path
    database: str = ""
    port: int = 0
    pid: int = 0
    # Microseconds per request of each round: of the process, and of PostgreSQL's processes.
    microseconds: list[float] = field(default_factory=list)
    database_microseconds: list[float] = field(default_factory=list)


def tree_of(path: Path) -> Path:
    """Return the sources of ``onceward`` in a checkout. Raises ``ValueError`` if it has none."""
    sources = path.resolve() / "packages" / "onceward" / "src"
    if not (sources / "onceward" / "__init__.py").is_file():
        raise ValueError(f"{path} is not a checkout: it has no packages/onceward/src/onceward")
    return sources


def measure(environment: Environment) -> list[Measurement]:
    """Measure all layers, and the compared apps also with ``environment.baseline``."""
    ours = Path(__file__).resolve().parents[4] / "onceward" / "src"
    apps = {app: CpuApp(app, ours) for app, _ in LAYERS.values()}
    before: dict[str, CpuApp] = {}
    if environment.baseline is not None:
        others = {app: CpuApp(app, environment.baseline) for app in set(COMPARED.values())}
        before = {name: others[app] for name, app in COMPARED.items()}
    everything = [*apps.values(), *{id(app): app for app in before.values()}.values()]
    for number, app in enumerate(everything):
        if "postgres" in app.name:
            app.database = environment.database()
            asyncio.run(create_orders(app.database))
        elif "sqlite" in app.name:
            app.database = f"sqlite:///{environment.new_directory(f'cpu-{number}')}/cpu.db"
    measure_apps(everything, environment.server, 2 * environment.rounds, environment.seconds)
    return results(apps, before)


def results(apps: Mapping[str, CpuApp], before: Mapping[str, CpuApp]) -> list[Measurement]:
    """Return the costs of the layers, and the ratios to the same apps of another commit."""
    return [*_by_layer(apps), *_compared(apps, before)]


def measure_apps(
    apps: Sequence[CpuApp], postgres: RealPostgres, rounds: int, seconds: float
) -> None:
    """Load the apps in turns, and add the CPU time per request of each round to them."""
    with _served(apps), load_generator() as load:

        def run(app: CpuApp, seconds: float) -> int:
            return load(Contender(app.name, app.name, app.database, port=app.port), seconds)[0]

        for app in apps:
            run(app, WARM_UP_SECONDS)
        for number in range(rounds):
            for app in apps if number % 2 == 0 else reversed(apps):
                backends = _backends(postgres)
                started, started_backends = _cpu_seconds([app.pid]), _cpu_seconds(backends)
                count = run(app, seconds)
                used = _cpu_seconds([app.pid]) - started
                used_backends = _cpu_seconds(backends) - started_backends
                app.microseconds.append(1e6 * used / count)
                app.database_microseconds.append(1e6 * used_backends / count)


def _by_layer(apps: Mapping[str, CpuApp]) -> Iterator[Measurement]:
    whole = statistics.median(apps["guarded_postgres"].microseconds)
    for name, (app, without) in LAYERS.items():
        cost = statistics.median(apps[app].microseconds)
        if without is not None:
            cost -= statistics.median(apps[without].microseconds)
        row: dict[str, Any] = {"ratio": round(cost / whole, 3), "microseconds": round(cost, 1)}
        if without is None and apps[app].database.startswith("postgresql"):
            of_database = statistics.median(apps[app].database_microseconds)
            row["database_microseconds"] = round(of_database, 1)
        yield measurement("CPU of a request on the server ÷ all, PostgreSQL", name, row)


def _compared(apps: Mapping[str, CpuApp], before: Mapping[str, CpuApp]) -> Iterator[Measurement]:
    pairs = {f"{name} ÷ baseline": (apps[name], old) for name, old in before.items()}
    pairs["guarded ÷ bare, PostgreSQL"] = apps["guarded_postgres"], apps["bare_postgres"]
    for name, (one, other) in pairs.items():
        ratios = [a / b for a, b in zip(one.microseconds, other.microseconds, strict=True)]
        row = {
            "ratio": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
            "microseconds": round(statistics.median(one.microseconds), 1),
        }
        most = TARGETS.get(name.removesuffix(" ÷ baseline"))
        target = None if most is None else at_most(most)
        yield measurement("CPU of a guarded request on the server", name, row, target)


@contextmanager
def _served(apps: Sequence[CpuApp]) -> Iterator[None]:
    """Start one process per app; all stay up, and one at a time is under load."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for app in apps:
            app.port = free_port()
            own = {"BENCH_DATABASE": app.database, "PYTHONPATH": str(app.tree)}
            command = [sys.executable, "-P", str(SERVER), app.name, str(app.port)]
            processes.append(subprocess.Popen(command, env=os.environ | own))
            app.pid = processes[-1].pid
        for app, process in zip(apps, processes, strict=True):
            _wait_until_up(app, process)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _wait_until_up(app: CpuApp, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", app.port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"the app {app.name} of {app.tree} does not start")


def _backends(postgres: RealPostgres) -> list[int]:
    if postgres.pid is None:
        return []
    return [child.pid for child in psutil.Process(postgres.pid).children()]


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time that processes have used; those that have ended count as zero."""
    used = 0.0
    for pid in pids:
        try:
            used += _CPU_SECONDS(pid)
        except (OSError, psutil.Error):
            continue
    return used


def _read_clock(pid: int) -> float:
    # Linux: the CPU clock of another process, as clock_getcpuclockid(3) returns it.
    return time.clock_gettime((~pid << 3) | 2)


def _read_times(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


_CPU_SECONDS: Callable[[int], float] = _read_clock if sys.platform == "linux" else _read_times
