"""Notifications are read in pages and as a stream, and marked as read, on both databases."""

import asyncio
import json
import os
import random
import re
import sqlite3
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import asyncpg
import pytest

from onceward_protocol.ids import new_id
from onceward_services.planning import inbox as inbox_module
from onceward_services.planning.inbox import Cursor, Inbox, add_notification, read_inbox
from packages.services.tests.conftest import Serve
from packages.services.tests.support.event_reader import listening

from .fixtures import NOWHERE, Member, OpenPlanning, PlanningServer, ok, opener, refused, tag, token

PATH = "/v1/notifications"
ROUNDS = int(os.environ.get("ONCEWARD_TEST_ROUNDS", "12"))
WRITERS = 32 if ROUNDS >= 1000 else 6
NOW = datetime(2026, 1, 31, tzinfo=UTC)


async def notify(
    store: Any, whose: Inbox, number: int, *, commit: bool = True, kind: str = "moved"
) -> str:
    """Add a notification as the job does; returns its id."""
    unit, notification_id = await store.begin(), new_id(NOW)
    about = {"assignment_id": f"a{number}", "version": 1, "kind": kind, "mission_id": NOWHERE}
    await add_notification(unit.statements, whose, about, notification_id=notification_id, now=NOW)
    await asyncio.sleep(0)
    await (unit.commit(None, None) if commit else unit.rollback())
    return notification_id


async def notify_often(store: Any, whose: Inbox, times: int) -> None:
    """Add notifications in one transaction."""
    unit = await store.begin()
    for number in range(times):
        about = {"assignment_id": f"a{number}", "version": 1, "kind": "moved", "mission_id": "m"}
        await add_notification(unit.statements, whose, about, notification_id=new_id(NOW), now=NOW)
    await unit.commit(None, None)


async def items(member: Member, query: str = "") -> list[Any]:
    return list((await member.read(f"{PATH}{query}"))["items"])


# -- pages ----------------------------------------------------------------------------------------


async def test_a_person_reads_own_notifications_and_marks_them_as_read(
    planning: PlanningServer,
) -> None:
    bob = planning.member("bob", "acme", "viewer")
    mission = await planning.mission(title="Survey")
    path = await planning.assignment(mission)
    assert await bob.read(PATH) == {"items": [], "next": None}
    ok(await planning.patch(path, {"role": "pilot"}, **tag(1)))
    await planning.all_jobs_done()
    # In the order of the writes, although workers run several jobs at a time.
    first, second = await items(bob)
    assert [first["kind"], second["kind"]] == ["assigned", "changed"]
    project = (await planning.read(mission))["project_id"]
    assert first == {
        "id": first["id"],
        "kind": "assigned",
        "assignment_id": path.rpartition("/")[2],
        "version": 1,
        "mission_id": mission.rpartition("/")[2],
        "mission_title": "Survey",
        "project_id": project,
        "created_at": first["created_at"],
        "read_at": None,
        "cursor": f"1-{first['id'][-12:]}",
    }
    assert datetime.fromisoformat(first["created_at"]).tzinfo is not None
    read = ok(await bob.post(f"{PATH}/{first['id']}/read", None, key="k"))
    assert read == first | {"read_at": read["read_at"]}
    assert read["read_at"] is not None
    again = await bob.post(f"{PATH}/{first['id']}/read", None)
    assert ok(again) == read, "it keeps the time"
    replay = await bob.post(f"{PATH}/{first['id']}/read", None, key="k")
    assert replay.headers["idempotency-replayed"] == "true"
    assert await items(bob) == [read, second]
    assert await items(bob, "?unread=true") == [second]
    refused(await bob.send("POST", f"{PATH}/{first['id']}/read", Idempotency_Key=""), 400,
            "idempotency.key_invalid")  # fmt: skip


async def test_pages_follow_one_another_and_a_cursor_is_good_for_ever(
    planning: PlanningServer,
) -> None:
    store, ada = planning.onceward.store, Inbox("org:acme", "ada")
    ids = [await notify(store, ada, number) for number in range(7)]
    pages = await planning.pages(PATH, 3)
    assert [[item["id"] for item in page] for page in pages] == [ids[:3], ids[3:6], ids[6:]]
    last = pages[-1][-1]["cursor"]
    assert await planning.read(f"{PATH}?after={last}") == {"items": [], "next": None}
    ids.append(await notify(store, ada, 7))
    assert [item["id"] for item in await items(planning, f"?after={last}")] == ids[-1:]
    exact = await planning.read(f"{PATH}?limit=8")
    assert (len(exact["items"]), exact["next"]) == (8, None)
    # One that was added before is not added again, and its number is not used.
    await notify(store, ada, 3)
    await notify(store, ada, 8)
    assert [item["cursor"].split("-")[0] for item in await items(planning, f"?after={last}")] == [
        "8", "10",
    ]  # fmt: skip
    unread = await planning.read(f"{PATH}?unread=true&limit=2&after={pages[0][-1]['cursor']}")
    assert [item["id"] for item in unread["items"]] == ids[3:5]


async def test_what_is_no_cursor_is_refused(sqlite_planning: PlanningServer) -> None:
    planning = sqlite_planning
    for text in (
        "0-000000000000",
        "x",
        "1",
        "01-000000000000",
        "1-0",
        "-1",
        "9" * 19 + "-" + "0" * 12,
    ):
        headers = {"Accept": "text/event-stream", "Last_Event_ID": text}
        for response in (
            await planning.get(f"{PATH}?after={text}"),
            await planning.post(f"{PATH}/read", {"up_to": text}),
            await planning.get(PATH, **headers),
        ):
            refused(response, 400, "request.invalid")


async def test_notifications_of_others_are_not_found(planning: PlanningServer) -> None:
    store = planning.onceward.store
    ours = await notify(store, Inbox("org:acme", "ada"), 1)
    await notify(store, Inbox("org:acme", "bob"), 2)
    await notify(store, Inbox("org:globex", "ada"), 3)
    for member in (planning.member("bob", "acme"), planning.member("ada", "globex")):
        assert len(await items(member)) == 1
        assert ours not in {item["id"] for item in await items(member)}
        for path in (ours, NOWHERE, "x", "%00"):
            refused(await member.post(f"{PATH}/{path}/read", None), 404, "resource.not_found")
    assert (await items(planning))[0]["read_at"] is None
    refused(await planning.client.get(PATH, headers={"Authorization": "Bearer x"}), 401,
            "auth.required")  # fmt: skip


async def test_roles_that_are_required_are_required_here_too(
    serve: Serve, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_planning = opener(serve, sqlite_url, monkeypatch)
    async with open_planning(planning_roles_required=True) as planning:
        own = await notify(planning.onceward.store, Inbox("org:acme", "vic"), 1)
        no_role, viewer = planning.member("vic", "acme"), planning.member("vic", "acme", "viewer")
        for response in (
            await no_role.get(PATH),
            await no_role.post(f"{PATH}/{own}/read", None, key="k"),
            await no_role.post(f"{PATH}/read", {"up_to": f"1-{own[-12:]}"}),
        ):
            refused(response, 403, "auth.forbidden")
        ok(await viewer.post(f"{PATH}/{own}/read", None, key="k"))


async def test_many_are_marked_as_read_up_to_one_of_them(
    planning: PlanningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "_MARK_LIMIT", 4)
    store, ada = planning.onceward.store, Inbox("org:acme", "ada")
    await notify_often(store, ada, 12)
    await notify(store, Inbox("org:acme", "bob"), 99)
    cursors = [item["cursor"] for item in await items(planning)]
    body = {"up_to": cursors[9]}
    # Requests at the same time do not deadlock, and mark each notification once.
    results = [
        ok(response)
        for response in await asyncio.gather(
            *(planning.post(f"{PATH}/read", body) for _ in range(4))
        )
    ]
    assert sum(result["marked"] for result in results) == 10
    assert sorted(result["more"] for result in results) == [False, False, True, True]
    assert [item["cursor"] for item in await items(planning, "?unread=true")] == cursors[10:]
    assert len(await items(planning.member("bob", "acme"), "?unread=true")) == 1
    refused(await planning.post(f"{PATH}/read", {"up_to": "13-000000000000"}), 410,
            "notifications.cursor_gone")  # fmt: skip


# -- the cursor -----------------------------------------------------------------------------------


async def test_a_cursor_of_what_the_database_has_lost_is_gone(planning: PlanningServer) -> None:
    store, ada = planning.onceward.store, Inbox("org:acme", "ada")
    for number in range(3):
        await notify(store, ada, number)
    old = [item["cursor"] for item in await items(planning)]
    # As a backup from before the last two.
    await store.write("DELETE FROM planning_notifications WHERE seq > 1")
    await store.write("UPDATE planning_inboxes SET seq = 1")
    gone = "notifications.cursor_gone"
    for cursor in old[1:]:
        refused(await planning.get(f"{PATH}?after={cursor}"), 410, gone)
    await notify(store, ada, 8)
    await notify(store, ada, 9)
    for cursor in old[1:]:  # others have these numbers now
        refused(await planning.get(f"{PATH}?after={cursor}"), 410, gone)
        refused(
            await planning.get(PATH, Accept="text/event-stream", Last_Event_ID=cursor), 410, gone
        )
        refused(await planning.post(f"{PATH}/read", {"up_to": cursor}), 410, gone)
    assert len(await items(planning, f"?after={old[0]}")) == 2
    refused(await planning.member("new", "acme").get(f"{PATH}?after={old[0]}"), 410, gone)
    # One that was deleted because of its age is not lost.
    await store.write("DELETE FROM planning_notifications WHERE seq = 1")
    assert len(await items(planning, f"?after={old[0]}")) == 2


async def test_a_reader_misses_no_notification_under_concurrent_writers(
    open_planning: OpenPlanning,
) -> None:
    """ONCEWARD_TEST_ROUNDS=1000 makes it a thousand rounds with 32 writers."""
    chance = random.Random(18)
    async with open_planning(pool_size=WRITERS + 2) as planning:
        store = planning.onceward.store
        for number in range(ROUNDS):
            whose, added = Inbox("org:acme", f"p{number}"), set[str]()

            async def writer(first: int, whose: Inbox, added: set[str]) -> None:
                for each in range(first, first + 2):
                    commit = chance.random() < 0.7
                    await asyncio.sleep(chance.choice([0, 0, 0.001]))
                    found = await notify(store, whose, each, commit=commit)
                    if commit:
                        added.add(found)

            writing = asyncio.gather(*(writer(10 * n, whose, added) for n in range(WRITERS)))
            seen: list[str] = []
            cursor = Cursor()
            while True:
                is_done = writing.done()
                rows = await read_inbox(store, whose, cursor, limit=chance.randint(1, 4))
                seen += [row["id"] for row in rows]
                if rows:
                    cursor = Cursor.parse(str(Cursor.of(rows[-1])))
                elif is_done:
                    break
                await asyncio.sleep(0)
            await writing
            assert len(seen) == len(set(seen))
            assert set(seen) == added


# -- the stream -----------------------------------------------------------------------------------


def streaming(planning: PlanningServer, sub: str = "bob", query: str = "", **headers: str) -> Any:
    transport: Any = planning.client._transport
    return listening(transport.app, PATH, token(sub, "acme") | headers, query)


async def test_the_stream_has_past_notifications_and_then_new_ones(
    sqlite_planning: PlanningServer,
) -> None:
    planning = sqlite_planning
    store = planning.onceward.store
    await notify_often(store, Inbox("org:acme", "bob"), 130)  # more than a page
    await notify(store, Inbox("org:acme", "ada"), 1)
    listed = await items(planning.member("bob", "acme"), "?limit=200")
    async with streaming(planning) as reader:
        assert reader.headers["content-type"].startswith("text/event-stream")
        assert reader.headers["cache-control"] == "no-store"
        for item in listed:
            assert await reader.event() == (item["cursor"], item["kind"], item)
        path = await planning.assignment()
        await planning.all_jobs_done()
        cursor, kind, data = await reader.event()
        assert (kind, data["assignment_id"]) == ("assigned", path.rpartition("/")[2])
    resume = {"Last-Event-ID": listed[-2]["cursor"]}
    async with streaming(planning, query="after=1-000000000000", **resume) as reader:
        assert (await reader.event())[0] == listed[-1]["cursor"]
        assert (await reader.event())[0] == cursor
    async with streaming(planning, query=f"after={listed[-1]['cursor']}") as reader:
        assert (await reader.event())[0] == cursor


async def test_streams_of_a_person_are_limited(
    serve: Serve, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_planning = opener(serve, sqlite_url, monkeypatch)
    async with open_planning(planning_notifications_streams=1) as planning:
        stream = {"Accept": "text/event-stream"}
        async with streaming(planning), streaming(planning, "ada"):
            details = refused(
                await planning.member("bob", "acme").get(PATH, **stream), 429, "quota.exceeded"
            )
            assert details == {"resource": "streams", "limit": 1}
        # A refused cursor does not count as a stream.
        gone = stream | {"Last_Event_ID": "7-000000000000"}
        for _ in range(2):
            refused(await planning.member("bob", "acme").get(PATH, **gone), 410,
                    "notifications.cursor_gone")  # fmt: skip
        async with streaming(planning):
            pass


# -- the database ---------------------------------------------------------------------------------


def literal(name: str, **values: Any) -> str:
    """Return a query with its parameters in place."""
    text = inbox_module._sql(name)
    return re.sub(r"(?<!:):(\w+)", lambda found: repr(values[found[1]]), text)


# Plans of one server.
@pytest.mark.parametrize("database_url", ["sqlite", "postgres"], indirect=True)
async def test_a_page_is_a_range_of_an_index_whatever_the_history(
    planning: PlanningServer,
) -> None:
    store = planning.onceward.store
    rows = 5000
    fill = (
        "INSERT INTO planning_notifications (tenant, id, assignment_id, version, kind, mission_id,"
        " recipient, told_at, read_at, seq)"
        " SELECT 'org:acme', '{id}', 'a' || n, 1, 'moved', 'm', 'ada',"
        " '2026-01-31T00:00:00.000000Z',"
        " CASE WHEN n < 4900 THEN '2026-01-31T00:00:00.000000Z' END, n FROM "
    )
    values = {"tenant": "org:acme", "recipient": "ada", "after": 4000, "limit": 51}
    sql = {name: literal(name, **values) for name in ("list_notifications", "list_unread")}
    index = {
        "list_notifications": "idx_planning_notifications_inbox",
        "list_unread": "idx_planning_notifications_unread",
    }
    if store.name == "sqlite":
        numbers = (
            "(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c"
            f" WHERE n < {rows}) SELECT n FROM c)"
        )
        await store.write(fill.replace("'{id}'", "printf('%08d', n)") + numbers)
        await store.write("ANALYZE")
        for name, text in sql.items():
            plan = [row["detail"] for row in await store.read(f"EXPLAIN QUERY PLAN {text}")]
            (page,) = [line for line in plan if line.startswith("SEARCH planning_notifications")]
            assert f"{index[name]} (tenant=? AND recipient=? AND seq>?)" in page, plan
            assert not [line for line in plan if line.startswith("SCAN planning")], plan
        return
    fill = fill.replace("'{id}'", "lpad(n::text, 8, '0')").replace(
        "'2026-01-31T00:00:00.000000Z'", "timestamptz '2026-01-31'"
    )
    await store.write(f"{fill} generate_series(1, {rows}) AS n")
    await store.write("INSERT INTO planning_inboxes VALUES ('org:acme', 'ada', 5000)")
    await store.write("ANALYZE planning_notifications")
    for name, text in sql.items():
        (row,) = await store.read(f"EXPLAIN (FORMAT JSON) {text}")
        plan = row["QUERY PLAN"]
        nodes = nodes_of((plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"])
        scans = [node for node in nodes if node.get("Relation Name") == "planning_notifications"]
        assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}, nodes
        assert index[name] in {node["Index Name"] for node in scans}


def nodes_of(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *(inner for each in node.get("Plans", ()) for inner in nodes_of(each))]


OLD = (
    "INSERT INTO planning_notifications (tenant, id, assignment_id, version, kind, mission_id,"
    " recipient, told_at) VALUES ('{tenant}', '{id}', 'a', {n}, 'moved', 'm', '{recipient}',"
    " '2026-01-31T00:00:00Z')"
)
EXPECTED = [("acme", "1", 1), ("acme", "2", 1), ("acme", "3", 2), ("globex", "4", 1)]
COUNTERS = [("acme", "ada", 1), ("acme", "bob", 2), ("globex", "bob", 1)]


def old_rows() -> list[str]:
    rows = [
        ("acme", "2", "bob"),
        ("acme", "3", "bob"),
        ("acme", "1", "ada"),
        ("globex", "4", "bob"),
    ]
    return [OLD.format(tenant=t, id=i, n=i, recipient=r) for t, i, r in rows]


def scripts(database: str) -> list[str]:
    folder = files("onceward_services.planning.migrations").joinpath(database)
    found = sorted(each.name for each in folder.iterdir() if each.name.endswith(".sql"))
    return [folder.joinpath(name).read_text(encoding="utf-8") for name in found]


AUDIT = (
    "CREATE TABLE onceward_audit_events (tenant {t}, id {t}, actor {t}, resource {t}, endpoint {t})"
)


def test_notifications_of_before_get_numbers_on_sqlite() -> None:
    database = sqlite3.connect(":memory:")
    database.execute(AUDIT.format(t="TEXT"))
    first, second, third = scripts("sqlite")
    database.executescript(first + second)
    for row in old_rows():
        database.execute(row)
    database.executescript(third)
    numbered = "SELECT tenant, id, seq FROM planning_notifications ORDER BY id"
    assert database.execute(numbered).fetchall() == EXPECTED
    counters = "SELECT tenant, recipient, seq FROM planning_inboxes ORDER BY 1, 2"
    assert database.execute(counters).fetchall() == COUNTERS
    database.close()


async def test_notifications_of_before_get_numbers_on_postgresql(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute("CREATE SCHEMA before; SET LOCAL search_path TO before")
        await connection.execute(AUDIT.format(t="text"))
        first, second, third = scripts("postgres")
        await connection.execute(first + second)
        for row in old_rows():
            await connection.execute(row)
        await connection.execute(third)
        rows = await connection.fetch(
            "SELECT tenant, id, seq FROM planning_notifications ORDER BY id"
        )
        assert [tuple(row) for row in rows] == EXPECTED
        rows = await connection.fetch(
            "SELECT tenant, recipient, seq FROM planning_inboxes ORDER BY 1, 2"
        )
        assert [tuple(row) for row in rows] == COUNTERS
    finally:
        await transaction.rollback()
        await connection.close()
