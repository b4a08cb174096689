"""The route-generation job, on SQLite and on PostgreSQL: from the submission to the route."""

import asyncio
from typing import Any
from uuid import uuid4

from onceward_services.routes.jobs import GENERATE, generation_job_id
from onceward_services.settings import load_settings

from .conftest import SECRET, Serve, signed_in

BERLIN: dict[str, Any] = {
    "start": {"lat": 52.52, "lon": 13.405},
    "minutes": 120,
    "interests": ["history", "art"],
}
PATH = "/api/v1/routes"


def with_key() -> dict[str, str]:
    return {"Idempotency-Key": str(uuid4())}


class Working:
    """A worker of the app, started by the test."""

    def __init__(self) -> None:
        self.onceward: Any = None

    def prepare(self, app: Any) -> None:
        self.onceward = app.state.onceward

    async def __aenter__(self) -> None:
        self._worker = self.onceward.worker(queues=["routes"])
        await self._worker.start()

    async def __aexit__(self, *_: object) -> None:
        await self._worker.stop()


async def until_done(client: Any, location: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            view: dict[str, Any] = (await client.get(location)).json()
            if view["status"] in ("done", "failed"):
                return view
            await asyncio.sleep(0.02)


async def test_a_submission_becomes_a_walk_that_fits(serve: Serve, database_url: str) -> None:
    working = Working()
    async with serve(database_url, prepare=working.prepare) as client:
        accepted = await client.post(PATH, json=BERLIN, headers=with_key())
        async with working:
            view = await until_done(client, accepted.headers["location"])
        route = view["route"]
        assert view["status"] == "done"
        assert route["places"]
        assert route["duration_minutes"] <= 120
        assert route["distance_m"] > 0
        liked = [p for p in route["places"] if {"history", "art"} & set(p["interests"])]
        assert len(liked) * 2 > len(route["places"])


async def test_same_submission_gives_the_same_route(serve: Serve, database_url: str) -> None:
    working = Working()
    async with serve(database_url, prepare=working.prepare) as client:
        asked = [await client.post(PATH, json=BERLIN, headers=with_key()) for _ in range(2)]
        async with working:
            views = [await until_done(client, each.headers["location"]) for each in asked]
        assert views[0]["request_id"] != views[1]["request_id"]
        assert views[0]["route"] == views[1]["route"]


async def test_a_replay_enqueues_no_second_job(serve: Serve, database_url: str) -> None:
    working = Working()
    async with serve(database_url, prepare=working.prepare) as client:
        key = with_key()
        for _ in range(3):
            await client.post(PATH, json=BERLIN, headers=key)
        rows = await working.onceward.store.read(
            working.onceward.store.table_names.render("SELECT type, tenant FROM onceward_jobs")
        )
        assert [(row["type"], row["tenant"]) for row in rows] == [(GENERATE, "ada")]


async def test_a_route_is_running_while_its_job_is(serve: Serve, database_url: str) -> None:
    working = Working()
    async with serve(database_url, prepare=working.prepare) as client:
        accepted = await client.post(PATH, json=BERLIN, headers=with_key())
        table = working.onceward.runtime.job_store
        assert await table.claim(["routes"], worker="w", limit=1, lease_seconds=30)
        view = (await client.get(accepted.headers["location"])).json()
        assert view["status"] == "running"


async def test_route_whose_job_is_dead_has_failed(serve: Serve, database_url: str) -> None:
    working = Working()
    async with serve(database_url, prepare=working.prepare) as client:
        accepted = await client.post(PATH, json=BERLIN, headers=with_key())
        table = working.onceward.runtime.job_store
        [job] = await table.claim(["routes"], worker="w", limit=1, lease_seconds=30)
        assert job.lease.job_id == generation_job_id("ada", accepted.json()["request_id"])
        await table.dead_letter(job, worker="w", reason="error", error="as a test wants it")
        view = (await client.get(accepted.headers["location"])).json()
        assert view["status"] == "failed"
        assert "route" not in view


async def test_nothing_in_reach_is_a_walk_without_places(serve: Serve, sqlite_url: str) -> None:
    working = Working()
    async with serve(sqlite_url, prepare=working.prepare) as client:
        ocean = BERLIN | {"start": {"lat": -48.9, "lon": -123.4}}
        accepted = await client.post(PATH, json=ocean, headers=with_key())
        async with working:
            view = await until_done(client, accepted.headers["location"])
        assert view["route"] == {"places": [], "distance_m": 0, "duration_minutes": 0}


async def test_another_users_route_is_not_found(serve: Serve, sqlite_url: str) -> None:
    working = Working()
    async with serve(sqlite_url, prepare=working.prepare) as client:
        accepted = await client.post(PATH, json=BERLIN, headers=with_key())
        async with working:
            await until_done(client, accepted.headers["location"])
        seen = await client.get(accepted.headers["location"], headers=signed_in("bob"))
        assert seen.status_code == 404


def test_jobs_have_settings(monkeypatch: Any) -> None:
    monkeypatch.setenv("ONCEWARD_JOBS_CONCURRENCY", "3")
    monkeypatch.setenv("ONCEWARD_CLEANUP_AT", "04:30")
    settings = load_settings(jwt_secret=SECRET)
    assert settings.jobs_concurrency == 3
    assert settings.cleanup_at.isoformat() == "04:30:00"
