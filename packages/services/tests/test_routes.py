"""The routes service, on SQLite and on PostgreSQL."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from onceward_protocol.clock import SystemClock

from .conftest import Serve, signed_in

WALK: dict[str, Any] = {
    "start": {"lat": 55.9533, "lon": -3.1883},
    "minutes": 90,
    "interests": ["history", "☕"],
}
PATH = "/api/v1/routes"
KEY = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"


def with_key(key: str | None = None) -> dict[str, str]:
    return {"Idempotency-Key": key or str(uuid4())}


class HeldClock(SystemClock):
    """A fake wall clock."""

    ahead = timedelta(0)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


async def test_a_submission_is_accepted_and_queued(serve: Serve, database_url: str) -> None:
    async with serve(database_url) as client:
        accepted = await client.post(PATH, json=WALK, headers=with_key())
        assert accepted.status_code == 202
        request_id = accepted.json()["request_id"]
        assert accepted.json() == {"request_id": str(UUID(request_id)), "status": "accepted"}
        assert accepted.headers["location"] == f"{PATH}/{request_id}"

        found = await client.get(accepted.headers["location"])
        assert found.status_code == 200
        assert found.json()["request_id"] == request_id
        assert found.json()["status"] == "queued"
        assert "route" not in found.json()
        assert datetime.fromisoformat(found.json()["created_at"]).tzinfo is not None


async def test_replay_is_the_same_response_and_adds_nothing(
    serve: Serve, database_url: str
) -> None:
    stores: list[Any] = []
    async with serve(
        database_url, prepare=lambda app: stores.append(app.state.onceward.store)
    ) as c:
        key = with_key()
        first = await c.post(PATH, json=WALK, headers=key)
        again = await c.post(PATH, json=dict(reversed(WALK.items())), headers=key)
        assert (again.status_code, again.content) == (202, first.content)
        assert again.headers["location"] == first.headers["location"]
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["x-original-request-id"] == first.headers["x-request-id"]
        counts = await stores[0].read(
            stores[0].table_names.render(
                "SELECT (SELECT count(*) FROM route_requests) AS requests,"
                " (SELECT count(*) FROM onceward_audit_events) AS events,"
                " (SELECT count(*) FROM onceward_jobs) AS jobs,"
                " (SELECT resource FROM onceward_audit_events WHERE status = 202"
                "   AND endpoint = 'POST /api/v1/routes') AS resource,"
                " (SELECT payload FROM route_requests) AS payload"
            )
        )
        # Two events: the request, and the job it enqueued.
        assert (counts[0]["requests"], counts[0]["jobs"], counts[0]["events"]) == (1, 1, 2)
        assert counts[0]["resource"] == f"route:{first.json()['request_id']}"
        assert json.loads(counts[0]["payload"]) == WALK


async def test_twenty_concurrent_requests_with_one_key_are_one_request(
    serve: Serve, database_url: str
) -> None:
    async with serve(database_url) as client:
        key = with_key()
        responses = await asyncio.gather(
            *(client.post(PATH, json=WALK, headers=key) for _ in range(20))
        )
        assert {response.status_code for response in responses} == {202}
        assert len({response.content for response in responses}) == 1
        assert sum("idempotency-replayed" not in response.headers for response in responses) == 1


async def test_another_payload_with_the_same_key_is_a_conflict(
    serve: Serve, database_url: str
) -> None:
    async with serve(database_url) as client:
        key = with_key()
        await client.post(PATH, json=WALK, headers=key)
        conflict = await client.post(PATH, json=WALK | {"minutes": 30}, headers=key)
        assert conflict.status_code == 409
        assert conflict.json()["code"] == "idempotency.payload_mismatch"
        assert set(conflict.json()["details"]) == {"expectedHash", "receivedHash"}


async def test_without_a_key_each_request_is_executed(serve: Serve, database_url: str) -> None:
    async with serve(database_url) as client:
        responses = [await client.post(PATH, json=WALK) for _ in range(2)]
        assert [response.status_code for response in responses] == [202, 202]
        assert responses[0].json()["request_id"] != responses[1].json()["request_id"]


@pytest.mark.parametrize("key", ["nope", KEY.upper(), str(UUID(int=1)), ""])
async def test_a_malformed_key_is_refused(serve: Serve, sqlite_url: str, key: str) -> None:
    async with serve(sqlite_url) as client:
        refused = await client.post(PATH, json=WALK, headers={"Idempotency-Key": key})
        assert refused.status_code == 400
        assert refused.json()["code"] == "idempotency.key_invalid"


async def test_record_expires_after_its_ttl(serve: Serve, database_url: str) -> None:
    clock = HeldClock()
    async with serve(database_url, clock=clock, routes_success_ttl_hours=0.001) as client:
        key = with_key()
        first = await client.post(PATH, json=WALK, headers=key)
        clock.ahead = timedelta(seconds=3.7)
        again = await client.post(PATH, json=WALK, headers=key)
        assert again.status_code == 202
        assert "idempotency-replayed" not in again.headers
        assert again.json()["request_id"] != first.json()["request_id"]


async def test_another_users_request_looks_like_one_that_does_not_exist(
    serve: Serve, database_url: str
) -> None:
    async with serve(database_url) as client:
        accepted = await client.post(PATH, json=WALK)
        theirs = await client.get(accepted.headers["location"], headers=signed_in("eve"))
        nobodys = await client.get(f"{PATH}/{uuid4()}", headers=signed_in("eve"))
        assert theirs.status_code == nobodys.status_code == 404
        assert theirs.json() | {"requestId": ""} == nobodys.json() | {"requestId": ""}
        assert theirs.json()["code"] == "resource.not_found"


async def test_two_users_may_have_the_same_key(serve: Serve, database_url: str) -> None:
    async with serve(database_url) as client:
        key = with_key()
        mine = await client.post(PATH, json=WALK, headers=key)
        theirs = await client.post(PATH, json=WALK | {"minutes": 5}, headers=key | signed_in("eve"))
        assert theirs.status_code == 202
        assert theirs.json()["request_id"] != mine.json()["request_id"]


@pytest.mark.parametrize("request_id", ["1", "x" * 500, "%00", "%F0%9F%8C%B2", "..%2Froutes"])
async def test_a_malformed_id_is_not_found(
    serve: Serve, database_url: str, request_id: str
) -> None:
    async with serve(database_url) as client:
        response = await client.get(f"{PATH}/{request_id}")
        assert response.status_code == 404
        assert response.json()["code"] == "resource.not_found"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("header", ["", "Bearer nonsense", "Basic YTpi"])
async def test_reading_and_writing_need_authentication(
    serve: Serve, sqlite_url: str, method: str, header: str
) -> None:
    async with serve(sqlite_url) as client:
        path = PATH if method == "POST" else f"{PATH}/{uuid4()}"
        response = await client.request(method, path, headers={"Authorization": header}, json=WALK)
        assert response.status_code == 401
        assert response.json()["code"] == "auth.required"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"start": None}, "start"),
        ({"start": {"lat": 1}}, "start.lon"),
        ({"start": {"lat": "1", "lon": 2}}, "start.lat"),
        ({"minutes": "90"}, "minutes"),
        ({"minutes": True}, "minutes"),
        ({"minutes": None}, "minutes"),
        ({"minutes": 10**400}, "minutes"),
        ({"interests": "history"}, "interests"),
        ({"interests": None}, "interests"),
        ({"interests": ["history", 5]}, "interests[1]"),
        ({"color": "red"}, "color"),
        ({"start": {"lat": 1, "lon": 2, "alt": 3}}, "start.alt"),
    ],
)
async def test_missing_unknown_or_mistyped_field_is_400(
    serve: Serve, sqlite_url: str, change: dict[str, Any], field: str
) -> None:
    async with serve(sqlite_url) as client:
        response = await client.post(PATH, json=WALK | change, headers=with_key())
        assert response.status_code == 400
        assert response.json()["code"] == "request.invalid"
        assert response.json()["details"]["fields"][0]["field"] == field
        assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"start": {"lat": 90.001, "lon": 0}}, "start.lat"),
        ({"start": {"lat": 0, "lon": -181}}, "start.lon"),
        ({"minutes": 0}, "minutes"),
        ({"minutes": 1440.5}, "minutes"),
        ({"interests": ["a"] * 21}, "interests"),
        ({"interests": [""]}, "interests[0]"),
        ({"interests": ["  "]}, "interests[0]"),
        ({"interests": ["a\0b"]}, "interests[0]"),
        ({"interests": ["a" * 65]}, "interests[0]"),
    ],
)
async def test_a_value_that_is_not_allowed_is_422(
    serve: Serve, sqlite_url: str, change: dict[str, Any], field: str
) -> None:
    async with serve(sqlite_url) as client:
        response = await client.post(PATH, json=WALK | change)
        assert response.status_code == 422
        assert response.json()["code"] == "request.invalid"
        assert response.json()["details"]["fields"][0]["field"] == field


@pytest.mark.parametrize(
    "walk",
    [
        {"start": {"lat": 90, "lon": 180}, "minutes": 1},
        {"start": {"lat": -90, "lon": -180}, "minutes": 1440, "interests": ["x" * 64] * 20},
        {"start": {"lat": 0, "lon": 0}, "minutes": 0.5 + 0.5, "interests": []},
    ],
)
async def test_the_edges_are_allowed(serve: Serve, sqlite_url: str, walk: dict[str, Any]) -> None:
    async with serve(sqlite_url) as client:
        assert (await client.post(PATH, json=walk)).status_code == 202


async def test_a_refused_body_leaves_the_key_free(serve: Serve, database_url: str) -> None:
    async with serve(database_url) as client:
        key = with_key()
        assert (await client.post(PATH, json={}, headers=key)).status_code == 400
        assert (await client.post(PATH, json=WALK, headers=key)).status_code == 202


@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": KEY}], ids=["bare", "keyed"])
@pytest.mark.parametrize("body", [b"{", b'{"a":1,"a":2}', b"\xff", b"[" * 200, b"NaN", b"", b"3"])
async def test_a_body_that_is_no_json_object_is_400_with_a_key_and_without(
    serve: Serve, sqlite_url: str, body: bytes, key: dict[str, str]
) -> None:
    async with serve(sqlite_url) as client:
        headers = {"Content-Type": "application/json"} | key
        response = await client.post(PATH, content=body, headers=headers)
        assert response.status_code == 400
        assert response.json()["code"] == "request.invalid"


@pytest.mark.parametrize("content_type", [None, "text/plain", "multipart/form-data", "nonsense"])
async def test_a_body_that_is_not_declared_as_json_is_400_and_says_what_to_send(
    serve: Serve, sqlite_url: str, content_type: str | None
) -> None:
    async with serve(sqlite_url) as client:
        headers = {} if content_type is None else {"Content-Type": content_type}
        body = json.dumps(WALK).encode()
        response = await client.post(PATH, content=body, headers=headers | with_key())
        assert response.status_code == 400
        assert response.json()["code"] == "request.invalid"
        assert "Content-Type: application/json" in response.json()["detail"]


async def test_a_body_over_the_limit_is_413(serve: Serve, sqlite_url: str) -> None:
    async with serve(sqlite_url, max_body_bytes=10) as client:
        response = await client.post(PATH, json=WALK)
        assert (response.status_code, response.json()["code"]) == (413, "request.too_large")


async def test_the_rate_limit_of_the_settings_holds(serve: Serve, sqlite_url: str) -> None:
    async with serve(sqlite_url, routes_rate_limit="2/minute") as client:
        statuses = [(await client.post(PATH, json=WALK)).status_code for _ in range(3)]
        assert statuses == [202, 202, 429]
        other = await client.post(PATH, json=WALK, headers=signed_in("eve"))
        assert other.status_code == 202


async def test_with_redis_a_second_server_replays_from_the_cache(
    serve: Serve, sqlite_url: str, redis_url: str
) -> None:
    key = with_key()
    async with serve(sqlite_url, redis_url=redis_url) as client:
        first = await client.post(PATH, json=WALK, headers=key)
    async with serve(sqlite_url, redis_url=redis_url) as client:
        again = await client.post(PATH, json=WALK, headers=key)
        assert again.content == first.content
        assert again.headers["idempotency-replayed"] == "true"
