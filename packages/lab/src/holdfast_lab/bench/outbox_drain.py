"""Draining against a bare httpx loop that posts the same bodies, one after the other, on loopback.

Both sides talk to the same server process: a small ASGI app that answers 201 at once (so the
client's own work is all there is to see), or the field service on SQLite as ``holdfast serve`` has
it. What the outbox does besides sending is in its time: claims, outcomes and mappings, on the disk.
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

from holdfast.outbox import NewEntry, OutboxQueue
from holdfast.outbox.drain import Drain
from holdfast.outbox.transport import HttpTransport, Request, Response
from holdfast_lab.bench.outbox import PASSPHRASE, USER, new_entries

Step = Callable[[], Any]

_READY_SECONDS = 30


class Task(NamedTuple):
    """What is sent, where to, and what kind of file it is kept in."""

    url: str
    token: str
    profile: str
    key: bytes | None
    entries: int


def drain(
    folder: Path,
    *,
    rounds: int,
    entries: int = 1_000,
    services: bool = True,
    step: Step = lambda: None,
) -> dict[str, Any]:
    """Return drained entries per second ÷ bare posts per second, by profile and kind of file."""
    found = {}
    with small_server() as url:
        for name, profile, key in (
            ("outbox_drain_lanes", "field", None),
            ("outbox_drain_lanes_encrypted", "field", PASSPHRASE),
            ("outbox_drain_in_order", "walk", None),
        ):
            found[name] = _race(folder, Task(url, "t", profile, key, entries), rounds, step)
    if not services:
        return found
    with field_server(folder) as (url, token):
        task = Task(url, token, "field", None, max(entries // 4, 1))
        found["outbox_drain_field_service"] = _race(folder, task, rounds, step)
    return found


def memory(folder: Path, *, entries: int = 100_000, points: int = 10) -> dict[str, Any]:
    """Return how much memory a process has while it drains a long queue. Nothing is sent.

    A new process: in one that had more before, nobody would see it grow.
    """
    command = [
        sys.executable,
        "-m",
        "holdfast_lab.bench.outbox_drain",
        str(folder),
        str(entries),
        str(points),
    ]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    taken: list[float] = msgspec.json.decode(found.stdout)
    return {
        "entries": entries,
        "mb_by_the_way": [round(mb, 1) for mb in taken],
        "first_mb": round(taken[0], 1),
        "last_mb": round(taken[-1], 1),
        "growth": round(taken[-1] / taken[0], 3),
    }


def _drain_a_long_queue(folder: Path, entries: int, points: int) -> list[float]:
    """Return the megabytes of this process by the way."""
    queue = OutboxQueue.open(folder / "memory.db")
    queue.add_user(USER)
    for start in range(0, entries, 1_000):
        queue.enqueue_many(_entries(min(1_000, entries - start), "field"))
    process = psutil.Process()
    taken: list[float] = []
    every = max(1, entries // points)
    answer = Response(201, {"x-request-id": "r"}, b'{"id":"17"}')
    sent = 0

    class Mirror:
        def send(self, _: Request) -> Response:
            nonlocal sent
            sent += 1
            if sent % every == 0:
                taken.append(process.memory_info().rss / 1_048_576)
            return answer

    report = Drain(queue, Mirror(), "t").run(USER)
    queue.close()
    assert report.succeeded == entries, report
    return taken


def _race(folder: Path, task: Task, rounds: int, step: Step) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"bare httpx loop": [], "Holdfast": []}
    for number in range(rounds + 1):
        order = ["bare httpx loop", "Holdfast"]
        for name in order if number % 2 == 0 else reversed(order):
            if name == "Holdfast":
                rate = _ours(folder / f"drain-{uuid.uuid4()}", task)
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
        "drained_per_second": round(statistics.median(rates["Holdfast"]), 1),
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


def _ours(folder: Path, task: Task) -> float:
    folder.mkdir()
    try:
        with OutboxQueue.open(folder / "outbox.db", passphrase=task.key) as queue:
            queue.add_user(USER)
            queue.enqueue_many(_entries(task.entries, task.profile))
            with HttpTransport(task.url) as transport:
                began = time.perf_counter()
                report = Drain(queue, transport, task.token).run(USER)
                took = time.perf_counter() - began
            assert report.succeeded == task.entries, report
            return task.entries / took
    finally:
        shutil.rmtree(folder)


@contextmanager
def small_server() -> Iterator[str]:
    """Serve ``answer_at_once`` in a process of its own."""
    from holdfast_lab.bench.races import free_port

    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "holdfast_lab.bench.outbox_drain:answer_at_once"]
    command += ["--port", str(port), "--no-access-log", "--log-level", "warning"]
    process = subprocess.Popen(command)
    try:
        _wait(f"http://127.0.0.1:{port}/healthz")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def field_server(folder: Path) -> Iterator[tuple[str, str]]:
    """Serve all services on SQLite, and give a token of theirs."""
    from holdfast_lab.bench.races import free_port

    port = free_port()
    holdfast = Path(sys.executable).parent / "holdfast"
    environment = {
        **os.environ,
        "HOLDFAST_HOME": str(folder),
        "HOLDFAST_JWT_SECRET": "a secret of the benchmark, long enough",
    }
    database = f"sqlite:///{folder}/field-{port}.db"
    command = [str(holdfast), "serve", "--port", str(port), "--database", database, "--no-jobs"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait(f"http://127.0.0.1:{port}/healthz")
        token = subprocess.run(
            [str(holdfast), "token", "--sub", USER],
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


async def answer_at_once(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with a new id, as soon as its body is there."""
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
    where, how_many, looks = sys.argv[1:4]
    print(msgspec.json.encode(_drain_a_long_queue(Path(where), int(how_many), int(looks))).decode())
