"""A versioned PATCH over HTTP, guarded and bare: one worker, 16 connections, real fsync."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onceward_lab.bench import planning
from onceward_lab.bench.in_process import CLIENTS, compare
from onceward_lab.bench.races import free_port, wait_until_up

BODY = b'{"starts_at": "2026-06-01T07:00:00Z", "ends_at": "2026-06-01T15:00:00Z"}'


def app() -> Any:
    """Return the app for uvicorn."""
    service = planning.PlanningApp(os.environ["BENCH_DATABASE"], Path(os.environ["BENCH_HOME"]))
    return service.app


def measure(url: str, rounds: int, seconds: float) -> dict[str, float]:
    """Return guarded ÷ bare with its spread."""
    with _served(url) as port:
        asyncio.run(planning.fill(url, {"missions": _missions(rounds, seconds)}))
        command = [
            sys.executable,
            "-m",
            "onceward_lab.bench.patches",
            str(port),
            str(rounds),
            str(seconds),
        ]
        load = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(load.stdout)
    return found


@contextmanager
def _served(url: str) -> Iterator[int]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "onceward_lab.bench.patches:app", "--factory"]
    command += ["--port", str(port), "--no-access-log", "--log-level", "warning"]
    with tempfile.TemporaryDirectory(prefix="onceward-bench-") as home:
        settings = {"BENCH_DATABASE": url, "BENCH_HOME": home}
        process = subprocess.Popen(command, env=os.environ | settings)
        try:
            wait_until_up(port)
            yield port
        finally:
            process.terminate()
            process.wait()


def _missions(rounds: int, seconds: float) -> int:
    """Return more missions than a run can change; each is changed once, from version 1."""
    return 1_000 + int(2 * (rounds + 1) * max(seconds, 0.7) * 4_000)


async def _run(port: int, rounds: int, seconds: float) -> dict[str, float]:
    """Generate the load, in a process other than the server's."""
    missions = iter(range(1, _missions(rounds, seconds) + 1))
    signed = planning.token()
    free = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CLIENTS)]

    async def patch(path: str) -> None:
        reader, writer = stream = free.pop()
        request = (
            f"PATCH {path}/{next(missions):08x}-0000-7000-8000-000000000000 HTTP/1.1\r\n"
            f'host: bench\r\nauthorization: Bearer {signed}\r\nif-match: "1"\r\n'
            f"idempotency-key: {uuid.uuid4()}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(BODY)}\r\n\r\n"
        )
        writer.write(request.encode() + BODY)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(head.decode())
        at = head.index(b"content-length: ") + 16
        await reader.readexactly(int(head[at : head.index(b"\r", at)]))
        free.append(stream)

    found = await compare(lambda: patch("/v1/missions"), lambda: patch("/v1/bare"), rounds, seconds)
    for _, writer in free:
        writer.close()
    return found


if __name__ == "__main__":
    import uvloop

    port, rounds, seconds = sys.argv[1:4]
    print(json.dumps(uvloop.run(_run(int(port), int(rounds), float(seconds)))))
