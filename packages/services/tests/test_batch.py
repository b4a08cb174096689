"""Batches on the server: requests to all services in one, as if each were sent alone."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx

from onceward.sign_in.jwt_auth import mint_token

from .conftest import SECRET, Serve, signed_in


def item(path: str, body: Any, method: str = "POST", **more: Any) -> dict[str, Any]:
    return {"method": method, "path": path, "key": str(uuid4()), "body": body, **more}


async def results(client: httpx.AsyncClient, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    response = await client.post("/batch", json={"items": items})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["results"]
    return found


async def test_create_edit_edit_in_one_batch(serve: Serve, database_url: str) -> None:
    async with serve(database_url) as client:
        local = str(uuid4())
        edit: dict[str, Any] = {
            "path": f"/api/v1/activities/{{local:{local}}}",
            "method": "PATCH",
            "headers": {"If-Match": f"{{version:{local}}}"},
            "local_id": local,
            "lane": local,
        }
        batch = [
            item("/api/v1/activities", {"title": "call"}, local_id=local, lane=local),
            item(body={"title": "call Bo"}, **edit),
            item(body={"title": "call Bo at nine"}, **edit),
            item("/api/v1/expenses", {"title": "taxi", "activity_id": f"{{local:{local}}}"}),
        ]
        found = await results(client, batch)
        assert [each["status"] for each in found] == [201, 200, 200, 201], found
        activity = found[0]["body"]["id"]
        assert found[2]["headers"]["etag"] == '"3"'
        assert found[3]["body"]["activity_id"] == activity
        read = await client.get(f"/api/v1/activities/{activity}")
        assert (read.json()["title"], read.json()["version"]) == ("call Bo at nine", 3)
        again = await results(client, batch)
        assert [each["replayed"] for each in again] == [True] * 4
        assert [each["body"] for each in again] == [each["body"] for each in found]


async def test_services_with_their_own_tenants_and_error_formats(
    serve: Serve, database_url: str
) -> None:
    async with serve(database_url) as client:
        token = mint_token(
            *(SECRET,),
            sub="ada",
            org="acme",
            roles=[],
            lifetime=timedelta(hours=1),
            now=datetime.now(UTC),
        )
        client.headers["Authorization"] = f"Bearer {token}"
        now = datetime.now(UTC).isoformat()
        foreign = item("/api/v1/activities", {"title": "mine"})
        assert (await results(client, [foreign]))[0]["status"] == 201
        found = await results(
            client,
            [
                item("/api/v1/contacts", {"name": "Bo"}),
                item("/v1/projects", {"name": "bridge"}),
                item(
                    "/tree/allocate",
                    {"allocations": [{"nodeId": "nowhere"}], "clientGeneratedAt": now},
                    lane="walk",
                ),
                item("/quest/start", {"questId": "nowhere"}, lane="walk"),
                item("/healthz", {}),
                item("/api/v1/activities", {"title": "mine"}, headers={"X-Firebase-AppCheck": "x"}),
            ],
        )
        assert [each["status"] for each in found] == [201, 201, 422, 424, 400, 400], found
        assert found[2]["body"]["error"] == "UNKNOWN_NODE"
        assert found[3]["body"]["error"] == "BATCH_SKIPPED"
        # Another caller with the same key is another tenant.
        client.headers.update(signed_in("bob"))
        assert (await results(client, [foreign]))[0]["replayed"] is False
        del client.headers["Authorization"]
        response = await client.post("/batch", json={"items": [foreign]})
        assert (response.status_code, response.json()["code"]) == (401, "auth.required")


async def test_ids_of_another_tenant_are_not_found(serve: Serve, database_url: str) -> None:
    async with serve(database_url) as client:
        foreign = (await results(client, [item("/api/v1/activities", {"title": "mine"})]))[0]
        path = f"/api/v1/activities/{foreign['body']['id']}"
        client.headers.update(signed_in("bob"))
        edit: dict[str, Any] = {"method": "PATCH", "headers": {"If-Match": '"1"'}}
        found = await results(
            client,
            [
                item(path, {"title": "theirs"}, lane="a", **edit),
                item("/api/v1/activities", {"title": "after"}, lane="a"),
                item("/api/v1/expenses", {"title": "taxi", "activity_id": foreign["body"]["id"]}),
                item("/api/v1/activities", {"title": "own"}),
            ],
        )
        assert [each["status"] for each in found] == [404, 424, 404, 201], found
        alone = await client.post(
            "/api/v1/expenses",
            json={"title": "taxi", "activity_id": foreign["body"]["id"]},
            headers={"Idempotency-Key": str(uuid4())},
        )
        assert alone.status_code == found[2]["status"]


async def test_batches_can_be_switched_off(serve: Serve, sqlite_url: str) -> None:
    async with serve(sqlite_url, batch_enabled=False) as client:
        response = await client.post("/batch", json={"items": []})
        assert response.status_code == 404
        created = await client.post(
            "/api/v1/activities", json={"title": "call"}, headers={"Idempotency-Key": str(uuid4())}
        )
        assert "onceward-batch" not in created.headers
