"""Activities, contacts and expenses over HTTP, on SQLite and on PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from onceward_protocol.clock import SystemClock
from packages.services.tests.conftest import Serve, signed_in

ACTIVITIES = "/api/v1/activities"
CONTACTS = "/api/v1/contacts"
EXPENSES = "/api/v1/expenses"
NOWHERE = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"


def key(**more: str) -> dict[str, str]:
    return {"Idempotency-Key": str(uuid4()), **{n.replace("_", "-"): v for n, v in more.items()}}


@pytest.fixture
async def client(serve: Serve, database_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with serve(database_url) as made:
        yield made


async def created(client: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    response = await client.post(path, json=fields, headers=key())
    assert response.status_code == 201, response.text
    document: dict[str, Any] = response.json()
    return document


@pytest.mark.parametrize("path", [ACTIVITIES, CONTACTS, EXPENSES])
async def test_a_document_is_created_read_changed_and_deleted(
    client: httpx.AsyncClient, path: str
) -> None:
    made = await client.post(path, json={"title": "Visit", "tags": ["a"]}, headers=key())
    assert made.status_code == 201
    document = made.json()
    one = f"{path}/{UUID(document['id'])}"
    assert made.headers["location"] == one
    assert made.headers["etag"] == '"1"'
    assert (document["title"], document["tags"], document["version"]) == ("Visit", ["a"], 1)

    put = await client.put(one, json={"title": "Call"}, headers=key(If_Match='"1"'))
    assert (put.status_code, put.headers["etag"]) == (200, '"2"')
    assert "tags" not in put.json()
    patch = await client.patch(one, json={"note": {"a": 1, "b": 2}, "version": 2}, headers=key())
    assert patch.json()["title"] == "Call"
    patched = await client.patch(one, json={"note": {"a": None}}, headers=key())
    assert patched.json()["note"] == {"b": 2}

    read = await client.get(one)
    assert (read.json(), read.headers["etag"]) == (patched.json(), '"4"')
    gone = await client.delete(one, headers=key(If_Match='"4"'))
    assert (gone.status_code, gone.content) == (204, b"")
    assert (await client.get(one)).status_code == 404
    assert (await client.put(one, json={}, headers=key())).status_code == 404


async def test_replay_is_the_first_response_and_changes_nothing(
    client: httpx.AsyncClient,
) -> None:
    again = key()
    first = await client.post(ACTIVITIES, json={"title": "x"}, headers=again)
    second = await client.post(ACTIVITIES, json={"title": "x"}, headers=again)
    assert second.content == first.content
    assert second.headers["idempotency-replayed"] == "true"
    assert (await client.get(ACTIVITIES)).json()["items"] == [first.json()]
    one = first.headers["location"]
    leave = key()
    assert (await client.delete(one, headers=leave)).status_code == 204
    replay = await client.delete(one, headers=leave)
    assert (replay.status_code, replay.headers["idempotency-replayed"]) == (204, "true")


async def test_an_old_version_is_refused_and_a_star_forces(client: httpx.AsyncClient) -> None:
    document = await created(client, CONTACTS, name="Ada")
    one = f"{CONTACTS}/{document['id']}"
    await client.put(one, json={"name": "Bea"}, headers=key(If_Match='"1"'))
    late = await client.put(one, json={"name": "Cleo"}, headers=key(If_Match='"1"'))
    assert (late.status_code, late.json()["code"]) == (409, "concurrency.version_mismatch")
    assert late.json()["details"]["currentVersion"] == 2
    assert (await client.get(one)).json()["name"] == "Bea"
    forced = await client.put(one, json={"name": "Cleo"}, headers=key(If_Match="*"))
    assert (forced.status_code, forced.json()["version"]) == (200, 3)
    free = await client.patch(one, json={"name": "Dora"}, headers=key())
    assert free.json()["version"] == 4
    missing = await client.put(f"{CONTACTS}/{NOWHERE}", json={}, headers=key(If_Match="*"))
    assert missing.status_code == 404


async def test_delete_checks_the_version_in_its_body(client: httpx.AsyncClient) -> None:
    document = await created(client, CONTACTS, name="Ada")
    one = f"{CONTACTS}/{document['id']}"
    await client.put(one, json={"name": "Bea"}, headers=key())

    async def delete(**body: Any) -> httpx.Response:
        return await client.request("DELETE", one, json=body, headers=key())

    late = await delete(version=1)
    assert (late.status_code, late.json()["code"]) == (409, "concurrency.version_mismatch")
    assert late.json()["details"]["currentVersion"] == 2
    odd = await delete(version="two")
    assert (odd.status_code, odd.json()["code"]) == (400, "request.invalid")
    two = await client.request("DELETE", one, json={"version": 1}, headers=key(If_Match='"2"'))
    assert (two.status_code, two.json()["code"]) == (400, "request.invalid")
    assert (await client.get(one)).json()["name"] == "Bea"
    assert (await delete(version=2)).status_code == 204


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(b"", "application/json"), (b"{}", "application/json"), (b"version=1", "text/plain")],
)
async def test_a_delete_that_says_no_version_deletes_what_is_there(
    client: httpx.AsyncClient, body: bytes, content_type: str
) -> None:
    document = await created(client, CONTACTS, name="Ada")
    one = f"{CONTACTS}/{document['id']}"
    headers = key() | {"content-type": content_type}
    assert (await client.request("DELETE", one, content=body, headers=headers)).status_code == 204


@pytest.mark.parametrize("tag", ['W/"1"', "1", "", '"1', "x" * 3000])
async def test_malformed_etag_is_rejected(client: httpx.AsyncClient, tag: str) -> None:
    document = await created(client, CONTACTS, name="Ada")
    response = await client.delete(f"{CONTACTS}/{document['id']}", headers=key(If_Match=tag))
    assert (response.status_code, response.json()["code"]) == (400, "request.invalid")
    assert (await client.get(f"{CONTACTS}/{document['id']}")).status_code == 200


@pytest.mark.parametrize("tag", ['"0"', '"-1"', '"9223372036854775808"', '"abc"'])
async def test_etag_of_no_version_never_matches(client: httpx.AsyncClient, tag: str) -> None:
    document = await created(client, CONTACTS, name="Ada")
    response = await client.delete(f"{CONTACTS}/{document['id']}", headers=key(If_Match=tag))
    assert (response.status_code, response.json()["code"]) == (409, "concurrency.version_mismatch")


async def test_an_expense_names_things_of_ones_own(client: httpx.AsyncClient) -> None:
    activity = await created(client, ACTIVITIES, title="Visit")
    contact = await created(client, CONTACTS, name="Ada")
    expense = await created(
        client, EXPENSES, amount=12.5, activity_id=activity["id"], contact_id=contact["id"]
    )
    assert expense["activity_id"] == activity["id"]
    theirs = await client.post(
        EXPENSES, json={"activity_id": activity["id"]}, headers=key() | signed_in("bob")
    )
    nobodys = await client.post(
        EXPENSES, json={"activity_id": NOWHERE}, headers=key() | signed_in("bob")
    )
    assert theirs.status_code == nobodys.status_code == 404
    assert theirs.json()["detail"] == nobodys.json()["detail"]
    odd = await client.post(EXPENSES, json={"activity_id": 5}, headers=key())
    assert (odd.status_code, odd.json()["code"]) == (422, "request.invalid")
    cleared = await client.patch(
        f"{EXPENSES}/{expense['id']}", json={"activity_id": None}, headers=key()
    )
    assert "activity_id" not in cleared.json()


async def test_document_of_another_user_is_not_found(client: httpx.AsyncClient) -> None:
    document = await created(client, ACTIVITIES, title="mine")
    for item_id in (document["id"], NOWHERE, "..", "%00", "x" * 400):
        one = f"{ACTIVITIES}/{item_id}"
        for method in ("GET", "PUT", "PATCH", "DELETE"):
            headers = signed_in("bob") | ({} if method == "GET" else key())
            content: Any = {} if method in ("PUT", "PATCH") else None
            response = await client.request(method, one, headers=headers, json=content)
            assert response.status_code in (404, 405), (method, item_id, response.text)
    assert (await client.get(ACTIVITIES, headers=signed_in("bob"))).json()["items"] == []


@pytest.mark.parametrize("body", ["[]", "1", '"x"', "null", "{", ""])
async def test_a_body_that_is_no_object_is_refused(client: httpx.AsyncClient, body: str) -> None:
    headers = key() | {"content-type": "application/json"}
    response = await client.post(ACTIVITIES, content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["code"] == "request.invalid"
    assert (await client.get(ACTIVITIES)).json()["items"] == []


async def test_server_fields_cannot_be_set(client: httpx.AsyncClient) -> None:
    made = await created(client, ACTIVITIES, id=NOWHERE, version=9, created_at="x", title="t")
    assert made["id"] != NOWHERE
    assert made["version"] == 1


async def test_pages_show_everything_once(client: httpx.AsyncClient) -> None:
    wanted = [await created(client, ACTIVITIES, n=n) for n in range(7)]
    seen, after = [], None
    while True:
        params: dict[str, Any] = {"limit": 3} | ({"after": after} if after else {})
        page = (await client.get(ACTIVITIES, params=params)).json()
        seen += page["items"]
        after = page["next"]
        if after is None:
            break
    assert seen == wanted
    for params in ({"limit": 0}, {"limit": 501}, {"after": "x"}, {"after": "-1"}, {"limit": "a"}):
        response = await client.get(ACTIVITIES, params=params)
        assert response.status_code in (400, 422), params


class MovedClock(SystemClock):
    ahead = timedelta(0)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


async def test_a_device_pulls_what_it_has_missed(serve: Serve, database_url: str) -> None:
    clock = MovedClock()
    async with serve(database_url, clock=clock) as client:
        kept = await created(client, ACTIVITIES, n="kept")
        gone = await created(client, ACTIVITIES, n="gone")
        clock.ahead = timedelta(minutes=20)
        since = clock.now().isoformat()
        changed = await client.patch(
            f"{ACTIVITIES}/{kept['id']}", json={"n": "changed"}, headers=key()
        )
        await client.delete(f"{ACTIVITIES}/{gone['id']}", headers=key())
        new = await created(client, ACTIVITIES, n="new")
        pulled = (await client.get(ACTIVITIES, params={"updated_since": since})).json()["items"]
        assert [item["id"] for item in pulled] == [kept["id"], gone["id"], new["id"]]
        assert pulled[0] == changed.json()
        assert pulled[1]["deleted"] is True
        assert "n" not in pulled[1]
        odd = await client.get(ACTIVITIES, params={"updated_since": "yesterday"})
        assert odd.status_code == 400


async def test_no_change_is_lost_when_the_server_clock_goes_back(
    serve: Serve, database_url: str
) -> None:
    clock = MovedClock()
    async with serve(database_url, clock=clock) as client:
        await created(client, ACTIVITIES, n=1)
        mark = clock.now().isoformat()
        clock.ahead = timedelta(minutes=5)
        second = await created(client, ACTIVITIES, n=2)
        clock.ahead = timedelta(0)
        third = await created(client, ACTIVITIES, n=3)
        pulled = (await client.get(ACTIVITIES, params={"updated_since": mark})).json()["items"]
        assert [item["id"] for item in pulled] == [second["id"], third["id"]]


async def test_of_many_writers_one_wins_each_version(client: httpx.AsyncClient) -> None:
    document = await created(client, CONTACTS, n=0)
    one = f"{CONTACTS}/{document['id']}"
    for version in range(1, 6):
        responses = await asyncio.gather(
            *(
                client.put(one, json={"n": n}, headers=key(If_Match=f'"{version}"'))
                for n in range(16)
            )
        )
        won = [response for response in responses if response.status_code == 200]
        assert len(won) == 1
        assert {response.status_code for response in responses} == {200, 409}
        current = (await client.get(one)).json()
        assert current == won[0].json()
        assert current["version"] == version + 1


async def test_a_key_is_required(client: httpx.AsyncClient) -> None:
    response = await client.post(ACTIVITIES, json={})
    assert (response.status_code, response.json()["code"]) == (400, "idempotency.key_required")


async def test_error_responses_are_stored_for_their_key(client: httpx.AsyncClient) -> None:
    again = key()
    first = await client.post(EXPENSES, json={"activity_id": NOWHERE}, headers=again)
    second = await client.post(EXPENSES, json={"activity_id": NOWHERE}, headers=again)
    assert first.status_code == second.status_code == 404
    assert second.headers["idempotency-replayed"] == "true"


async def test_the_audit_says_what_was_changed(serve: Serve, database_url: str) -> None:
    stores: list[Any] = []
    async with serve(
        database_url, prepare=lambda app: stores.append(app.state.onceward.store)
    ) as client:
        made = await created(client, ACTIVITIES, n=1)
        rows = await stores[0].read(
            stores[0].table_names.render(
                "SELECT endpoint, resource, version FROM onceward_audit_events"
            )
        )
        assert [tuple(dict(row).values()) for row in rows] == [
            ("POST /api/v1/activities", f"activity:{made['id']}", 1)
        ]
