"""The log of requests that did not run: in each framework, once each, bounded."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import httpx
import psycopg
import pytest
from fastapi import FastAPI, Header, HTTPException
from flask import Flask
from pydantic import BaseModel
from werkzeug.test import Client
from werkzeug.wrappers import Response

from onceward import SINGLE_TENANT, GuardConfig, Onceward, Policy, Principal, Staleness
from onceward.errors import CommitUnknownError, StoreUnavailableError
from onceward.flask import FlaskGuard
from onceward.frameworks.wsgi import WsgiGuard
from onceward.guard.chunk import RequestChunk
from onceward.guard.request_log import RequestLog
from onceward.stores.postgres import PostgresStore
from onceward.stores.sqlite import SqliteStore
from onceward_operator.console import TokenAccess, console
from onceward_operator.tenant_data import TenantData
from onceward_protocol.clock import SystemClock
from packages.onceward.tests.server.test_sync_stores import Shop
from packages.onceward.tests.support.citus import ON_CITUS

KEY = {"Idempotency-Key": "key-1"}
BAD_KEY = {"Idempotency-Key": "two words"}
KEPT = 3600.0
Rows = list[tuple[str, int]]
_LOGGED = "SELECT outcome, status FROM onceward_request_log ORDER BY outcome"


@pytest.fixture(params=["sqlite", "postgres", *ON_CITUS])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


def logged(url: str) -> Rows:
    """Read the table on a connection of its own."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        try:
            return list(connection.execute(_LOGGED))
        finally:
            connection.close()
    with psycopg.connect(url.replace("+psycopg", "")) as server:
        return list(server.execute(_LOGGED.replace("onceward_", "onceward.")).fetchall())


def refuse_and_replay(post: Callable[..., Any], other: dict[str, Any]) -> None:
    """Send a request, its replay, a mismatch and a key that is not valid."""
    assert [
        post(headers=KEY).status_code,
        post(headers=KEY).status_code,
        post(headers=KEY, **other).status_code,
        post(headers=BAD_KEY).status_code,
    ] == [201, 201, 409, 400]


EXPECTED: Rows = [("mismatched", 409), ("refused", 400), ("replayed", 201)]


def wait_until_logged(read: Callable[[], Rows], expected: Rows) -> None:
    """Wait for the background writer; generous, because a loaded machine delays it."""
    until = time.monotonic() + 30
    while read() != expected and time.monotonic() < until:
        time.sleep(0.05)
    assert read() == expected


def test_flask_app_writes_its_log_in_the_background_and_leaves_no_thread(url: str) -> None:
    before = set(threading.enumerate())
    app = Flask(__name__)
    guard = FlaskGuard(
        Onceward(url, tenants=SINGLE_TENANT, config=GuardConfig(request_log_seconds=KEPT)), app
    )

    @app.post("/orders")
    @guard("orders.create")
    def create() -> Any:
        return {"ok": True}, 201

    client = app.test_client()
    refuse_and_replay(lambda **sent: client.post("/orders", **sent), {"query_string": "a=1"})
    wait_until_logged(lambda: logged(url), EXPECTED)
    client.post("/orders", headers=KEY)
    guard.close()
    # What was collected since the last write is written when it is closed.
    assert logged(url) == sorted([*EXPECTED, ("replayed", 201)])
    left = [one for one in set(threading.enumerate()) - before if not one.daemon]
    assert left == []


def test_app_with_sync_connections_writes_its_log(url: str) -> None:
    shop = Shop(url.replace("postgresql", "postgresql+psycopg", 1))
    shop.onceward.runtime.log_requests()
    try:
        refuse_and_replay(
            lambda **sent: shop.app.test_client().post("/orders/boots", **sent),
            {"query_string": "a=1"},
        )
        wait_until_logged(lambda: logged(url), EXPECTED)
    finally:
        shop.close()


def test_wsgi_app_writes_its_log(url: str) -> None:
    onceward = Onceward(url, tenants=SINGLE_TENANT, config=GuardConfig(request_log_seconds=KEPT))
    onceward.guard_path("POST", "/orders")
    guard = WsgiGuard(Response("made", 201), onceward)
    try:
        client = Client(guard)
        refuse_and_replay(lambda **sent: client.post("/orders", **sent), {"data": b"other"})
    finally:
        guard.close()
    assert logged(url) == EXPECTED


def test_many_threads_are_counted_without_loss(url: str) -> None:
    app = Flask(__name__)
    onceward = Onceward(url, tenants=SINGLE_TENANT, config=GuardConfig(request_log_seconds=KEPT))
    guard = FlaskGuard(onceward, app)
    number, threads = 40, 8

    @app.post("/orders")
    @guard("orders.create")
    def create() -> Any:
        return {"ok": True}, 201

    app.test_client().post("/orders", headers=KEY)
    log = onceward.runtime.request_log

    def count() -> None:
        for _ in range(number * 100):
            log.count("thread test")

    running = [threading.Thread(target=count) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    guard.close()
    total = sum(value for (_, name), value in log._counts.items() if name == "thread test")
    assert total == number * 100 * threads


# -- each refusal once --------------------------------------------------------------------------


async def test_stale_action_is_logged_once(url: str) -> None:
    onceward = Onceward(
        url,
        tenants=SINGLE_TENANT,
        config=GuardConfig(request_log_seconds=KEPT),
        policy=Policy(staleness=Staleness(cap=timedelta(minutes=1), grace=timedelta(0))),
    )
    app = FastAPI()
    onceward.install(app)

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def create() -> dict[str, bool]:
        return {"ok": True}

    await onceward.open()
    try:
        made_at = datetime.now(UTC) - timedelta(days=2)
        body = {"clientGeneratedAt": made_at.isoformat()}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://shop"
        ) as client:
            assert (await client.post("/orders", json=body, headers=KEY)).status_code == 422
    finally:
        await onceward.close()
    assert logged(url) == [("stale", 422)]


async def test_refusal_after_a_framework_s_sign_in_is_logged_once(url: str) -> None:
    def caller() -> Principal:
        return Principal("ann", "ann")

    onceward = Onceward(url, config=GuardConfig(request_log_seconds=KEPT))
    app = FastAPI()
    onceward.install(app)

    @app.post("/orders", status_code=201)
    @onceward.guard(principal=caller)
    async def create() -> dict[str, bool]:
        return {"ok": True}

    await onceward.open()
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://shop"
        ) as client:
            for headers, params, status in (
                (KEY, {}, 201),
                (KEY, {}, 201),
                (KEY, {"a": "1"}, 409),
                (BAD_KEY, {}, 400),
            ):
                response = await client.post("/orders", headers=headers, params=params)
                assert response.status_code == status
    finally:
        await onceward.close()
    assert logged(url) == EXPECTED


# -- bounded ------------------------------------------------------------------------------------


def add(log: RequestLog, number: int, tenant: str = "t") -> None:
    log.add(
        tenant=tenant,
        endpoint="POST /orders",
        key="key",
        request_id=f"request-{number}",
        correlation_id="c",
        outcome="replayed",
        status=200,
    )


async def test_flood_stays_within_the_limits_of_memory_and_table(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward.guard.request_log._FLUSH_SECONDS", 0.01)
    is_sqlite = url.startswith("sqlite")
    store: Any = SqliteStore(url.removeprefix("sqlite:///")) if is_sqlite else PostgresStore(url)
    most = 2_000
    log = RequestLog(store, SystemClock(), most_rows=most)
    log.enable()
    await store.open()
    log.start()
    try:
        largest = 0
        for number in range(100_000):
            add(log, number)
            largest = max(largest, len(log._waiting))
            if number % 10_000 == 0:
                await asyncio.sleep(0.1)
        assert largest <= 5_000
        async with asyncio.timeout(60):
            while log._waiting or not 0 < len(await rows_of(store)) <= most + 1:
                await asyncio.sleep(0.05)
    finally:
        await log.stop()
        await store.close()


async def rows_of(store: Any) -> Any:
    return await store.read(store.table_names.render("SELECT id FROM onceward_request_log"))


async def test_newest_rows_are_kept_when_the_table_is_full(tmp_path: Path) -> None:
    store = SqliteStore(f"{tmp_path}/log.db")
    log = RequestLog(store, SystemClock(), most_rows=10)
    log.enable()
    await store.open()
    log.start()
    try:
        for number in range(30):
            add(log, number)
        await log._flush()
        await log._sweep()
        kept = await store.read(
            store.table_names.render("SELECT request_id FROM onceward_request_log ORDER BY id")
        )
        assert [row["request_id"] for row in kept][-10:] == [f"request-{n}" for n in range(20, 30)]
        assert len(kept) <= 11
    finally:
        await log.stop()
        await store.close()


# -- only where it is asked for -----------------------------------------------------------------


def shop(onceward: Onceward[Any]) -> FastAPI:
    app = FastAPI()
    onceward.install(app)

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def create() -> dict[str, bool]:
        return {"ok": True}

    return app


async def replay(app: FastAPI) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        for _ in range(2):
            assert (await client.post("/orders", headers=KEY)).status_code == 201


@pytest.mark.parametrize(
    ("seconds", "has_console", "is_logged"),
    [
        (None, False, False),
        (None, True, True),
        (KEPT, False, True),
        (KEPT, True, True),
        (0, False, False),
        (0, True, False),
    ],
)
async def test_log_is_written_only_where_it_is_asked_for(
    tmp_path: Path, seconds: float | None, has_console: bool, is_logged: bool
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    onceward = Onceward(url, tenants=SINGLE_TENANT, config=GuardConfig(request_log_seconds=seconds))
    app = shop(onceward)
    if has_console:
        app.mount(
            "/console", console(onceward, access=TokenAccess(onceward.runtime.callers.identify))
        )
    tasks = len(asyncio.all_tasks())
    await onceward.open()
    others = len(asyncio.all_tasks()) - tasks
    try:
        await replay(app)
        reports = onceward.runtime.idempotency.reports
        assert (reports.metrics is onceward.runtime.metrics) is not is_logged
    finally:
        await onceward.close()
    if is_logged or has_console:  # without them there is no table
        assert logged(url) == ([("replayed", 201)] if is_logged else [])
    # The sweep, the seals, the end of the loop; and the log.
    assert others == 3 + is_logged


async def test_console_mounted_on_an_open_app_starts_the_log_with_its_first_page(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    onceward = Onceward(url, tenants=SINGLE_TENANT)
    app = shop(onceward)
    await onceward.open()
    try:
        await replay(app)
        app.mount(
            "/console", console(onceward, access=TokenAccess(onceward.runtime.callers.identify))
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            assert (await client.get("/console/sign-in")).status_code == 200
        await replay_once(app)
    finally:
        await onceward.close()
    assert logged(url) == [("replayed", 201)]


async def replay_once(app: FastAPI) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        assert (await client.post("/orders", headers=KEY)).status_code == 201


# -- gives way to requests ----------------------------------------------------------------------


@pytest.fixture
async def sqlite_log(tmp_path: Path) -> AsyncIterator[tuple[SqliteStore, RequestLog]]:
    store = SqliteStore(f"{tmp_path}/log.db")
    log = RequestLog(store, SystemClock())
    log.enable()
    await store.open()
    log.start()
    yield store, log
    await log.stop()
    await store.close()


async def test_log_does_not_wait_for_another_process_and_fails_no_request(
    sqlite_log: tuple[SqliteStore, RequestLog], tmp_path: Path
) -> None:
    store, log = sqlite_log
    other = sqlite3.connect(f"{tmp_path}/log.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    add(log, 1)
    with pytest.raises(StoreUnavailableError, match="locked"):
        await log._flush()
    # A request that waits behind the log, and for the other process, is served.
    flushing = asyncio.create_task(log._flush())
    while not store._writer._taken:
        await asyncio.sleep(0)
    request = asyncio.create_task(
        store.write(store.table_names.render("UPDATE onceward_request_log SET status = 201"))
    )
    await asyncio.sleep(0.5)
    assert not request.done()
    other.execute("COMMIT")
    await request
    await flushing
    assert [row["request_id"] for row in await requests_of(store)] == ["request-1"]
    other.close()


async def test_rows_that_cannot_be_written_are_bounded_and_counted(
    sqlite_log: tuple[SqliteStore, RequestLog],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, log = sqlite_log
    monkeypatch.setattr("onceward.guard.request_log._MOST_WAITING", 3)
    other = sqlite3.connect(f"{tmp_path}/log.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for number in range(5):
        add(log, number)
    with pytest.raises(StoreUnavailableError):
        await log._flush()
    other.execute("COMMIT")
    other.close()
    await log.stop()
    assert [row["request_id"] for row in await requests_of(store)] == [
        f"request-{number}" for number in range(3)
    ]
    assert "2 requests were not logged" in caplog.text
    (counted,) = await store.read(
        store.table_names.render(
            "SELECT number FROM onceward_request_counts WHERE name = 'not logged'"
        )
    )
    assert counted["number"] == 2


async def test_rows_that_may_have_been_written_are_not_written_twice(
    sqlite_log: tuple[SqliteStore, RequestLog],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, log = sqlite_log
    write = store.write_unless_busy

    async def lost_at_commit(sql: str, params: Any = None) -> Any:
        await write(sql, params)
        raise CommitUnknownError("the connection was lost")

    monkeypatch.setattr(store, "write_unless_busy", lost_at_commit)
    add(log, 1)
    with pytest.raises(CommitUnknownError):
        await log._flush()
    monkeypatch.undo()
    await log.stop()
    assert len(await requests_of(store)) == 1
    assert "1 requests were not logged" in caplog.text


async def test_log_that_cannot_be_written_at_the_end_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(f"{tmp_path}/log.db")
    log = RequestLog(store, SystemClock())
    log.enable()
    await store.open()
    log.start()
    add(log, 1)
    await store.close()
    await log.stop()
    assert "1 requests were not logged" in caplog.text


async def requests_of(store: Any) -> Any:
    return await store.read(
        store.table_names.render("SELECT request_id FROM onceward_request_log ORDER BY id")
    )


# -- in batches ---------------------------------------------------------------------------------


async def test_requests_of_a_batch_that_runs_again_are_logged_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    onceward = Onceward(url, tenants=SINGLE_TENANT, config=GuardConfig(request_log_seconds=KEPT))
    app = FastAPI()
    onceward.install(app, batch="/batch")

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def create(item: str = "boots") -> dict[str, bool]:
        if item == "private":
            raise HTTPException(403, {"code": "not.yours"})
        return {"ok": True}

    commit, ended = RequestChunk.commit, list[bool]()

    async def lost_once(chunk: RequestChunk) -> bool:
        if ended:
            return await commit(chunk)
        ended.append(True)
        await chunk.discard()
        return False

    monkeypatch.setattr(RequestChunk, "commit", lost_once)
    paths = {"a": "/orders", "b": "/orders?item=private", "c": "/orders"}
    items = [{"method": "POST", "path": path, "key": key} for key, path in paths.items()]
    await onceward.open()
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://shop"
        ) as client:
            first = {"idempotency-key": "a"}
            assert (await client.post("/orders", headers=first)).status_code == 201
            response = await client.post("/batch", json={"items": items})
    finally:
        await onceward.close()
    assert [each["status"] for each in response.json()["results"]] == [201, 403, 201]
    assert ended == [True]
    assert logged(url) == [("refused", 403), ("replayed", 201)]


# -- erased tenants -----------------------------------------------------------------------------


@pytest.fixture
async def any_log(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Any, RequestLog]]:
    """Return a log that is written by the test only."""
    is_sqlite = url.startswith("sqlite")
    store: Any = SqliteStore(url.removeprefix("sqlite:///")) if is_sqlite else PostgresStore(url)
    monkeypatch.setattr("onceward.guard.request_log._FLUSH_SECONDS", 3600.0)
    log = RequestLog(store, SystemClock())
    log.enable()
    await store.open()
    log.start()
    yield store, log
    await log.stop()
    await store.close()


async def erase(store: Any, tenant: str) -> None:
    data = await TenantData.open(store, SystemClock())
    await data.erase(tenant, actor="ada", reason="asked")


async def tenants_logged(store: Any) -> list[str]:
    rows = await store.read(
        store.table_names.render("SELECT tenant FROM onceward_request_log ORDER BY tenant")
    )
    return [row["tenant"] for row in rows]


async def test_rows_in_memory_of_an_erased_tenant_are_not_written(
    any_log: tuple[Any, RequestLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, log = any_log
    write, written = log._write, list[str]()

    async def spy(name: str, **values: Any) -> int:
        written.append(str(values))
        return await write(name, **values)

    monkeypatch.setattr(log, "_write", spy)
    add(log, 1, tenant="bob")
    add(log, 2, tenant="eve")
    await erase(store, "bob")
    await log._flush()
    assert "request-2" in written[0]
    assert "request-1" not in written[0]
    assert await tenants_logged(store) == ["eve"]


async def test_rows_written_when_an_erasure_ends_are_deleted(
    any_log: tuple[Any, RequestLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last pass of the erasure, and before its audit event."""
    store, log = any_log
    add(log, 1, tenant="bob")
    add(log, 2, tenant="eve")
    end_sessions = TenantData._end_sessions

    async def write_log(data: TenantData, tenant: str) -> None:
        await log._flush()
        assert await tenants_logged(store) == ["bob", "eve"]
        await end_sessions(data, tenant)

    monkeypatch.setattr(TenantData, "_end_sessions", write_log)
    await erase(store, "bob")
    assert await tenants_logged(store) == ["eve"]


async def test_rows_written_after_an_erasure_has_ended_are_deleted_again(
    any_log: tuple[Any, RequestLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole erasure runs between the look for erased tenants and the write."""
    store, log = any_log
    add(log, 1, tenant="bob")
    add(log, 2, tenant="eve")
    write, written = log._write, list[str]()

    async def write_after_erasure(name: str, **values: Any) -> int:
        if name == "add_requests" and not written:
            await erase(store, "bob")
        written.append(name)
        return await write(name, **values)

    monkeypatch.setattr(log, "_write", write_after_erasure)
    await log._flush()
    assert written[:2] == ["add_requests", "delete_requests"]
    assert await tenants_logged(store) == ["eve"]


async def test_requests_of_a_tenant_that_is_used_again_are_logged(
    any_log: tuple[Any, RequestLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, log = any_log
    await erase(store, "bob")
    monkeypatch.setattr("onceward.guard.request_log._CLOCK_MARGIN_SECONDS", 0.0)
    add(log, 1, tenant="bob")
    await log._flush()
    assert await tenants_logged(store) == ["bob"]


class _Order(BaseModel):
    count: int


async def test_what_the_app_refuses_before_the_claim_is_logged_if_it_knows_the_caller(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    app, onceward = FastAPI(), Onceward(url, config=GuardConfig(request_log_seconds=KEPT))
    onceward.install(app)

    def caller(x_user: Annotated[str, Header()]) -> Principal:
        if x_user == "stranger":
            raise HTTPException(401)
        return Principal(tenant=x_user, actor=x_user)

    @app.post("/orders", status_code=201)
    @onceward.guard("POST /orders", principal=caller)
    async def create(order: _Order) -> dict[str, int]:
        return {"count": order.count}

    await onceward.open()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        statuses = [
            (await client.post("/orders", json={"count": count}, headers=KEY | {"X-User": user}))
            for user, count in (("stranger", 1), ("ada", "many"), ("ada", 1))
        ]
    assert [each.status_code for each in statuses] == [401, 422, 201]
    await onceward.close()
    assert logged(url) == [("refused", 422)]
