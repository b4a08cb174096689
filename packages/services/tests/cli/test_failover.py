"""``onceward serve`` on a PostgreSQL that waits for a standby, and on one that is frozen."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest

from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.standby import (
    HANG_SECONDS,
    absent_standby,
    set_standbys,
)
from packages.services.tests.cli.conftest import ROUTES, WALK, Cli, Server, token

pytestmark = pytest.mark.xdist_group("failover")

COMMITS = (
    "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query LIKE '%save_record%'"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RealPostgres]:
    """Return a server of its own: all its commits wait."""
    with RealPostgres() as started:
        yield started


def post(running: Server, bearer: str, key: str) -> int | None:
    """Send a request; return the status, or None if the connection was closed."""
    try:
        with running.client(bearer) as client:
            response = client.post(
                ROUTES, json=WALK, headers={"Idempotency-Key": key}, timeout=HANG_SECONDS
            )
            return response.status_code
    except httpx.TransportError:
        return None


def post_for_code(running: Server, bearer: str, key: str) -> tuple[str, str]:
    """Send a request that fails; return its code and the reason."""
    with running.client(bearer) as client:
        response = client.post(
            ROUTES, json=WALK, headers={"Idempotency-Key": key}, timeout=HANG_SECONDS
        )
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    problem = response.json()
    return problem["code"], problem["details"]["reason"]


async def test_sigterm_while_a_commit_waits_reports_no_success(
    server: RealPostgres, serve: Callable[..., Server], cli: Cli
) -> None:
    url, key = server.create_database(), str(uuid4())
    settings: dict[str, Any] = {
        "ONCEWARD_SHUTDOWN_SECONDS": "1",
        "ONCEWARD_WAIT_SECONDS": "1",
        "ONCEWARD_DATABASE_STATEMENT_SECONDS": "2",
    }
    options = ("--database", url, "--no-jobs")
    running = await asyncio.to_thread(serve, *options, **settings)
    bearer = token(cli)
    async with absent_standby(url) as observer:
        statuses: list[object] = []
        sender = threading.Thread(
            target=lambda: statuses.append(post_for_code(running, bearer, key))
        )
        sender.start()
        async with asyncio.timeout(HANG_SECONDS):
            while not (waiting := await observer.fetch(COMMITS)):
                await asyncio.sleep(0.02)
        assert await asyncio.to_thread(running.stop) == 0
        await asyncio.to_thread(sender.join)
        assert statuses == [("idempotency.store_unavailable", "outcome_unknown")]
        assert await observer.fetch(COMMITS) == waiting  # it was not cancelled
        settings["ONCEWARD_DATABASE_COMMIT_SECONDS"] = "1"
        again = await asyncio.to_thread(serve, *options, **settings)
        assert await asyncio.to_thread(post, again, bearer, key) in (503, 409)
        # An operator ends the wait: the record can be read, and is not on a standby.
        await observer.fetch("SELECT pg_cancel_backend($1)", waiting[0]["pid"])
        assert await asyncio.to_thread(post, again, bearer, key) == 503
        await set_standbys(observer, "")
        async with asyncio.timeout(HANG_SECONDS):
            while await asyncio.to_thread(post, again, bearer, key) != 202:
                await asyncio.sleep(0.1)
    assert await count(url) == 1


async def test_frozen_database_under_100_requests(
    server: RealPostgres, serve: Callable[..., Server], cli: Cli
) -> None:
    url = server.create_database()
    running = await asyncio.to_thread(
        serve,
        "--database",
        url,
        "--no-jobs",
        ONCEWARD_DATABASE_CONNECT_SECONDS="2",
        ONCEWARD_DATABASE_CLAIM_SECONDS="2",
        ONCEWARD_DATABASE_STATEMENT_SECONDS="2",
        ONCEWARD_DATABASE_COMMIT_SECONDS="2",
    )
    headers = {"Authorization": f"Bearer {token(cli)}"}
    keys = [str(uuid4()) for _ in range(100)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=running.url, headers=headers, timeout=HANG_SECONDS, limits=limits
    ) as client:

        async def send(key: str) -> tuple[int, float]:
            started = time.monotonic()
            response = await client.post(ROUTES, json=WALK, headers={"Idempotency-Key": key})
            assert response.status_code != 503 or "retry-after" in response.headers
            return response.status_code, time.monotonic() - started

        first, _ = await send(str(uuid4()))
        assert first == 202
        with server.frozen():
            results = await asyncio.gather(*(send(key) for key in keys))
            assert {status for status, _ in results} == {503}
            slowest = max(seconds for _, seconds in results)
            print(f"503 after at most {slowest:.1f} s")
            assert slowest < 9  # less than the wait for a free connection, with the default
        thawed = time.monotonic()
        async with asyncio.timeout(HANG_SECONDS):
            while (await send(keys[0]))[0] != 202:
                await asyncio.sleep(0.05)
        print(f"first success {time.monotonic() - thawed:.2f} s after the thaw")
        async with asyncio.timeout(HANG_SECONDS):
            left = keys
            while left:
                statuses = [(await send(key))[0] for key in left]
                left = [k for k, status in zip(left, statuses, strict=True) if status != 202]
    assert await count(url) == 101


async def count(url: str) -> int:
    """Return the number of routes."""
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM onceward.idempotency_records"))
    finally:
        await connection.close()


def test_durability_is_logged_or_required(
    server: RealPostgres, serve: Callable[..., Server], cli: Cli
) -> None:
    url = server.create_database()
    for command in (["serve"], ["worker", "--once"]):
        refused = cli(*command, "--database", url, "--require-durability", "replicated")
        assert refused.returncode != 0
        assert "not replicated as required" in refused.stderr.splitlines()[-1].decode()
    running = serve("--database", url, "--no-jobs")
    running.stop()
    lines = [line for line in running.stderr().splitlines() if "synchronous standbys: none" in line]
    assert len(lines) == 1
