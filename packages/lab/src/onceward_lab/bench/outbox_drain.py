"""Draining compared with a bare httpx loop that posts the same bodies, on loopback.

Both use the same server process: a small ASGI app that responds with 201 at once (so that only the
client's work is measured), or the field service on SQLite. The time of a drain includes the claims,
results and id mappings that the outbox writes to the disk.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import psutil  # type: ignore[import-untyped]

from onceward_lab.bench.outbox import PASSPHRASE, USER, new_entries
from onceward_outbox import NewEntry, OutboxQueue, QueueSettings
from onceward_outbox.drain import Drain
from onceward_outbox.transport import HttpTransport, Request, Response

Step = Callable[[], Any]

_READY_SECONDS = 30


class Task(NamedTuple):
    """A benchmark's entries, their server and the kind of outbox file."""

    url: str
    token: str
    profile: str
    key: bytes | None
    entries: int


def drain(
    directory: Path,
    *,
    rounds: int,
    entries: int = 1_000,
    services: bool = True,
    step: Step = lambda: None,
) -> dict[str, Any]:
    """Measure drained entries per second ÷ bare posts per second."""
    found = {}
    with small_server() as url:
        for name, profile, key in (
            ("outbox_drain_lanes", "field", None),
            ("outbox_drain_lanes_encrypted", "field", PASSPHRASE),
            ("outbox_drain_in_order", "walk", None),
        ):
            found[name] = _race(directory, Task(url, "t", profile, key, entries), rounds, step)
    if not services:
        return found
    with field_server(directory) as (url, token):
        task = Task(url, token, "field", None, max(entries // 4, 1))
        found["outbox_drain_field_service"] = _race(directory, task, rounds, step)
    return found


def memory(directory: Path, *, entries: int = 100_000, points: int = 10) -> dict[str, Any]:
    """Measure the memory of a process while it drains a long queue with a fake transport.

    In a new process, because memory that was freed before would hide the growth.
    """
    command = [
        sys.executable,
        "-m",
        "onceward_lab.bench.outbox_drain",
        str(directory),
        str(entries),
        str(points),
    ]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    samples: list[float] = msgspec.json.decode(found.stdout)
    return {
        "entries": entries,
        "mb_samples": [round(mb, 1) for mb in samples],
        "first_mb": round(samples[0], 1),
        "last_mb": round(samples[-1], 1),
        "growth": round(samples[-1] / samples[0], 3),
    }


def _drain_long_queue(directory: Path, entries: int, points: int) -> list[float]:
    """Return samples of the memory of this process in MB."""
    queue = OutboxQueue.open(directory / "memory.db")
    queue.add_user(USER)
    for start in range(0, entries, 1_000):
        queue.enqueue_many(_entries(min(1_000, entries - start), "field"))
    process = psutil.Process()
    samples: list[float] = []
    every = max(1, entries // points)
    response = Response(201, {"x-request-id": "r"}, b'{"id":"17"}')
    sent = 0

    class FakeTransport:
        def send(self, _: Request) -> Response:
            nonlocal sent
            sent += 1
            if sent % every == 0:
                samples.append(process.memory_info().rss / 1_048_576)
            return response

    report = Drain(queue, FakeTransport(), "t").run(USER)
    queue.close()
    assert report.succeeded == entries, report
    return samples


def _race(directory: Path, task: Task, rounds: int, step: Step) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"bare httpx loop": [], "Onceward": []}
    for number in range(rounds + 1):
        order = ["bare httpx loop", "Onceward"]
        for name in order if number % 2 == 0 else reversed(order):
            if name == "Onceward":
                rate = _ours(directory / f"drain-{uuid.uuid4()}", task)
            else:
                rate = _bare(task)
            if number:  # the first round warms up
                rates[name].append(rate)
            step()
    ratios = [ours / bare for bare, ours in zip(*rates.values(), strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "drained_per_second": round(statistics.median(rates["Onceward"]), 1),
        "bare_per_second": round(statistics.median(rates["bare httpx loop"]), 1),
    }


def _entries(count: int, profile: str) -> Iterator[NewEntry]:
    for new in new_entries(count):
        payload = {name: new.payload[name] for name in ("title", "note")}
        yield msgspec.structs.replace(
            new,
            profile=profile,
            local_id=new.local_id if profile == "field" else None,
            payload=payload,
        )


def _bare(task: Task) -> float:
    posts = [
        (
            msgspec.json.encode(new.payload),
            {
                "Authorization": f"Bearer {task.token}",
                "Idempotency-Key": str(uuid.uuid4()),
                "Content-Type": "application/json",
            },
        )
        for new in _entries(task.entries, task.profile)
    ]
    with httpx.Client() as client:
        client.get(f"{task.url}/healthz")
        began = time.perf_counter()
        for body, headers in posts:
            response = client.post(f"{task.url}/api/v1/activities", content=body, headers=headers)
            assert response.status_code == 201, response.text
            response.json()
        return task.entries / (time.perf_counter() - began)


def _ours(directory: Path, task: Task) -> float:
    directory.mkdir()
    try:
        settings = QueueSettings(batch=False)  # one request for each entry, as the bare loop does
        with OutboxQueue.open(
            directory / "outbox.db", passphrase=task.key, settings=settings
        ) as queue:
            queue.add_user(USER)
            queue.enqueue_many(_entries(task.entries, task.profile))
            with HttpTransport(task.url) as transport:
                began = time.perf_counter()
                report = Drain(queue, transport, task.token).run(USER)
                took = time.perf_counter() - began
            assert report.succeeded == task.entries, report
            return task.entries / took
    finally:
        shutil.rmtree(directory)


@contextmanager
def small_server() -> Iterator[str]:
    """Serve ``respond_at_once`` in a subprocess; yields its URL."""
    from onceward_lab.bench.races import free_port

    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "onceward_lab.bench.outbox_drain:respond_at_once"]
    command += ["--port", str(port), "--no-access-log", "--log-level", "warning"]
    process = subprocess.Popen(command)
    try:
        _wait(f"http://127.0.0.1:{port}/healthz")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def field_server(directory: Path) -> Iterator[tuple[str, str]]:
    """Serve all services on SQLite; yields the URL and a token."""
    from onceward_lab.bench.races import free_port

    port = free_port()
    onceward = Path(sys.executable).parent / "onceward"
    environment = {
        **os.environ,
        "ONCEWARD_HOME": str(directory),
        "ONCEWARD_JWT_SECRET": "a secret for the benchmark, long enough",
        "ONCEWARD_FIELD_RATE_LIMIT": "0",
    }
    database = f"sqlite:///{directory}/field-{port}.db"
    command = [str(onceward), "serve", "--port", str(port), "--database", database, "--no-jobs"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait(f"http://127.0.0.1:{port}/healthz")
        token = subprocess.run(
            [str(onceward), "token", "--sub", USER],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        yield f"http://127.0.0.1:{port}", token
    finally:
        process.terminate()
        process.wait()


def _wait(url: str) -> None:
    until = time.monotonic() + _READY_SECONDS
    while True:
        try:
            httpx.get(url)
        except httpx.TransportError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


async def respond_at_once(scope: Any, receive: Any, send: Any) -> None:
    """Respond to every request with a new id as soon as its body has arrived."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    body = b'{"id":"%s","version":1}' % str(uuid.uuid4()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", b"0123456789abcdef"),
    ]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    directory, entries, points = sys.argv[1:4]
    found = _drain_long_queue(Path(directory), int(entries), int(points))
    print(msgspec.json.encode(found).decode())
