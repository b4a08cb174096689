"""CPU per request of the server's writes, also relative to another commit.

``python -m onceward_lab.bench.services_cpu --baseline PATH`` starts ``onceward serve`` of this code
and of the checkout at PATH, each on a database of the same PostgreSQL, and sends the same requests
to both in turns. It reports the CPU time of the server process per request (not that of
PostgreSQL) and the requests per second: medians of the rounds, and of the ratios of each round.
"""

import argparse
import asyncio
import itertools
import json
import secrets
import statistics
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from onceward.sign_in.jwt_auth import mint_token
from onceward_lab.bench.server_tree import CpuClock, ServerTree
from onceward_testing.servers import RealPostgres

__all__ = ["ROUTES", "measure"]

CONNECTIONS = 8
USERS = 50
# A round consists of this many alternating slices of each server.
SLICES = 4

# Makes one request; takes a number that differs from request to request, and earlier responses.
Make = Callable[[int, dict[str, Any]], tuple[str, str, dict[str, Any]]]


def _post_activity(number: int, _seen: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    body = {"title": f"visit {number}", "note": "at the north gate " * 6}
    return "POST", "/api/v1/activities", body


def _patch_activity(number: int, seen: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    return "PATCH", f"/api/v1/activities/{seen['activity']}", {"title": f"visit {number}"}


def _post_expense(number: int, seen: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    body = {"amount": number, "currency": "EUR", "activity_id": seen["activity"]}
    return "POST", "/api/v1/expenses", body


def _post_project(number: int, _seen: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    return "POST", "/v1/projects", {"name": f"project {number}"}


def _post_mission(number: int, seen: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    return "POST", f"/v1/projects/{seen['project']}/missions", {"title": f"mission {number}"}


def _post_route(number: int, _seen: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    start = {"lat": 52.23 + number % 1000 / 50_000, "lon": 21.01}
    return "POST", "/api/v1/routes", {"start": start, "minutes": 60, "interests": ["parks"]}


ROUTES: dict[str, Make] = {
    "create an activity": _post_activity,
    "change an activity": _patch_activity,
    "create an expense of an activity": _post_expense,
    "create a project": _post_project,
    "create a mission": _post_mission,
    "submit a route request": _post_route,
}


@dataclass
class _User:
    token: str
    # Ids of what the user has made, by kind.
    seen: dict[str, Any] = field(default_factory=dict)


@dataclass
class Server:
    """A running server, and per route what each round has measured."""

    name: str
    port: int
    cpu: CpuClock
    users: list[_User]
    micros: dict[str, list[float]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)

    async def prepare(self) -> None:
        """Create an activity and a project of each user, for the requests about one."""
        stream = await asyncio.open_connection("127.0.0.1", self.port)
        for user in self.users:
            for kind, make in (("activity", _post_activity), ("project", _post_project)):
                created = json.loads(await _send(stream, user, make(0, {})))
                user.seen[kind] = created["id"]
        stream[1].close()

    async def load(self, make: Make, seconds: float) -> tuple[int, float, float]:
        """Send requests one after another on each connection; return count, CPU and seconds."""
        streams = [
            await asyncio.open_connection("127.0.0.1", self.port) for _ in range(CONNECTIONS)
        ]
        numbers = itertools.count(1)
        cpu, started = self.cpu.read(), time.perf_counter()
        until = started + seconds

        async def client(stream: Any) -> int:
            done = 0
            while time.perf_counter() < until:
                number = next(numbers)
                user = self.users[number % len(self.users)]
                await _send(stream, user, make(number, user.seen))
                done += 1
            return done

        count = sum(await asyncio.gather(*map(client, streams)))
        took, used = time.perf_counter() - started, self.cpu.read() - cpu
        for _, writer in streams:
            writer.close()
        return count, used, took


async def _send(stream: Any, user: _User, request: tuple[str, str, dict[str, Any]]) -> bytes:
    method, path, body = request
    text = json.dumps(body).encode()
    reader, writer = stream
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {user.token}\r\n"
        f"content-type: application/json\r\nidempotency-key: {uuid.uuid4()}\r\n"
        f"content-length: {len(text)}\r\n\r\n"
    )
    writer.write(head.encode() + text)
    found = (await reader.readuntil(b"\r\n\r\n")).lower()
    at = found.index(b"content-length: ") + 16
    content: bytes = await reader.readexactly(int(found[at : found.index(b"\r", at)]))
    if not found.startswith(b"http/1.1 20"):
        raise RuntimeError(f"{method} {path}: {found.decode()}{content.decode()}")
    return content


async def _run(
    servers: list[Server], routes: list[str], rounds: int, seconds: float
) -> dict[str, Any]:
    for server in servers:
        await server.prepare()
        for route in routes:  # warms up connections, caches and prepared statements
            await server.load(ROUTES[route], 0.7)
    for _ in range(rounds):
        for route in routes:
            done = {server.name: (0, 0.0, 0.0) for server in servers}
            for number in range(SLICES):
                for server in servers if number % 2 == 0 else reversed(servers):
                    result = await server.load(ROUTES[route], seconds / SLICES)
                    sums = zip(done[server.name], result, strict=True)
                    done[server.name] = tuple(a + b for a, b in sums)  # type: ignore[assignment]
            for server in servers:
                count, used, took = done[server.name]
                server.micros.setdefault(route, []).append(used / count * 1e6)
                server.rates.setdefault(route, []).append(count / took)
    return {route: _row(servers, route) for route in routes}


def _row(servers: list[Server], route: str) -> dict[str, float]:
    own = servers[0]
    row = {
        "cpu_us": round(statistics.median(own.micros[route]), 1),
        "per_second": round(statistics.median(own.rates[route]), 1),
    }
    for other in servers[1:]:
        row["baseline_cpu_us"] = round(statistics.median(other.micros[route]), 1)
        row["baseline_per_second"] = round(statistics.median(other.rates[route]), 1)
        row["cpu_ratio"] = _ratio(own.micros[route], other.micros[route])
        row["rate_ratio"] = _ratio(own.rates[route], other.rates[route])
    return row


def _ratio(own: list[float], other: list[float]) -> float:
    return round(statistics.median([a / b for a, b in zip(own, other, strict=True)]), 3)


def measure(
    trees: list[ServerTree],
    routes: list[str],
    rounds: int,
    seconds: float,
    *,
    new_database: Callable[[], str],
) -> dict[str, Any]:
    """Measure the routes; ``seconds`` is the time per route, server and round."""
    secret, now = secrets.token_hex(32), datetime.now(UTC)
    with ExitStack() as stack:
        servers = []
        for tree in trees:
            home = Path(stack.enter_context(TemporaryDirectory(prefix="onceward-services-cpu-")))
            serving = tree.serve(new_database(), secret, home, options=("--no-jobs",))
            port, pid = stack.enter_context(serving)
            tokens = [
                mint_token(
                    secret,
                    sub=f"user-{n}",
                    org=f"org-{n}",
                    roles=[],
                    lifetime=timedelta(hours=6),
                    now=now,
                )
                for n in range(USERS)
            ]
            servers.append(Server(tree.name, port, CpuClock(pid), [_User(t) for t in tokens]))
        return uvloop.run(_run(servers, routes, rounds, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m onceward_lab.bench.services_cpu", description=__doc__
    )
    parser.add_argument("--baseline", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument(
        "--seconds", type=float, default=1.6, help="per route, server and round (default 1.6)"
    )
    parser.add_argument("--only", nargs="+", choices=list(ROUTES), default=list(ROUTES))
    parser.add_argument("--results", type=Path, help="file for the JSON result")
    options = parser.parse_args()
    trees = [ServerTree("this")]
    if options.baseline is not None:
        trees.append(ServerTree("baseline", options.baseline))
    with RealPostgres() as postgres:
        found = measure(
            trees,
            options.only,
            options.rounds,
            options.seconds,
            new_database=postgres.create_database,
        )
    text = json.dumps(
        {"routes": found, "made_at": datetime.now(UTC).isoformat(timespec="seconds")}, indent=2
    )
    print(text)
    if options.results is not None:
        options.results.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
