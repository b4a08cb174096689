"""One user action from the outbox to its effect: one id and one trace in all that it leaves."""

import asyncio
import json
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from onceward.observability.metrics import PrometheusMetrics
from onceward_outbox import OutboxQueue
from onceward_outbox.entry import Entry, NewEntry
from onceward_outbox.transport import HttpTransport
from onceward_services.bootstrap import create_onceward
from onceward_services.jobs import make_worker
from onceward_services.settings import load_settings
from packages.onceward.tests.support.outbox_harness import (
    SECRET,
    SOON,
    CuttingProxy,
    drain,
    token_of,
)
from packages.services.tests.cli.conftest import Server

WALK = {"start": {"lat": 52.52, "lon": 13.4}, "minutes": 60, "interests": ["history"]}


def read(database: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(sql).fetchall()


def send_twice(url: str, directory: Path) -> tuple[Entry, str | None]:
    """Queue an action in a span and send it until a response is not lost: a replay.

    Returns the entry, and the id of the last request.
    """
    tracer = TracerProvider().get_tracer("app")
    with (
        OutboxQueue.open(directory / "outbox.db") as queue,
        CuttingProxy(url, every=1) as proxy,
        HttpTransport(proxy.url) as transport,
    ):
        queue.add_user("ada")
        with tracer.start_as_current_span("user action") as span:
            entry = queue.enqueue(
                NewEntry(
                    user_id="ada",
                    operation="create",
                    entity_type="route",
                    endpoint="/api/v1/routes",
                    payload=WALK,
                    profile="routes",
                )
            )
        assert f"{span.get_span_context().trace_id:032x}" in str(entry.traceparent)
        drain(queue, "ada", transport, token_of, retry=SOON)
        assert proxy.lost >= 1  # a slow one is repeated
        proxy.every = 0
        assert drain(queue, "ada", transport, token_of, max_seconds=30).succeeded == 1
        return entry, queue.attempts(entry.id)[-1].request_id


async def run_jobs(database: Path) -> None:
    settings = load_settings(database_url=f"sqlite:///{database}", jwt_secret=SECRET)
    metrics = PrometheusMetrics()
    onceward = create_onceward(settings, metrics=metrics)
    await onceward.open()
    worker = make_worker(onceward, settings, metrics, queues=["routes"])
    await worker.start()
    await asyncio.wait_for(worker.until_idle(), 30)
    await worker.stop()
    await onceward.close()


async def test_an_action_has_one_id_in_record_audit_event_job_and_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path, "--no-jobs", ONCEWARD_JWT_SECRET=SECRET, ONCEWARD_LOG_JSON="true")
    try:
        entry, last_request = await asyncio.to_thread(send_twice, server.url, tmp_path)
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.stderr().splitlines()]
    finally:
        server.close()
    database, ours = tmp_path / "onceward.db", [(entry.id,)]
    assert read(database, "SELECT correlation_id FROM onceward_idempotency_records") == ours
    events = read(database, "SELECT DISTINCT correlation_id FROM onceward_audit_events")
    assert events == ours, read(database, "SELECT * FROM onceward_audit_events")
    assert read(database, "SELECT correlation_id, traceparent FROM onceward_jobs") == [
        (entry.id, entry.traceparent)
    ]
    requests = [line for line in lines if line.get("path") == "/api/v1/routes"]
    assert len(requests) >= 2
    assert {line["correlation_id"] for line in requests} == {entry.id}
    assert requests[-1]["request_id"] == last_request
    replays = [line for line in lines if line["event"] == "audit.replay"]
    assert replays
    for name in ("correlation_id", "original_correlation_id"):
        assert {line[name] for line in replays} == {entry.id}

    with caplog.at_level(logging.DEBUG, "onceward.jobs"):
        await run_jobs(database)
    assert read(database, "SELECT correlation_id FROM onceward_job_completions") == ours
    (done,) = (record for record in caplog.records if record.getMessage() == "job done")
    assert vars(done)["correlation_id"] == entry.id
