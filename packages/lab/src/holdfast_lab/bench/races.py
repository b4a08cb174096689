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

SLICES = 4


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
            command = [
                sys.executable,
                "-m",
                "uvicorn",
                f"holdfast_lab.bench.apps:{contender.app}",
                "--factory",
            ]
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
    """Load each contender by turns.

    A round is short slices by turns: what else the machine does in that second hits them all.
    """
    with _the_load() as load:
        for contender in contenders:
            load(contender, 0.7)  # connections, caches and prepared statements warm up
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
    """Return the median of the rounds' own ratios, with the smallest and the largest."""
    ratios = [a / b for a, b in zip(one.rates, other.rates, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


@contextmanager
def _the_load() -> Iterator[Callable[[Contender, float], tuple[int, float]]]:
    """Start the process that loads: it takes nothing from the server's, and starts only once."""
    command = [sys.executable, "-m", "holdfast_lab.bench.load"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    told, answers = process.stdin, process.stdout
    assert told is not None
    assert answers is not None

    def load(contender: Contender, seconds: float) -> tuple[int, float]:
        kind = "replay" if contender.replay else "unique"
        told.write(f"{contender.port} {seconds} {kind}\n")
        told.flush()
        answer = answers.readline().split()
        if not answer:
            raise RuntimeError(f"the load of {contender.name} ended")
        return int(answer[0]), float(answer[1])

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
    raise RuntimeError(f"nothing answers on port {port}")
