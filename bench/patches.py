"""A versioned PATCH over HTTP, with the guard and without: one worker, 16 connections, fsync on."""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import planning
from bench.in_process import spread
from bench.races import CONNECTIONS, free_port, wait_until_up

# Each mission is changed once, from version 1; every run of the load takes the next ones.
PER_RUN = 5_000
BODY = b'{"starts_at": "2026-06-01T07:00:00Z", "ends_at": "2026-06-01T15:00:00Z"}'


def app() -> Any:
    """Make the app that uvicorn serves."""
    home = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    office = planning.Office(os.environ["BENCH_DATABASE"], home)
    return office.app


def measure(url: str, rounds: int, seconds: float) -> dict[str, float]:
    """Return guarded ÷ bare, medians of interleaved rounds."""
    with _served(url) as port:
        asyncio.run(planning.fill(url, {"missions": (2 * rounds + 2) * PER_RUN}))
        runs = iter(range(2 * rounds + 2))
        rates: dict[str, list[float]] = {"/v1/missions": [], "/v1/bare": []}
        for path in rates:
            _load(port, path, next(runs), 0.7)
        for number in range(rounds):
            for path in rates if number % 2 == 0 else reversed(rates):
                rates[path].append(_load(port, path, next(runs), seconds))
    guarded, bare = rates.values()
    return spread([g / b for g, b in zip(guarded, bare, strict=True)]) | {
        "guarded_per_second": round(statistics.median(guarded), 1),
        "bare_per_second": round(statistics.median(bare), 1),
    }


@contextmanager
def _served(url: str) -> Iterator[int]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "bench.patches:app", "--factory"]
    command += ["--port", str(port), "--no-access-log", "--log-level", "warning"]
    process = subprocess.Popen(command, env=os.environ | {"BENCH_DATABASE": url})
    try:
        wait_until_up(port)
        yield port
    finally:
        process.terminate()
        process.wait()


def _load(port: int, path: str, run: int, seconds: float) -> float:
    command = [sys.executable, "-m", "bench.patches", str(port), path, str(run), str(seconds)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


async def _run(port: int, path: str, run: int, seconds: float) -> float:
    missions = iter(range(run * PER_RUN + 1, (run + 1) * PER_RUN + 1))
    signed = planning.token()
    started = time.perf_counter()

    async def client() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        done = 0
        while time.perf_counter() < started + seconds:
            head = (
                f"PATCH {path}/{next(missions):08x}-0000-7000-8000-000000000000 HTTP/1.1\r\n"
                f'host: bench\r\nauthorization: Bearer {signed}\r\nif-match: "1"\r\n'
                f"idempotency-key: {uuid.uuid4()}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(BODY)}\r\n\r\n"
            )
            writer.write(head.encode() + BODY)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not answer.startswith(b"http/1.1 200"):
                raise RuntimeError(answer.decode())
            at = answer.index(b"content-length: ") + 16
            await reader.readexactly(int(answer[at : answer.index(b"\r", at)]))
            done += 1
        writer.close()
        return done

    counts = await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    return sum(counts) / (time.perf_counter() - started)


if __name__ == "__main__":
    import uvloop

    port, path, run, seconds = sys.argv[1:5]
    print(uvloop.run(_run(int(port), path, int(run), float(seconds))))
