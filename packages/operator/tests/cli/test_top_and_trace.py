"""``onceward top`` and ``onceward trace`` on SQLite and PostgreSQL."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from onceward import SINGLE_TENANT, GuardConfig, Onceward
from packages.onceward.tests.support.citus import ON_CITUS
from packages.protocol.tests.cli.harness import ONCEWARD, Here, environment, one_line


@pytest.fixture(params=["sqlite", "postgres", *ON_CITUS])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/commands.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


def prepare(url: str, *, has_correlation_id: bool = True) -> dict[str, str]:
    """Send a request, its replay and a mismatch; return the request ids by outcome.

    Without a correlation id of the client, ``trace`` is that of the first request.
    """

    async def send() -> dict[str, str]:
        onceward: Onceward[Any] = Onceward(
            url, tenants=SINGLE_TENANT, config=GuardConfig(request_log_seconds=3600)
        )
        app = FastAPI()
        onceward.install(app)

        @app.post("/orders", status_code=201)
        @onceward.guard()
        async def create() -> dict[str, bool]:
            await onceward.enqueue("parcel", {"n": 1}, queue="parcels")
            return {"ok": True}

        await onceward.open()
        try:
            headers = {"idempotency-key": "key-1"}
            if has_correlation_id:
                headers["x-correlation-id"] = "tap-1"
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                found = [
                    await client.post("/orders", headers=headers, params=params)
                    for params in ({}, {}, {"other": "1"})
                ]
        finally:
            await onceward.close()
        assert [each.status_code for each in found] == [201, 201, 409]
        names = ("record", "replayed", "mismatched")
        ids = {name: it.headers["x-request-id"] for name, it in zip(names, found, strict=True)}
        return ids | {"trace": found[0].headers["x-correlation-id"]}

    return asyncio.run(send())


def test_trace_shows_record_replay_mismatch_audit_and_job(here: Here, database: str) -> None:
    ids = prepare(database)
    result = here("trace", "tap-1", "--database", database, "--json")
    moments = json.loads(result.stdout)
    kinds = [moment["kind"] for moment in moments]
    assert sorted(kinds) == [
        "audit",  # of the request
        "audit",  # of the job
        "enqueued",
        "mismatched",
        "record",
        "replayed",
    ]
    assert kinds[-2:] == ["replayed", "mismatched"]
    assert [moment["at"] for moment in moments] == sorted(moment["at"] for moment in moments)
    by_kind = {moment["kind"]: moment for moment in moments}
    for kind in ("record", "replayed", "mismatched"):
        assert by_kind[kind]["request_id"] == ids[kind]
    assert by_kind["mismatched"]["code"] == "idempotency.payload_mismatch"
    assert not any(moment["same_key"] for moment in moments)
    assert (by_kind["mismatched"]["status"], by_kind["record"]["key"]) == (409, "key-1")
    assert by_kind["enqueued"]["job_id"]
    shown = here("trace", "tap-1", "--database", database)
    table = shown.stdout.decode()
    assert len(table.splitlines()) == 7
    assert ids["replayed"] in table
    assert shown.stderr.decode().startswith("Not included: requests without a key")


def test_trace_follows_a_merged_job_to_the_one_that_ran(here: Here, database: str) -> None:
    async def send() -> str:
        onceward: Onceward[Any] = Onceward(
            database, tenants=SINGLE_TENANT, config=GuardConfig(request_log_seconds=3600)
        )
        app = FastAPI()
        onceward.install(app)

        @onceward.jobs.handler("count", queue="counts")
        async def count(_job: Any) -> None:
            pass

        @app.post("/orders", status_code=201)
        @onceward.guard()
        async def create() -> dict[str, bool]:
            await onceward.enqueue("count", None, queue="counts", coalesce="today")
            return {"ok": True}

        await onceward.open()
        try:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                for number in (1, 2):
                    headers = {
                        "idempotency-key": f"key-{number}",
                        "x-correlation-id": f"tap-{number}",
                    }
                    response = await client.post("/orders", headers=headers)
            worker = onceward.worker()
            await worker.start()
            await worker.until_idle()
            await worker.stop()
        finally:
            await onceward.close()
        return str(response.headers["x-request-id"])

    request_id = asyncio.run(send())
    result = here("trace", "tap-2", "--database", database, "--json")
    assert result.returncode == 0, result.stderr
    by_kind = {moment["kind"]: moment for moment in json.loads(result.stdout)}
    assert by_kind["merged"]["request_id"] == request_id
    assert by_kind["done"]["job_id"] == by_kind["merged"]["job_id"]
    first = json.loads(here("trace", "tap-1", "--database", database, "--json").stdout)
    assert "merged" not in {moment["kind"] for moment in first}
    own = ("trace", "tap-2", "--tenant", by_kind["merged"]["tenant"], "--database", database)
    assert b"merged" in here(*own).stdout


def test_trace_includes_requests_with_the_same_key_and_other_correlation_ids(
    here: Here, database: str
) -> None:
    ids = prepare(database, has_correlation_id=False)
    result = here("trace", ids["trace"], "--database", database, "--json")
    by_kind = {moment["kind"]: moment for moment in json.loads(result.stdout)}
    for kind in ("record", "replayed", "mismatched"):
        assert by_kind[kind]["request_id"] == ids[kind]
        assert by_kind[kind]["same_key"] is (kind != "record")
    table = here("trace", ids["trace"], "--database", database).stdout.decode()
    assert table.count("(same key)") == 2


def test_trace_of_another_tenant_or_id_is_an_error(here: Here, database: str) -> None:
    prepare(database)
    for arguments in (("tap-2",), ("tap-1", "--tenant", "eve")):
        result = here("trace", *arguments, "--database", database)
        assert result.returncode == 1
        assert "nothing has this correlation id" in one_line(result.stderr)


def test_top_prints_one_reading_as_table_and_json(here: Here, database: str) -> None:
    prepare(database)
    reading = json.loads(here("top", "--database", database, "--json").stdout)
    assert sum(reading["minutes"]["fresh"]) == 1
    assert sum(reading["minutes"]["replayed"]) == 1
    assert sum(reading["minutes"]["mismatched"]) == 1
    assert reading["queues"]["parcels"]["waiting"] == 1
    assert reading["queues"]["parcels"]["is_paused"] is False
    here("jobs", "pause", "letters", "--reason", "no paper", "--database", database)
    reading = json.loads(here("top", "--database", database, "--json").stdout)
    assert reading["queues"]["letters"]["is_paused"] is True
    table = here("top", "--database", database, "--once").stdout.decode()
    assert "Executed" in table
    rows = [line.split("\t") for line in table.splitlines()]
    (letters,) = [row for row in rows if row[0] == "letters"]
    assert re.fullmatch(r"paused by .+ via onceward jobs pause: no paper", letters[-1])
    (parcels,) = [row for row in rows if row[0] == "parcels"]
    assert (parcels[1], parcels[-1]) == ("1", "open")


def test_top_on_a_terminal_is_live_until_ctrl_c(here: Here, database: str) -> None:
    prepare(database)
    here("jobs", "pause", "parcels", "--reason", "[/red]", "--database", database)
    main, side = pty.openpty()
    process = subprocess.Popen(
        [ONCEWARD, "top", "--database", database, "--every", "0.2"],
        stdin=side,
        stdout=side,
        stderr=side,
        env=environment(TERM="xterm", COLUMNS="100", LINES="40"),
    )
    os.close(side)
    try:
        shown = read_until(main, b"Ctrl-C ends")
        assert b"Executed" in shown
        assert b"parcels" in shown
        assert b"[/red]" in shown
        read_until(main, b"Ctrl-C ends")  # another reading
        process.send_signal(signal.SIGINT)
        drain(main)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)


def read_until(terminal: int, text: bytes, seconds: float = 60.0) -> bytes:
    """Read what a process writes to its terminal."""
    found, until = b"", time.monotonic() + seconds
    while text not in found:
        assert time.monotonic() < until, found
        if select.select([terminal], [], [], 1.0)[0]:
            found += os.read(terminal, 65_536)
    return found


def drain(terminal: int) -> None:
    """Read to the end: a process may wait until its last output is read."""
    try:
        while select.select([terminal], [], [], 60.0)[0] and os.read(terminal, 65_536):
            pass
    except OSError:  # the other end is closed
        pass
