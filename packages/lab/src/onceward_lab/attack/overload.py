"""Measures ``onceward serve`` under stalled uploads and expensive bodies, from outside.

``python -m onceward_lab.attack.overload`` starts a server on a new SQLite file and prints one line
per measurement: memory, the latency of a signed-in write, and the latency of ``/healthz``.
"""

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import jwt

from onceward_lab.attack.large_bodies import EXPENSIVE, fill
from onceward_lab.attack.latencies import Latencies, measure
from onceward_lab.attack.memory import rss_bytes

__all__ = ["main"]

_PATH: Final = "/api/v1/contacts"
_READY: Final = "Onceward is ready on "


@dataclass(frozen=True, slots=True)
class Server:
    """A server in a process of its own."""

    url: str
    pid: int
    token: str


@asynccontextmanager
async def running_server(
    directory: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Server]:
    """Start ``onceward serve`` on a free port and a new SQLite file."""
    secret = secrets.token_hex(32)
    process = subprocess.Popen(
        [sys.executable, "-m", "onceward.cli", "serve", "--port", "0", "--no-jobs"],
        cwd=directory,
        env={
            **os.environ,
            "ONCEWARD_JWT_SECRET": secret,
            # What is measured is the load, not how it is refused.
            "ONCEWARD_FIELD_RATE_LIMIT": "0",
            "ONCEWARD_DATABASE_URL": f"sqlite:///{directory}/overload.db",
            "ONCEWARD_LOG_LEVEL": "ERROR",
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        if not line.startswith(_READY):
            raise RuntimeError(f"the server did not start: {line!r}")
        claims = {"sub": "ada", "org": "acme", "exp": int(time.time()) + 3600}
        yield Server(line.split()[4], process.pid, jwt.encode(claims, secret, "HS256"))
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


@asynccontextmanager
async def stalled_uploads(url: str, *options: str) -> AsyncIterator[list[dict[str, Any]]]:
    """Run ``slow_bodies`` in another process; the list gets its report at the end."""
    module = "onceward_lab.attack.slow_bodies"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, url, *options,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    reports: list[dict[str, Any]] = []
    try:
        yield reports
    finally:
        out, _ = await process.communicate(b"")
        reports.append(json.loads(out))


async def _both(server: Server, seconds: float) -> tuple[Latencies, Latencies]:
    """Measure signed-in writes and ``/healthz`` at the same time."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        return await asyncio.gather(
            measure(lambda: _write(client, server), seconds=seconds),
            measure(_healthz(client), seconds=seconds),
        )


async def _write(client: httpx.AsyncClient, server: Server, body: bytes = b'{"name":"x"}') -> int:
    headers = {
        "Authorization": f"Bearer {server.token}",
        "Idempotency-Key": str(uuid4()),
        "Content-Type": "application/json",
    }
    try:
        response = await client.post(_PATH, content=body, headers=headers)
    except httpx.TransportError:
        return 0
    return response.status_code


def _healthz(client: httpx.AsyncClient) -> Callable[[], Awaitable[int]]:
    async def send() -> int:
        try:
            return (await client.get("/healthz")).status_code
        except httpx.TransportError:
            return 0

    return send


async def _measure_stalled(
    server: Server, before: int, seconds: float, count: int, *options: str
) -> None:
    arguments = ("--count", str(count), *options)
    async with stalled_uploads(server.url + _PATH, *arguments) as reports:
        await asyncio.sleep(3)
        writes, health = await _both(server, seconds)
        grown = rss_bytes(server.pid) - before
    shown = " ".join("…" if option == server.token else option for option in arguments)
    print(f"stalled uploads ({shown}):")
    print(f"  memory  {grown / 1e6:+.1f} MB")
    print(f"  write   {writes}\n  healthz {health}\n  uploads {reports[0]}")


async def _measure_large(server: Server, name: str, seconds: float, size: int) -> None:
    # In another process, so that only the server is slowed down by them.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "onceward_lab.attack.overload", "--uploads-to", server.url,
        "--token", server.token, "--body", name,
        "--seconds", str(seconds + 1), "--body-bytes", str(size),
        stdout=subprocess.PIPE,
    )  # fmt: skip
    await asyncio.sleep(1)
    writes, health = await _both(server, seconds)
    out, _ = await process.communicate()
    print(f"four clients send {name}:")
    print(f"  write   {writes}\n  healthz {health}\n  upload  {out.decode().strip()}")


async def _upload(arguments: argparse.Namespace) -> None:
    """Send large bodies as four clients, and print their latencies."""
    server = Server(arguments.uploads_to, 0, arguments.token)
    body = fill(EXPENSIVE[arguments.body], arguments.body_bytes)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        uploads = await asyncio.gather(
            *(
                measure(lambda: _write(client, server, body), seconds=arguments.seconds, pause=0)
                for _ in range(4)
            )
        )
    print(uploads[0])


async def _run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="onceward-overload-") as directory:
        async with running_server(Path(directory)) as server:
            await _both(server, 1)  # warm-up
            writes, health = await _both(server, arguments.seconds)
            before = rss_bytes(server.pid)
            print(f"quiet: memory {before / 1e6:.1f} MB")
            print(f"  write   {writes}\n  healthz {health}")
            seconds, count = arguments.seconds, arguments.count
            await _measure_stalled(server, before, seconds, count)
            await _measure_stalled(server, before, seconds, count, "--byte-every-seconds", "1")
            await _measure_stalled(server, before, seconds, count, "--token", server.token)
            for name in EXPENSIVE:
                await _measure_large(server, name, seconds, arguments.body_bytes)


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description="Measure onceward serve under overload.")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--body-bytes", type=int, default=1_000_000)
    parser.add_argument("--uploads-to", help=argparse.SUPPRESS)
    parser.add_argument("--token", help=argparse.SUPPRESS)
    parser.add_argument("--body", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asyncio.run(_upload(arguments) if arguments.uploads_to else _run(arguments))


if __name__ == "__main__":
    main()
