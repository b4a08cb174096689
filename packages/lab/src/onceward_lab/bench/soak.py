"""A soak test at 70 % of the maximum rate, with sweeper, Redis and workers.

``python -m onceward_lab.bench.soak --seconds 900`` starts ``onceward serve`` on PostgreSQL and
Redis, measures its maximum rate, then sends 70 % of that at a steady rate, even if responses are
late, and reports 5xx responses, latency percentiles by window, memory, and what the server and the
database were doing in the slowest seconds.

With ``--baseline PATH``, a checkout of another commit, that commit's server is started too, on
another database, and the maximum rates of both are measured in turns, and so is the CPU time of a
request: that of the server, of PostgreSQL, of Redis and of the load generator, which is this
process. ``--seconds 0`` measures only these.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
import uvloop
from rich.console import Console
from rich.progress import Progress

from onceward.sign_in.jwt_auth import mint_token
from onceward_lab.bench.server_tree import CpuClock, ServerTree
from onceward_lab.bench.slow_seconds import Activity, explain
from onceward_testing.servers import RealPostgres, RealRedis

CONNECTIONS = 32
SHARE = 0.7
WINDOWS = 10
# Rounds of the measurement of the maximum rate, and seconds of each.
ROUNDS, ROUND_SECONDS = 3, 10.0
EXPIRED = 200_000
_EXPIRED = """
INSERT INTO onceward.idempotency_records
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


@dataclass
class Server:
    """A server under load, and what the rounds at its maximum rate have measured."""

    port: int
    pid: int
    database: str
    # The processes whose CPU time counts, by name.
    cpu: Mapping[str, CpuClock]
    rates: list[float] = field(default_factory=list)
    # Of each round: microseconds of CPU time per request by name.
    micros: list[dict[str, float]] = field(default_factory=list)

    async def run_round(self, load: Load, seconds: float) -> None:
        """Measure one round."""
        before = {name: clock.read() for name, clock in self.cpu.items()}
        rate = await load.run_at_maximum(seconds)
        self.rates.append(rate)
        used = {name: clock.read() - before[name] for name, clock in self.cpu.items()}
        micros = {name: one / (rate * seconds) * 1e6 for name, one in used.items()}
        self.micros.append(micros | {"all": sum(micros.values())})

    def median_micros(self) -> dict[str, float]:
        """Return the medians of the rounds."""
        return {
            name: round(statistics.median([found[name] for found in self.micros]), 1)
            for name in self.micros[0]
        }


def _compared(own: Server, other: Server) -> dict[str, Any]:
    """Compare two servers round by round; above 1 the own one is faster or needs less CPU."""
    rates = [a / b for a, b in zip(own.rates, other.rates, strict=True)]
    found: dict[str, Any] = {
        "baseline_flat_out_per_second": round(statistics.median(other.rates), 1),
        "baseline_cpu_us": other.median_micros(),
        "ratio_to_baseline": round(statistics.median(rates), 2),
        "ratios_to_baseline": [round(rate, 2) for rate in rates],
    }
    for name in ("server", "all"):
        ratios = [b[name] / a[name] for a, b in zip(own.micros, other.micros, strict=True)]
        found[f"baseline_cpu_ratio_{name}"] = round(statistics.median(ratios), 2)
    return found


async def soak(
    servers: list[Server],
    secret: str,
    seconds: float,
    *,
    rounds: int = ROUNDS,
    round_seconds: float = ROUND_SECONDS,
) -> dict[str, Any]:
    """Load the servers in turns, then the first one for ``seconds``."""
    for server in servers:
        connection = await asyncpg.connect(server.database)
        await connection.execute(_EXPIRED, EXPIRED, timeout=300)
        await connection.close()
    loads = [Load(server.port, Traffic(secret)) for server in servers]
    for load in loads:
        await load.run_at_maximum(5)  # warm-up
    for number in range(rounds):
        turns = list(zip(servers, loads, strict=True))
        for server, load in turns if number % 2 == 0 else reversed(turns):
            await server.run_round(load, round_seconds)
    own, load = servers[0], loads[0]
    report = await _steady(own, load, seconds) if seconds else {}
    report["flat_out_per_second"] = round(statistics.median(own.rates), 1)
    report["cpu_us"] = own.median_micros()
    if len(servers) > 1:
        report |= _compared(own, servers[1])
    report["made_at"] = datetime.now(UTC).isoformat(timespec="seconds")
    return report


async def _steady(server: Server, load: Load, seconds: float) -> dict[str, Any]:
    """Send a share of the maximum rate for a long time."""
    pid, most = server.pid, statistics.median(server.rates)
    memory: list[tuple[float, float]] = []
    activity = Activity(server.database, CpuClock(pid))
    samplers = [
        asyncio.create_task(_sample_memory(pid, memory)),
        asyncio.create_task(activity.sample()),
    ]
    await asyncio.sleep(3)
    await load.steady(most * SHARE, seconds)
    for sampler in samplers:
        sampler.cancel()
    report = _report(load, memory, seconds)
    report["slowest_seconds"] = explain(load.responses, activity)
    return report


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


def _report(load: Load, memory: list[tuple[float, float]], seconds: float) -> dict[str, Any]:
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
        "sent_per_second": round(len(load.responses) / seconds, 1),
        "responses": len(load.responses),
        "statuses": statuses,
        "server_errors": sum(count for status, count in statuses.items() if status >= "500"),
        "worst_tenth": _worst(windows),
        "p50_ms": [round(statistics.median(w) * 1e3, 2) for w in windows],
        "p99_ms": [round(statistics.quantiles(w, n=100)[98] * 1e3, 2) for w in windows],
        "memory_mb_first_third": round(first, 1),
        "memory_mb_last_third": round(last, 1),
        "memory_ratio": round(last / first, 3),
        "memory_mb_every_5_s": [round(size, 1) for _, size in memory],
    }


def _worst(windows: list[list[float]]) -> dict[str, float]:
    """Return the tenth with the largest 99th percentile."""
    tails = [statistics.quantiles(window, n=100)[98] for window in windows]
    worst = tails.index(max(tails))
    return {
        "tenth": worst + 1,
        "p50_ms": round(statistics.median(windows[worst]) * 1e3, 2),
        "p99_ms": round(tails[worst] * 1e3, 2),
        "median_p99_ms": round(statistics.median(tails) * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m onceward_lab.bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=900, help="duration (default 900)")
    parser.add_argument("--results", type=Path, help="file for the JSON result")
    parser.add_argument("--baseline", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"rounds at the maximum rate (default {ROUNDS})"
    )
    parser.add_argument(
        "--round-seconds", type=float, default=ROUND_SECONDS, help="of each server and round"
    )
    options = parser.parse_args()
    trees = [ServerTree("this")]
    if options.baseline is not None:
        trees.append(ServerTree("baseline", options.baseline))
    secret = secrets.token_hex(32)
    with ExitStack() as stack:
        postgres = stack.enter_context(RealPostgres())
        servers = []
        for tree in trees:
            home = Path(stack.enter_context(TemporaryDirectory(prefix="onceward-soak-")))
            redis = stack.enter_context(RealRedis())
            database = postgres.create_database()
            serving = tree.serve(
                database,
                secret,
                home,
                options=("--redis", redis.url()),
                settings={"ONCEWARD_SWEEP_EVERY_SECONDS": "10"},
            )
            port, pid = stack.enter_context(serving)
            processes = {
                "server": pid,
                "postgresql": postgres.pid,
                "redis": redis.pid,
                "load_generator": os.getpid(),
            }
            # This process is the parent of the others, and counts alone.
            cpu = {
                name: CpuClock(number or 0, with_children=name != "load_generator")
                for name, number in processes.items()
            }
            servers.append(Server(port, pid, database, cpu))
        running = soak(
            servers,
            secret,
            options.seconds,
            rounds=options.rounds,
            round_seconds=options.round_seconds,
        )
        found = uvloop.run(running)
    text = json.dumps(found, indent=2)
    print(text)
    if options.results is not None:
        options.results.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
