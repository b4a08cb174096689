"""Guarded against bare, over HTTP: interleaved rounds, one worker, 16 connections, real fsync."""

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

CONNECTIONS = 16


@dataclass
class Contender:
    name: str
    app: str
    database: str
    replay: bool = False
    port: int = 0
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


@contextmanager
def served(contenders: list[Contender]) -> Iterator[None]:
    """Start one server per contender; all of them stay up, only one is loaded at a time."""
    processes = []
    try:
        for contender in contenders:
            contender.port = free_port()
            command = [sys.executable, "-m", "uvicorn", f"bench.apps:{contender.app}", "--factory"]
            command += ["--port", str(contender.port), "--no-access-log", "--log-level", "warning"]
            environment = {**os.environ, "BENCH_DATABASE": contender.database}
            processes.append(subprocess.Popen(command, env=environment))
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
    """Load each contender in turn, round after round, in a process of its own."""
    for contender in contenders:
        _load(contender, 0.7)  # connections, caches and prepared statements warm up
    for number in range(rounds):
        # Every other round backwards: whoever runs first after a checkpoint is not always the same.
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            contender.rates.append(_load(contender, seconds))
            step()


def ratio(one: Contender, other: Contender) -> tuple[float, float, float]:
    """Return the median of the rounds' own ratios, with the smallest and the largest."""
    ratios = [a / b for a, b in zip(one.rates, other.rates, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _load(contender: Contender, seconds: float) -> float:
    command = [sys.executable, "-m", "bench.load", str(contender.port), str(seconds)]
    command += [str(CONNECTIONS), "replay" if contender.replay else "unique"]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


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
    raise RuntimeError(f"nothing answers on port {port}")
