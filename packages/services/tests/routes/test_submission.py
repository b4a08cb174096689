"""Submitting routes without HTTP: the same records, tables and jobs as over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from onceward.errors import KeyInvalidError, PayloadMismatchError
from onceward_services.routes.model import Place, RouteSubmission
from onceward_services.routes.submission import (
    RouteSubmissionRequest,
    RouteSubmissionService,
    route_submissions,
)
from onceward_services.settings import load_settings
from packages.services.tests.conftest import SECRET, Serve

PATH = "/api/v1/routes"
BODY: dict[str, Any] = {"start": {"lat": 52.52, "lon": 13.405}, "minutes": 90}
WALK = RouteSubmission.model_validate_json(
    '{"start": {"lat": 52.52, "lon": 13.405}, "minutes": 90}'
)


@pytest.fixture
async def both(serve: Serve, database_url: str) -> AsyncIterator[Any]:
    """Yield an HTTP client, the service on the same database, and its store."""
    apps: list[Any] = []
    async with serve(database_url, prepare=apps.append) as client:
        onceward = apps[0].state.onceward
        settings = load_settings(database_url=database_url, jwt_secret=SECRET)
        yield client, route_submissions(onceward, settings), onceward.store


async def counts(store: Any) -> tuple[int, int, int]:
    (row,) = await store.read(
        store.table_names.render(
            "SELECT (SELECT count(*) FROM route_requests) AS requests,"
            " (SELECT count(*) FROM onceward_jobs) AS jobs,"
            " (SELECT count(*) FROM onceward_audit_events WHERE status = 202"
            "   AND endpoint = 'POST /api/v1/routes') AS events"
        )
    )
    return row["requests"], row["jobs"], row["events"]


async def test_key_is_replayed_between_http_and_the_service(both: Any) -> None:
    client, service, store = both
    checked: RouteSubmissionService = service
    key = str(uuid4())
    first = await checked.submit(RouteSubmissionRequest("ada", WALK, key))
    again = await checked.submit(RouteSubmissionRequest("ada", WALK, key))
    assert (first.status, again.status) == ("accepted", "replayed")
    assert first.request_id == again.request_id
    over_http = await client.post(PATH, json=BODY, headers={"Idempotency-Key": key})
    assert over_http.status_code == 202
    assert over_http.headers["idempotency-replayed"] == "true"
    assert over_http.headers["location"] == f"{PATH}/{first.request_id}"
    assert over_http.json() == {"request_id": first.request_id, "status": "accepted"}
    assert (await client.get(over_http.headers["location"])).json()["status"] == "queued"

    key = str(uuid4())
    made = await client.post(PATH, json=BODY, headers={"Idempotency-Key": key})
    replayed = await service.submit(RouteSubmissionRequest("ada", WALK, key))
    assert (replayed.request_id, replayed.status) == (made.json()["request_id"], "replayed")
    assert await counts(store) == (2, 2, 2)


async def test_mismatch_and_malformed_key_change_nothing(both: Any) -> None:
    _, service, store = both
    key = str(uuid4())
    await service.submit(RouteSubmissionRequest("ada", WALK, key))
    other = RouteSubmission(start=Place(lat=1.0, lon=2.0), minutes=5.0)
    with pytest.raises(PayloadMismatchError):
        await service.submit(RouteSubmissionRequest("ada", other, key))
    for odd in ("order-17", "", "é", "x" * 200):
        with pytest.raises(KeyInvalidError):
            await service.submit(RouteSubmissionRequest("ada", WALK, odd))
    assert await counts(store) == (1, 1, 1)
    theirs = await service.submit(RouteSubmissionRequest("bob", other, key))
    assert theirs.status == "accepted"


async def test_submission_without_a_key_is_new_each_time(both: Any) -> None:
    _, service, store = both
    made = [await service.submit(RouteSubmissionRequest("ada", WALK)) for _ in range(2)]
    assert made[0].request_id != made[1].request_id
    assert await counts(store) == (2, 2, 2)


async def test_of_many_submissions_of_a_key_both_ways_one_is_accepted(both: Any) -> None:
    client, service, store = both

    async def over_http(key: str) -> str:
        response = await client.post(PATH, json=BODY, headers={"Idempotency-Key": key})
        return str(response.json()["request_id"])

    async def directly(key: str) -> str:
        response = await service.submit(RouteSubmissionRequest("ada", WALK, key))
        return str(response.request_id)

    for number in range(1, 4):
        key = str(uuid4())
        ids = await asyncio.gather(*(way(key) for way in (over_http, directly) * 8))
        assert len(set(ids)) == 1
        assert await counts(store) == (number, number, number)


async def test_failed_submission_stores_nothing_and_frees_the_key(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, service, store = both
    key = str(uuid4())
    too_large = RouteSubmissionRequest("ada", WALK, key)
    runtime = service._onceward.runtime
    monkeypatch.setattr(runtime, "config", replace(runtime.config, max_payload_bytes=1))
    with pytest.raises(Exception, match="payload"):
        await service.submit(too_large)
    assert await counts(store) == (0, 0, 0)
    monkeypatch.undo()
    assert (await service.submit(too_large)).status == "accepted"
