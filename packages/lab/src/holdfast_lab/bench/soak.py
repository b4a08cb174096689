"""A soak test at 70 % of the maximum rate, with sweeper, Redis and workers.

``python -m holdfast_lab.bench.soak --seconds 900`` starts ``holdfast serve`` on PostgreSQL and
Redis, measures its maximum rate, then sends 70 % of that at a steady rate, even if responses are
late, and reports 5xx responses, latency percentiles by window, and memory.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
import uvloop
from rich.console import Console
from rich.progress import Progress

from holdfast.server.jwt_auth import mint_token
from holdfast.testing.servers import RealPostgres, RealRedis
from holdfast_lab.bench.races import free_port, wait_until_up

CONNECTIONS = 32
SHARE = 0.7
WINDOWS = 10
EXPIRED = 200_000
_EXPIRED = """
INSERT INTO holdfast_idempotency_records
SELECT 'old-' || n % 1000, 'POST /old', gen_random_uuid()::text, repeat('a', 64), repeat('b', 64),
       201, convert_to(repeat('x', 80), 'UTF8'), '{"content-type":"application/json"}'::jsonb,
       repeat('r', 32), repeat('r', 32), NULL, now(), now() + n * interval '4 milliseconds'
  FROM generate_series(1, $1::bigint) AS n
"""


class Traffic:
    """A mix of requests: mostly new activities, some projects and retries, few routes."""

    def __init__(self, secret: str) -> None:
        now, lifetime = datetime.now(UTC), timedelta(hours=6)
        self._tokens = [
            mint_token(
                secret, sub=f"user-{n}", org=f"org-{n}", roles=[], lifetime=lifetime, now=now
            )
            for n in range(200)
        ]
        self._sent: list[bytes] = []

    def next(self) -> bytes:
        chance = random.random()
        if chance < 0.1 and self._sent:
            return random.choice(self._sent)  # a retry: same key, same body
        token = random.choice(self._tokens)
        if chance < 0.3:
            body = {"name": f"project {random.random()}"}
            request = _request("/v1/projects", token, body)
        elif chance < 0.305:
            start = {"lat": 52.23 + random.random() / 50, "lon": 21.01 + random.random() / 50}
            body = {"start": start, "minutes": 60, "interests": ["parks"]}
            request = _request("/api/v1/routes", token, body)
        else:
            body = {"title": f"visit {random.random()}", "note": "at the north gate " * 6}
            request = _request("/api/v1/activities", token, body)
        if len(self._sent) < 5_000:
            self._sent.append(request)
        else:
            self._sent[random.randrange(5_000)] = request
        return request


def _request(path: str, token: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {token}\r\n"
        f"content-type: application/json\r\nidempotency-key: {uuid.uuid4()}\r\n"
        f"content-length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text


class Load:
    """Sends requests and records the latency of each response."""

    def __init__(self, port: int, traffic: Traffic) -> None:
        self._port = port
        self._traffic = traffic
        self.responses: list[tuple[float, float, int]] = []  # time, seconds, status

    async def run_at_maximum(self, seconds: float) -> float:
        """Send as fast as responses arrive; returns requests per second."""
        until = time.perf_counter() + seconds

        async def client() -> int:
            stream = await asyncio.open_connection("127.0.0.1", self._port)
            count = 0
            while time.perf_counter() < until:
                await _send(stream, self._traffic.next())
                count += 1
            stream[1].close()
            return count

        counts = await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
        return sum(counts) / seconds

    async def steady(self, rate: float, seconds: float) -> None:
        """Send at this pace. Time runs from when a request was due, not from when it was sent."""
        due: asyncio.Queue[float | None] = asyncio.Queue()

        async def client() -> None:
            stream = await asyncio.open_connection("127.0.0.1", self._port)
            while (at := await due.get()) is not None:
                status = await _send(stream, self._traffic.next())
                now = time.perf_counter()
                self.responses.append((at, now - at, status))
            stream[1].close()

        clients = [asyncio.create_task(client()) for _ in range(CONNECTIONS)]
        started = time.perf_counter()
        sent = 0
        while (elapsed := time.perf_counter() - started) < seconds:
            while sent < elapsed * rate:
                due.put_nowait(started + sent / rate)
                sent += 1
            await asyncio.sleep(0.002)
        for _ in clients:
            due.put_nowait(None)
        await asyncio.gather(*clients)


async def _send(stream: Any, request: bytes) -> int:
    reader, writer = stream
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    at = head.index(b"content-length: ") + 16
    await reader.readexactly(int(head[at : head.index(b"\r", at)]))
    return int(head[9:12])


async def soak(url: str, redis: str, seconds: float, directory: Path) -> dict[str, Any]:
    secret = secrets.token_hex(32)
    port = free_port()
    environment = os.environ | {
        "HOLDFAST_JWT_SECRET": secret,
        "HOLDFAST_HOME": str(directory),
        "HOLDFAST_LOG_LEVEL": "ERROR",
        "HOLDFAST_SWEEP_EVERY_SECONDS": "10",
        **{f"HOLDFAST_{name}_RATE_LIMIT": "0" for name in ("WALK", "PLANNING", "ROUTES", "FIELD")},
    }
    holdfast = str(Path(sys.executable).parent / "holdfast")
    command = [holdfast, "serve", "--port", str(port), "--database", url, "--redis", redis]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        await asyncio.to_thread(wait_until_up, port)
        connection = await asyncpg.connect(url)
        await connection.execute(_EXPIRED, EXPIRED, timeout=300)
        await connection.close()
        load = Load(port, Traffic(secret))
        await load.run_at_maximum(5)  # warm-up
        most = statistics.median([await load.run_at_maximum(10) for _ in range(3)])
        memory: list[tuple[float, float]] = []
        sampler = asyncio.create_task(_sample_memory(server.pid, memory))
        await asyncio.sleep(3)
        await load.steady(most * SHARE, seconds)
        sampler.cancel()
        return _report(load, memory, most, seconds)
    finally:
        server.terminate()
        server.wait()


async def _sample_memory(pid: int, memory: list[tuple[float, float]]) -> None:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("soaking", total=None)
        while True:
            memory.append((time.perf_counter(), _megabytes(pid)))
            progress.update(task, description=f"{memory[-1][1]:.0f} MB")
            await asyncio.sleep(5)


def _megabytes(pid: int) -> float:
    """Return the resident memory of a process and its descendants in MB."""
    pids, total = [pid], 0.0
    while pids:
        one = pids.pop()
        for line in Path(f"/proc/{one}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) / 1024
        for task in Path(f"/proc/{one}/task").iterdir():
            pids += [int(child) for child in (task / "children").read_text().split()]
    return total


def _report(
    load: Load, memory: list[tuple[float, float]], most: float, seconds: float
) -> dict[str, Any]:
    started = load.responses[0][0]
    windows: list[list[float]] = [[] for _ in range(WINDOWS)]
    for at, took, _status in load.responses:
        windows[min(WINDOWS - 1, int((at - started) / seconds * WINDOWS))].append(took)
    statuses: dict[str, int] = {}
    for *_, status in load.responses:
        statuses[str(status)] = statuses.get(str(status), 0) + 1
    # Without the first tenth, which fills bounded caches.
    later = [size for at, size in memory if at >= started + seconds / 10]
    third = max(1, len(later) // 3)
    first, last = statistics.median(later[:third]), statistics.median(later[-third:])
    return {
        "seconds": seconds,
        "flat_out_per_second": round(most, 1),
        "sent_per_second": round(len(load.responses) / seconds, 1),
        "responses": len(load.responses),
        "statuses": statuses,
        "server_errors": sum(count for status, count in statuses.items() if status >= "500"),
        "p50_ms": [round(statistics.median(w) * 1e3, 2) for w in windows],
        "p99_ms": [round(statistics.quantiles(w, n=100)[98] * 1e3, 2) for w in windows],
        "memory_mb_first_third": round(first, 1),
        "memory_mb_last_third": round(last, 1),
        "memory_ratio": round(last / first, 3),
        "memory_mb_every_5_s": [round(size, 1) for _, size in memory],
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m holdfast_lab.bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=900, help="duration (default 900)")
    parser.add_argument("--results", type=Path, help="file for the JSON result")
    options = parser.parse_args()
    with (
        TemporaryDirectory(prefix="holdfast-soak-") as directory,
        RealPostgres() as postgres,
        RealRedis() as redis,
    ):
        work = soak(postgres.create_database(), redis.url(), options.seconds, Path(directory))
        found = uvloop.run(work)
    text = json.dumps(found, indent=2)
    print(text)
    if options.results is not None:
        options.results.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
