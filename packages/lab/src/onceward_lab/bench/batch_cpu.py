"""CPU time of one action by the size of its batch, on PostgreSQL, for the arithmetic of capacity.

``python -m onceward_lab.bench.batch_cpu`` starts ``onceward serve`` on PostgreSQL. Eight devices,
each with its own tenant, create field activities: alone, and in batches of several sizes, in turns.
It reports the CPU time of the server and of PostgreSQL per activity and the activities per second:
medians of the rounds.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from onceward.sign_in.jwt_auth import mint_token
from onceward_lab.bench.server_tree import CpuClock, ServerTree
from onceward_testing.servers import RealPostgres

DEVICES = 8
# 1: a request of its own.
SIZES = (1, 10, 50, 200)
_PATH = "/api/v1/activities"


@dataclass
class Size:
    """Measurements of the rounds for one size of batches."""

    items: int
    server_us: list[float] = field(default_factory=list)
    postgres_us: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def report(self) -> dict[str, float]:
        """Return the medians."""
        server, postgres = map(statistics.median, (self.server_us, self.postgres_us))
        return {
            "items": self.items,
            "server_us": round(server, 1),
            "postgresql_us": round(postgres, 1),
            # One core does nothing else; the other processes have their own.
            "per_second_of_a_server_core": round(1e6 / server),
            "per_second": round(statistics.median(self.rates), 1),
        }


def _request(token: str, items: int) -> bytes:
    documents = [
        {"title": f"visit {uuid.uuid4()}", "note": "at the north gate " * 6} for _ in range(items)
    ]
    keys = [str(uuid.uuid4()) for _ in documents]
    if items == 1:
        path, body, key = _PATH, json.dumps(documents[0]), f"idempotency-key: {keys[0]}\r\n"
    else:
        entries = [
            {"method": "POST", "path": _PATH, "key": key, "body": document}
            for key, document in zip(keys, documents, strict=True)
        ]
        path, body, key = "/batch", json.dumps({"items": entries}), ""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {token}\r\n{key}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


async def _device(port: int, token: str, items: int, until: float) -> int:
    """Send requests one after another; return how many activities were created."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    created = 0
    while time.perf_counter() < until:
        writer.write(_request(token, items))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        at = head.index(b"content-length: ") + 16
        body = await reader.readexactly(int(head[at : head.index(b"\r", at)]))
        found = 1 if head.startswith(b"http/1.1 201") else body.count(b'"status":201')
        if not found:
            raise RuntimeError((head + body[:500]).decode())
        created += found  # the server may respond to a part of a batch
    writer.close()
    return created


async def _measure(
    port: int,
    tokens: list[str],
    *,
    server: CpuClock,
    postgres: CpuClock,
    rounds: int,
    seconds: float,
) -> list[dict[str, float]]:
    sizes = [Size(items) for items in SIZES]

    async def load(size: Size, seconds: float) -> tuple[int, float]:
        started = time.perf_counter()
        devices = [_device(port, token, size.items, started + seconds) for token in tokens]
        return sum(await asyncio.gather(*devices)), time.perf_counter() - started

    for size in sizes:
        await load(size, 1)  # warm-up
    for number in range(rounds):
        for size in sizes if number % 2 == 0 else reversed(sizes):
            before = server.read(), postgres.read()
            created, took = await load(size, seconds)
            size.server_us.append((server.read() - before[0]) / created * 1e6)
            size.postgres_us.append((postgres.read() - before[1]) / created * 1e6)
            size.rates.append(created / took)
    return [size.report() for size in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m onceward_lab.bench.batch_cpu", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="per size and round (default 2)")
    parser.add_argument("--results", type=Path, help="file for the JSON result")
    options = parser.parse_args()
    secret, now = secrets.token_hex(32), datetime.now(UTC)
    tokens = [
        mint_token(
            secret, sub=f"user-{n}", org="org", roles=[], lifetime=timedelta(hours=6), now=now
        )
        for n in range(DEVICES)
    ]
    with RealPostgres() as postgres, TemporaryDirectory(prefix="onceward-batch-cpu-") as home:
        serving = ServerTree("this").serve(
            postgres.create_database(), secret, Path(home), options=("--no-jobs",)
        )
        with serving as (port, pid):
            running = _measure(
                port,
                tokens,
                server=CpuClock(pid),
                postgres=CpuClock(postgres.pid or 0),
                rounds=options.rounds,
                seconds=options.seconds,
            )
            sizes: Any = uvloop.run(running)
    found = {"sizes": sizes, "made_at": datetime.now(UTC).isoformat(timespec="seconds")}
    text = json.dumps(found, indent=2)
    print(text)
    if options.results is not None:
        options.results.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
