"""Draining in batches compared with one request per entry, over a link of 50 ms.

The server is a guarded FastAPI app on SQLite whose handler does one insert, the link a proxy with a
round trip of 50 ms and TCP slow start. All entries are of one lane, so single requests go one after
the other: that is what a device with a strict order does. The batch drains send 500 entries. Single
requests take the same time each, so only some are sent, and the time of one is compared with that
of one entry in a batch.
"""

import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from onceward import SINGLE_TENANT, Onceward
from onceward_lab.bench.outbox import USER
from onceward_lab.bench.races import free_port, wait_until_up
from onceward_lab.bench.slow_link import slow_link
from onceward_outbox import NewEntry, OutboxQueue, QueueSettings
from onceward_outbox.drain import Drain
from onceward_outbox.transport import HttpTransport

ROUND_TRIP_SECONDS = 0.05
SIZES = (50, 200)

Step = Callable[[], Any]


def batch_drain(
    directory: Path,
    *,
    rounds: int,
    entries: int = 500,
    singles: int = 40,
    step: Step = lambda: None,
) -> dict[str, Any]:
    """Measure seconds per entry sent alone ÷ seconds per entry sent in batches."""
    seconds: dict[int, list[float]] = {1: [], **{size: [] for size in SIZES}}
    with (
        notes_server(directory) as port,
        slow_link(port, ROUND_TRIP_SECONDS) as url,
    ):
        for number in range(rounds + 1):
            for size, found in seconds.items():
                count = singles if size == 1 else entries
                took = _drain(directory / f"batch-{uuid.uuid4()}", url, size, count)
                if number:  # the first round warms up
                    found.append(took / count)
                step()
    return {
        f"batch_drain_{size}": _row(seconds[1], seconds[size], entries, singles) for size in SIZES
    }


def _row(alone: list[float], together: list[float], entries: int, singles: int) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(alone, together, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 1),
        "least": round(min(ratios), 1),
        "most": round(max(ratios), 1),
        f"seconds for {entries}": round(entries * statistics.median(together), 3),
        f"ms per single request, of {singles}": round(1000 * statistics.median(alone), 1),
    }


def _drain(directory: Path, url: str, size: int, count: int) -> float:
    """Return the seconds that a drain takes; a request before has shown the batch endpoint."""
    directory.mkdir()
    settings = QueueSettings(batch_items=size)
    try:
        with OutboxQueue.open(directory / "outbox.db", settings=settings) as queue:
            queue.add_user(USER)
            queue.enqueue_many(_in_order(1))
            with HttpTransport(url) as transport:
                Drain(queue, transport).run(USER)
            queue.enqueue_many(_in_order(count))
            with HttpTransport(url) as transport:
                began = time.perf_counter()
                report = Drain(queue, transport).run(USER)
                took = time.perf_counter() - began
            assert report.succeeded == count, report
            return took
    finally:
        shutil.rmtree(directory)


def _in_order(count: int) -> Iterator[NewEntry]:
    for number in range(count):
        yield NewEntry(
            user_id=USER,
            operation="create",
            entity_type="note",
            endpoint="/notes",
            lane="one",
            payload={"text": f"visit {number}"},
        )


@contextmanager
def notes_server(directory: Path) -> Iterator[int]:
    """Serve ``notes_app`` in a subprocess; yields its port."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--factory", f"{__name__}:notes_app"]
    command += ["--port", str(port), "--no-access-log", "--log-level", "warning"]
    environment = os.environ | {"BENCH_DATABASE": f"{directory}/notes.db"}
    process = subprocess.Popen(command, env=environment)
    try:
        wait_until_up(port)
        yield port
    finally:
        process.terminate()
        process.wait()


class Note(BaseModel):
    text: str


def notes_app() -> FastAPI:
    """Return a guarded app that inserts one row per request."""
    path = os.environ["BENCH_DATABASE"]
    Path(path).touch(mode=0o600)
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE IF NOT EXISTS notes (id TEXT PRIMARY KEY, text TEXT)")
    onceward = Onceward(f"sqlite:///{path}", tenants=SINGLE_TENANT)
    app = FastAPI()
    onceward.install(app, batch="/batch")

    @app.post("/notes", status_code=201)
    @onceward.guard("notes.create")
    async def create(note: Note) -> dict[str, str]:
        new = str(uuid.uuid4())
        await onceward.transaction.execute(
            "INSERT INTO notes VALUES (:id, :text)", {"id": new, "text": note.text}
        )
        return {"id": new}

    return app
