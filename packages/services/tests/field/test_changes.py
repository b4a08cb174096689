"""Changes of all kinds by cursor, on SQLite and on PostgreSQL."""

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from onceward.stores.sql_loader import load_queries
from onceward_services.field.repository import list_changes
from packages.services.tests.conftest import Serve, signed_in

from .test_field import ACTIVITIES, CONTACTS, EXPENSES, created, key

CHANGES = "/api/v1/changes"


@pytest.fixture
async def client(serve: Serve, database_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with serve(database_url) as made:
        yield made


async def pulled(client: httpx.AsyncClient, after: str | None = None, **more: Any) -> Any:
    params = {"after": after, **more} if after else more
    response = await client.get(CHANGES, params=params)
    assert response.status_code == 200, response.text
    return response.json()


async def test_changes_of_all_kinds_come_in_order_of_commits_with_tombstones(
    client: httpx.AsyncClient,
) -> None:
    empty = await pulled(client)
    assert empty["items"] == []
    activity = await created(client, ACTIVITIES, title="Visit")
    contact = await created(client, CONTACTS, name="Ada")
    expense = await created(client, EXPENSES, amount=5, activity_id=activity["id"])
    first = await pulled(client, empty["next"], limit=2)
    assert [(i["kind"], i["resource"]) for i in first["items"]] == [
        ("activities", activity),
        ("contacts", contact),
    ]
    assert {(i["id"], i["version"], i["deleted"]) for i in first["items"]} == {
        (activity["id"], 1, False),
        (contact["id"], 1, False),
    }
    await client.delete(f"{CONTACTS}/{contact['id']}", headers=key())
    changed = await client.patch(
        f"{ACTIVITIES}/{activity['id']}", json={"title": "Call"}, headers=key()
    )
    second = await pulled(client, first["next"])
    assert second["items"] == [
        {
            "kind": "expenses",
            "id": expense["id"],
            "version": 1,
            "deleted": False,
            "resource": expense,
        },
        {
            "kind": "contacts",
            "id": contact["id"],
            "version": 2,
            "deleted": True,
            "resource": None,
        },
        {
            "kind": "activities",
            "id": activity["id"],
            "version": 2,
            "deleted": False,
            "resource": changed.json(),
        },
    ]
    last = await pulled(client, second["next"])
    assert last == {"items": [], "next": second["next"]}
    theirs = (await client.get(CHANGES, headers=signed_in("bob"))).json()
    assert theirs["items"] == []


async def test_cursor_is_url_safe_and_anything_else_is_refused(client: httpx.AsyncClient) -> None:
    await created(client, ACTIVITIES, n=1)
    cursor = (await pulled(client))["next"]
    assert set(cursor) <= set("0123456789abcdef-")
    for after in ("", "x", "-1", "7", "0-01", "0-1 ", "0--1", f"0-{'9' * 30}", "é-1"):
        response = await client.get(CHANGES, params={"after": after})
        assert (response.status_code, response.json()["code"]) == (400, "request.invalid"), after
    for params in ({"limit": 0}, {"limit": 501}, {"wait": -1}, {"wait": "nan"}):
        assert (await client.get(CHANGES, params=params)).status_code in (400, 422), params


async def test_waiting_request_responds_after_the_next_change(client: httpx.AsyncClient) -> None:
    await created(client, ACTIVITIES, n=1)
    cursor = (await pulled(client))["next"]
    waiting = asyncio.create_task(pulled(client, cursor, wait=30))
    await asyncio.sleep(0.05)  # most often the request waits by now; it works either way
    made = await created(client, CONTACTS, n=2)
    page = await asyncio.wait_for(waiting, 25)
    assert [item["id"] for item in page["items"]] == [made["id"]]


async def test_waiting_request_finds_changes_of_other_processes(
    serve: Serve, postgres_url: str
) -> None:
    async with serve(postgres_url) as client, serve(postgres_url) as other:
        cursor = (await pulled(client))["next"]
        waiting = asyncio.create_task(pulled(client, cursor, wait=40))
        await asyncio.sleep(0.05)
        made = await created(other, CONTACTS, n=2)
        page = await asyncio.wait_for(waiting, 35)
        assert [item["id"] for item in page["items"]] == [made["id"]]


async def test_wait_ends_without_changes(serve: Serve, sqlite_url: str) -> None:
    async with serve(sqlite_url, field_changes_wait_seconds=0.01) as client:
        assert (await asyncio.wait_for(pulled(client, wait=1000), 30))["items"] == []


async def test_waiting_requests_of_a_user_are_limited(serve: Serve, sqlite_url: str) -> None:
    async with serve(sqlite_url, field_changes_waiting=1) as client:
        both = {asyncio.create_task(client.get(CHANGES, params={"wait": 60})) for _ in "ab"}
        ended, waiting = await asyncio.wait(both, timeout=30, return_when="FIRST_COMPLETED")
        refused = ended.pop().result()
        assert (refused.status_code, refused.json()["code"]) == (429, "quota.exceeded")
        assert refused.json()["details"] == {"resource": "streams", "limit": 1}
        # Those that do not wait are not counted.
        assert (await pulled(client))["items"] == []
        await created(client, ACTIVITIES, n=1)
        response = await asyncio.wait_for(waiting.pop(), 30)
        assert len(response.json()["items"]) == 1


async def test_cursor_of_lost_changes_is_gone(serve: Serve, database_url: str) -> None:
    apps: list[Any] = []
    async with serve(database_url, prepare=apps.append) as client:
        store = apps[0].state.onceward.store
        for n in range(3):
            await created(client, ACTIVITIES, n=n)
        seen = (await pulled(client, limit=2))["next"]
        lost = (await pulled(client))["next"]
        # As a restore of a backup made after the second change.
        await store.write("DELETE FROM field_items WHERE seq = 3", {})
        await store.write("UPDATE field_counters SET seq = 2", {})
        assert (await client.get(CHANGES, params={"after": lost})).status_code == 410
        await store.write("UPDATE field_counters SET epoch = 'of the backup'", {})
        for n in range(2):
            await created(client, CONTACTS, n=n)
        gone = await client.get(CHANGES, params={"after": lost})
        assert (gone.status_code, gone.json()["code"]) == (410, "changes.cursor_gone")
        # What the device had seen before the backup is still true.
        page = await pulled(client, seen)
        assert [item["kind"] for item in page["items"]] == ["contacts", "contacts"]
        # Another epoch without a loss: both cursors continue.
        await store.write("UPDATE field_counters SET epoch = 'moved'", {})
        await created(client, EXPENSES, n=9)
        for cursor, count in (seen, 3), (page["next"], 1):
            assert len((await pulled(client, cursor))["items"]) == count
        unknown = await client.get(CHANGES, params={"after": "abcdef-1"})
        assert unknown.status_code == 410


async def test_page_is_limited_in_bytes(serve: Serve, database_url: str) -> None:
    apps: list[Any] = []
    async with serve(database_url, prepare=apps.append) as client:
        for _ in range(4):
            await created(client, ACTIVITIES, text="é" * 90)
        store = apps[0].state.onceward.store
        sizes = {}
        for most_bytes in (1, 150, 10_000):
            page = await list_changes(store, "ada", after=0, limit=9, most_bytes=most_bytes)
            sizes[most_bytes] = len(page.items)
        assert sizes == {1: 1, 150: 2, 10_000: 4}


async def test_time_of_the_device_becomes_occurred_at(client: httpx.AsyncClient) -> None:
    acted = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
    headers = key(X_Client_Generated_At="2026-01-31T10:30:00+01:00")
    made = (await client.post(ACTIVITIES, json={"occurred_at": "x"}, headers=headers)).json()
    assert made["occurred_at"] == "2026-01-31T09:30:00.000000Z"
    assert datetime.fromisoformat(made["created_at"]) - acted > timedelta(days=1)
    one = f"{ACTIVITIES}/{made['id']}"
    later = key(X_Client_Generated_At="2026-02-01T00:00:00Z")
    changed = (await client.put(one, json={"n": 1}, headers=later)).json()
    assert changed["occurred_at"] == made["occurred_at"]
    assert (await client.get(one)).json() == changed
    assert (await client.get(ACTIVITIES)).json()["items"] == [changed]
    now = await created(client, ACTIVITIES)
    assert now["occurred_at"] == now["created_at"]
    for odd in ("yesterday", "2026-01-31T09:30:00", ""):
        refused = await client.post(ACTIVITIES, json={}, headers=key(X_Client_Generated_At=odd))
        assert (refused.status_code, refused.json()["code"]) == (400, "request.invalid"), odd


async def test_documents_made_before_occurred_at_existed_have_the_time_of_their_creation(
    serve: Serve, database_url: str
) -> None:
    apps: list[Any] = []
    async with serve(database_url, prepare=apps.append) as client:
        made = await created(client, ACTIVITIES, n=1)
        await apps[0].state.onceward.store.write("UPDATE field_items SET occurred_at = NULL", {})
        assert (await client.get(f"{ACTIVITIES}/{made['id']}")).json() == made


async def test_changes_read_only_their_page_of_a_long_history(
    serve: Serve, database_url: str
) -> None:
    numbers = (
        "WITH RECURSIVE numbers (n) AS"
        " (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 3000)"
    )
    add = (
        f"{numbers} INSERT INTO field_items (tenant, kind, id, version, document, seq, created_at,"
        " updated_at) SELECT :tenant, 'activities', 'x' || n, 1, '{}', n, :now, :now FROM numbers"
    )
    values = {"tenant": "'ada'", "after": "2900", "limit": "10", "most_bytes": "100000"}
    query = load_queries("onceward_services.field")["changes"]
    query = re.sub(r"(?<!:):(\w+)", lambda name: values[name[1]], query)
    apps: list[Any] = []
    async with serve(database_url, prepare=apps.append):
        store = apps[0].state.onceward.store
        for tenant in ("ada", "eve", "bob"):
            await store.write(add, {"tenant": tenant, "now": datetime.now(UTC)})
        if store.name == "sqlite":
            plan = [row["detail"] for row in await store.read(f"EXPLAIN QUERY PLAN {query}")]
            assert (
                "SEARCH field_items USING INDEX idx_field_items_changes (tenant=? AND seq>?)"
                in (plan)
            )
        else:
            await store.write("ANALYZE field_items")
            plan = [row["QUERY PLAN"] for row in await store.read(f"EXPLAIN {query}")]
            assert any("Index Scan using idx_field_items_changes" in line for line in plan), plan
            assert not any("Seq Scan on field_items" in line for line in plan), plan
