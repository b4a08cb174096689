"""Every page and every action of the console, with the pages of all services.

On PostgreSQL and Citus; ``test_console_tenants`` opens all of them on SQLite.
"""

import asyncio
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

import httpx
import pytest

from packages.onceward.tests.support.citus import ON_CITUS
from packages.services.tests.browser.services_rows import DELIVERY, REVIEWS, WEBHOOK
from packages.services.tests.conftest import Serve
from packages.services.tests.support.operator_browser import OperatorBrowser
from packages.services.tests.test_console_tenants import (
    ENDPOINT,
    KEY,
    MARK,
    TENANTS,
    fill,
    pages_of,
    paths_of,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

OK = 200


SETTINGS: Final = {"console_enabled": True, "console_operators": "boss"}


@pytest.fixture(params=["postgres", *ON_CITUS])
def postgresql_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


async def test_every_page_of_the_console_responds(serve: Serve, postgresql_url: str) -> None:
    apps: list[FastAPI] = []
    async with serve(postgresql_url, prepare=apps.append, **SETTINGS) as client:
        ids = await fill(client, apps[0].state.onceward)
        of_one: list[dict[str, str]] = [{}, *({"tenant": name} for name in TENANTS)]
        queries: list[dict[str, str]] = [{}, {"endpoint": ENDPOINT, "key": KEY, "tenant": "bob"}]
        queries += [{"state": state} for state in ("running", "done", "dead")]
        queries += [
            {"q": KEY},
            {"q": ids["request_id"][2]},
            {"tenant": "acme"},
            {"tenant": "wanda"},
        ]
        queries += [{"queue": "routes"}, {"tenant": "bob", "type": "route.generate"}]
        for sub, asked in (("boss", queries), ("bob", queries[:2])):
            browser = OperatorBrowser(client)
            await browser.sign_in(sub, "admin", now=datetime.now(UTC))
            for page in pages_of(apps[0]):
                if page.method != "GET":
                    continue
                statuses = [
                    (await browser.get(f"{path}?{urlencode(query)}")).status_code
                    for path in paths_of(page, ids)
                    for query in (of_one if "{" in page.path else asked)
                ]
                assert set(statuses) <= {OK, 400, 403, 404}, (page.path, statuses)
                if sub == "boss":
                    assert OK in statuses, page.path


async def test_requests_without_a_record_are_listed_by_outcome(
    serve: Serve, postgresql_url: str
) -> None:
    apps: list[FastAPI] = []
    async with serve(postgresql_url, prepare=apps.append, **SETTINGS) as client:
        _, replayed, mismatched = (await fill(client, apps[0].state.onceward))["request_id"]
        for sub in ("boss", "bob"):
            browser = OperatorBrowser(client)
            await browser.sign_in(sub, "admin", now=datetime.now(UTC))
            for outcome, expected in (
                ("", {replayed, mismatched}),
                ("replayed", {replayed}),
                ("mismatched", {mismatched}),
                ("stale", set()),
            ):
                page = await browser.get(f"requests?outcome={outcome}" if outcome else "requests")
                assert page.status_code == OK, (outcome, page.text)
                found = set(re.findall(r'href="/console/requests/([^"?]+)', page.text))
                assert found == expected, (sub, outcome)


async def test_every_action_of_the_console_has_its_effect(
    serve: Serve, postgresql_url: str
) -> None:
    apps: list[FastAPI] = []
    async with serve(postgresql_url, prepare=apps.append, **SETTINGS) as client:
        onceward = apps[0].state.onceward
        await fill(client, onceward)
        boss = await OperatorBrowser(client).sign_in("boss", "admin", now=datetime.now(UTC))

        async def act(path: str, **fields: str) -> httpx.Response:
            page = await boss.post(path, reason="asked for", **fields)
            assert page.status_code == OK, (path, page.text)
            return page

        async def count(sql: str) -> int:
            store = onceward.store
            query = store.table_names.render(f"SELECT count(*) AS n FROM {sql}")
            (row,) = await store.read(query)
            return int(row["n"])

        waiting = "onceward_jobs WHERE queue = 'routes' AND state = 'waiting'"
        dead = "onceward_dead_letters WHERE queue = 'routes' AND requeued_at IS NULL"
        assert await count(waiting) == 2
        await act("queues/pause", queue="routes")
        assert "asked for" in (await boss.get("queues")).text
        assert await onceward.store.read(
            onceward.store.table_names.render("SELECT queue FROM onceward_paused_queues")
        )
        await act("queues/resume", queue="routes")
        assert not await onceward.store.read(
            onceward.store.table_names.render("SELECT queue FROM onceward_paused_queues")
        )

        (job, *_) = [
            row["id"]
            for row in await onceward.store.read(
                onceward.store.table_names.render(
                    "SELECT CAST(id AS text) AS id FROM onceward_jobs WHERE queue = 'routes'"
                )
            )
        ]
        await act(f"jobs/{job}/cancel", tenant="bob")
        assert (await count(waiting), await count(dead)) == (1, 1)
        await act(f"jobs/{job}/requeue", tenant="bob")
        assert (await count(waiting), await count(dead)) == (2, 0)
        assert "2" in (await boss.get("jobs/cancel?queue=routes")).text
        await act("jobs/cancel", queue="routes")
        assert (await count(waiting), await count(dead)) == (0, 2)
        await act("dead-letters/requeue", queue="routes")
        assert (await count(waiting), await count(dead)) == (2, 0)

        record = f"onceward_idempotency_records WHERE idempotency_key = '{KEY}'"
        assert await count(record) == 1
        await act("records/remove", tenant="bob", endpoint=ENDPOINT, key=KEY)
        assert await count(record) == 0

        review = REVIEWS["wanda"]
        await act(f"reviews/{review}/resolve", tenant="wanda", decision="reject")
        assert await count(f"walk_reviews WHERE id = '{review}' AND status = 'open'") == 0
        await act(f"webhooks/{WEBHOOK}/deliveries/{DELIVERY}/resend", tenant="acme")
        assert await count(f"planning_deliveries WHERE id = '{DELIVERY}' AND state = 'failed'") == 0

        exported = await act("tenants/export", tenant="bob")
        assert MARK in exported.text
        assert '"complete": true' in exported.text
        assert await count("field_items WHERE tenant = 'bob'") == 1
        await act("tenants/erase", tenant="bob", confirmed="bob")
        async with asyncio.timeout(30):
            while await count("field_items WHERE tenant = 'bob'"):
                await asyncio.sleep(0.05)
        assert await count("walk_reviews") == len(REVIEWS)  # of other tenants
