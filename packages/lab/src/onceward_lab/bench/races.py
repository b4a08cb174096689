"""Compares apps over HTTP in interleaved rounds: one worker, 16 connections, real fsync."""

import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SLICES = 4


@dataclass
class Contender:
    name: str
    app: str
    database: str
    replay: bool = False
    # What its rate is divided by; None for the first contender.
    bare: "Contender | None" = None
    port: int = 0
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


# Returns the command that serves a contender on its port.
Command = Callable[[Contender], list[str]]


def uvicorn(contender: Contender) -> list[str]:
    """Return the command for an app of ``onceward_lab.bench.apps``."""
    app = f"onceward_lab.bench.apps:{contender.app}"
    options = ["--port", str(contender.port), "--no-access-log", "--log-level", "warning"]
    return [sys.executable, "-m", "uvicorn", app, "--factory", *options]


def gunicorn(app: str, contender: Contender) -> list[str]:
    """Return the command for a WSGI app: one worker, 16 threads."""
    command = [sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{contender.port}"]
    command += ["--worker-class", "gthread", "--workers", "1", "--threads", "16"]
    return [*command, "--keep-alive", "75", "--log-level", "warning", app]


def compared(
    contenders: list[Contender],
    rounds: int,
    seconds: float,
    step: Callable[[], None],
    command: Command = uvicorn,
) -> dict[str, dict[str, float]]:
    """Serve and load the contenders; return the ratios and rates by their names."""
    with served(contenders, command):
        race(contenders, rounds, seconds, step)
    results = {}
    for contender in contenders:
        middle, least, most = ratio(contender, contender.bare or contenders[0])
        results[contender.name] = {
            "ratio": round(middle, 3),
            "least": round(least, 3),
            "most": round(most, 3),
            "per_second": round(contender.median, 1),
        }
    return results


@contextmanager
def served(contenders: list[Contender], command: Command = uvicorn) -> Iterator[None]:
    """Start one server per contender; all stay up, and one at a time is under load."""
    processes = []
    try:
        for contender in contenders:
            contender.port = free_port()
            own = {"BENCH_DATABASE": contender.database, "BENCH_APP": contender.app}
            processes.append(subprocess.Popen(command(contender), env=os.environ | own))
        for contender in contenders:
            wait_until_up(contender.port)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def race(
    contenders: list[Contender], rounds: int, seconds: float, step: Callable[[], None]
) -> None:
    """Load the contenders in turns.

    A round consists of short alternating slices, so that other load on the machine hits all.
    """
    with load_generator() as load:
        for contender in contenders:
            load(contender, 0.7)  # warms up connections, caches and prepared statements
        for _ in range(rounds):
            done = [(0, 0.0) for _ in contenders]
            for number in range(SLICES):
                turns = list(enumerate(contenders))
                for at, contender in turns if number % 2 == 0 else reversed(turns):
                    count, took = load(contender, seconds / SLICES)
                    done[at] = done[at][0] + count, done[at][1] + took
            for contender, (count, took) in zip(contenders, done, strict=True):
                contender.rates.append(count / took)
                step()


def ratio(one: Contender, other: Contender) -> tuple[float, float, float]:
    """Return the median, smallest and largest ratio of the rounds."""
    ratios = [a / b for a, b in zip(one.rates, other.rates, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


@contextmanager
def load_generator() -> Iterator[Callable[[Contender, float], tuple[int, float]]]:
    """Start the load generator as a subprocess; yields a function that runs one task."""
    command = [sys.executable, "-m", "onceward_lab.bench.load"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    tasks, results = process.stdin, process.stdout
    assert tasks is not None
    assert results is not None

    def load(contender: Contender, seconds: float) -> tuple[int, float]:
        kind = "replay" if contender.replay else "unique"
        tasks.write(f"{contender.port} {seconds} {kind}\n")
        tasks.flush()
        result = results.readline().split()
        if not result:
            raise RuntimeError(f"the load generator ended during {contender.name}")
        return int(result[0]), float(result[1])

    try:
        yield load
    finally:
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_up(port: int) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=1).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"no server responds on port {port}")
