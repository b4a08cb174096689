"""Limits on what a caller can use up: unread bodies, time, memory, threads, waiting duplicates."""

import asyncio
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import Client

from onceward import SINGLE_TENANT, GuardConfig, Onceward, Policy
from onceward.errors import ConfigurationError, NotAuthenticatedError
from onceward.frameworks.wsgi import WsgiGuard
from onceward.guard import pipeline
from onceward.guard import request as guarded_request
from onceward.guard.limits import Limits
from onceward.guard.request import RequestHead, parse_request
from onceward.guard.request_body import LARGE_BODY_BYTES
from onceward_protocol.error_codes import CODES
from packages.onceward.tests.support.harness import Connection, HeldClock, open_lab

LARGE = b"[" + b"1," * LARGE_BODY_BYTES + b"1]"


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/lab.db"


@pytest.fixture
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceward.guard.request_body._LINGER_IDLE_SECONDS", 0.05)


def is_closed(connection: Connection) -> bool:
    return (b"connection", b"close") in connection.sent[0]["headers"]


async def test_a_caller_who_is_not_signed_in_is_refused_before_the_body_is_read(
    database: str, short_linger: None
) -> None:
    async with open_lab(database) as lab:
        connection = Connection(headers={"x-tenant": "not-signed-in", "content-length": "1000"})
        task = connection.run(lab.app)
        while not connection.sent:
            await asyncio.sleep(0.001)
        assert (connection.status, is_closed(connection)) == (401, True)
        await task
        assert connection.sent[-1] == {"type": "http.response.body", "body": b""}


async def test_a_refused_caller_whose_body_is_there_keeps_its_connection(database: str) -> None:
    async with open_lab(database) as lab:
        connection = Connection(headers={"x-tenant": "not-signed-in"})
        connection.feed(b"{}", more=True)
        connection.feed(b"")
        await connection.run(lab.app)
        assert (connection.status, is_closed(connection)) == (401, False)


async def test_the_rest_of_a_refused_body_is_read_so_that_the_client_gets_the_response(
    database: str, short_linger: None
) -> None:
    async with open_lab(database) as lab:
        connection = Connection(headers={"x-tenant": "not-signed-in", "content-length": "1000"})
        task = connection.run(lab.app)
        while len(connection.sent) < 2:
            await asyncio.sleep(0.001)
        assert connection.sent[1]["more_body"], "the connection stays open"
        connection.feed(b"x" * 999, more=True)
        connection.feed(b"x")
        await task
        assert connection.to_app.empty()


async def test_a_body_that_arrived_while_the_process_was_stopped_is_in_time(database: str) -> None:
    policy = Policy(body_deadline=timedelta(seconds=0.05))
    async with open_lab(database, policy) as lab:
        connection = Connection()
        connection.feed(b'{"a":', more=True)
        connection.feed(b"1}")
        is_stopped = False

        async def receive() -> Any:
            nonlocal is_stopped
            if connection.to_app.qsize() == 1 and not is_stopped:
                is_stopped = True
                time.sleep(0.1)
                for _ in range(3):
                    await asyncio.sleep(0)
            return await connection.to_app.get()

        await lab.app(connection.scope, receive, connection.send)
        assert connection.status == 201


async def test_large_bodies_above_the_memory_limit_are_503_until_others_are_done(
    database: str, short_linger: None
) -> None:
    # Two tenants may hold one each; a second one of the same tenant is above its half.
    limits = Limits(body_memory_bytes=2 * len(LARGE))
    async with open_lab(database, limits=limits) as lab:
        held = []
        for tenant in ("ada", "bob"):
            connection = Connection(headers={"x-tenant": tenant})
            connection.feed(LARGE[:-1], more=True)
            held.append((connection, connection.run(lab.app)))
        while lab.onceward.runtime.bodies.held_bytes < 2 * len(LARGE) - 2:
            await asyncio.sleep(0.001)
        for tenant in ("ada", "cy"):
            refused = await lab.send(f"key-{tenant}", content=LARGE, headers={"X-Tenant": tenant})
            assert (refused.status_code, refused.json()["code"]) == (503, "server.overloaded")
            assert refused.headers["retry-after"] == "1"
        small = await lab.send("key-small", headers={"X-Tenant": "ada"})
        assert small.status_code == 201, "a small body always has space"
        for connection, task in held:
            connection.feed(LARGE[-1:])
            await task
            assert connection.status == 201
        assert lab.onceward.runtime.bodies.held_bytes == 0
        again = await lab.send("key-cy", content=LARGE, headers={"X-Tenant": "cy"})
        assert again.status_code == 201


async def test_large_bodies_are_parsed_in_a_thread_one_at_a_time(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[tuple[int, bool]] = []
    running = 0
    real = parse_request

    def parse_slowly(*parts: Any) -> Any:
        nonlocal running
        running += 1
        is_loop = threading.current_thread() is threading.main_thread()
        threads.append((running, is_loop))
        if not is_loop:
            time.sleep(0.02)
        try:
            return real(*parts)
        finally:
            running -= 1

    monkeypatch.setattr(pipeline, "parse_request", parse_slowly)
    async with open_lab(database) as lab:
        sent = [lab.send_soon(f"key-{n}", content=LARGE) for n in range(3)]
        assert [response.status_code for response in await asyncio.gather(*sent)] == [201] * 3
        assert threads == [(1, False)] * 3
        await lab.send("key-small")
        assert threads[-1] == (1, True), "a thread costs more than a small body"


async def test_too_many_waiting_duplicates_of_a_tenant_get_in_progress_at_once(
    database: str,
) -> None:
    async with open_lab(database, limits=Limits(waiting_per_tenant=2)) as lab:
        first = lab.send_soon(do="wait")
        await lab.started.wait()
        duplicates = [lab.send_soon(do="wait") for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = await lab.send(do="wait")
        assert (refused.status_code, refused.json()["code"]) == (409, "idempotency.in_progress")
        with lab.onceward.runtime.idempotency.in_flight.waiting("bob"):
            pass  # another tenant's duplicates may wait
        lab.gate.set()
        assert (await first).status_code == 201
        for duplicate in await asyncio.gather(*duplicates):
            assert duplicate.headers["idempotency-replayed"] == "true"
        assert (await lab.send(do="wait")).headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize("server", ["sqlite", "postgresql"])
async def test_a_tenant_with_too_many_records_gets_429_for_new_keys(
    server: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    database = f"sqlite:///{tmp_path}/lab.db"
    if server == "postgresql":
        database = request.getfixturevalue("postgres_url")
    clock = HeldClock()
    limits = Limits(records_per_tenant=3)
    async with open_lab(database, clock=clock, limits=limits, memory_bytes=0) as lab:
        for number in range(3):
            assert (await lab.send(f"key-{number}")).status_code == 201
        await lab.onceward.runtime.idempotency.close()  # waits for the count
        refused = await lab.send("key-9")
        assert (refused.status_code, refused.json()["code"]) == (429, "quota.exceeded")
        assert refused.json()["details"] == {"resource": "records", "limit": 3}
        assert refused.headers["retry-after"] == "60"
        assert (await lab.send("key-0")).headers["idempotency-replayed"] == "true"
        assert (await lab.send("key-9", headers={"X-Tenant": "bob"})).status_code == 201
        clock.pass_by(days=2)
        await lab.onceward.runtime.sweeper.sweep()
        assert (await lab.send("key-9")).status_code == 429, "counted again by this request"
        await lab.onceward.runtime.idempotency.close()
        assert (await lab.send("key-9")).status_code == 201


def test_wsgi_reads_the_body_after_the_sign_in(database: str) -> None:
    order: list[str] = []

    def refuse(_head: RequestHead) -> Any:
        order.append("identify")
        raise NotAuthenticatedError("sign in first")

    class Input:
        def read(self, size: int) -> bytes:
            order.append("read")
            return b"x" * size

    onceward = Onceward(database, identify=refuse)
    onceward.guard_path("POST", "/orders")
    guard = WsgiGuard(lambda _environ, _start: [], onceward)
    try:
        environ = {"wsgi.input": Input(), "CONTENT_LENGTH": "5"}
        response = Client(guard).post("/orders", environ_overrides=environ)
    finally:
        guard.close()
    assert response.status_code == 401
    assert order[0] == "identify"


def test_times_of_a_large_body_are_found_without_decoding_the_rest() -> None:
    rest = b",".join([b"1e300"] * 150_000)
    for body in (
        b'{"clientGeneratedAt":"2026-03-01T12:00:00Z","rest":[%s]}' % rest,
        b'{"clientGeneratedAt":"2026-03-01T12:00:00Z","clientSubmittedAt":[%s]}' % rest,
    ):
        started = time.process_time()
        fields = guarded_request._fields(body)
        assert time.process_time() - started < 0.3
        assert fields["clientGeneratedAt"] == "2026-03-01T12:00:00Z"
        assert fields.get("clientSubmittedAt", []) == []
    assert guarded_request._fields(b"[1]") == {}


def test_limits_must_be_positive_and_codes_exist() -> None:
    for name in ("body_memory_bytes", "waiting_per_tenant", "records_per_tenant"):
        with pytest.raises(ConfigurationError, match=name):
            Limits(**{name: 0})
        Onceward(
            "sqlite:///x.db",
            tenants=SINGLE_TENANT,
            config=GuardConfig(limits=Limits(**{name: None})),
        )
    with pytest.raises(ConfigurationError, match="deadline"):
        Policy(body_deadline=timedelta(0))
    statuses = {
        kind: CODES[kind].status for kind in ("body_timeout", "quota_exceeded", "overloaded")
    }
    assert statuses == {"body_timeout": 408, "quota_exceeded": 429, "overloaded": 503}
