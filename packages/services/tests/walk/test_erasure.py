"""Deleting a walker: refused writes, a job that may be killed, nothing of others deleted."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from onceward_services.registry import SERVICES
from onceward_services.walk import erasure

from .fixtures import Game, new_key, ok, refused
from .step_fixtures import Stepping
from .test_reconcile_crashes import Killed

TABLES = next(service.tables for service in SERVICES if service.name == "walk")


async def live(steps: Stepping, walker: str) -> None:
    """Leave rows in the tables of walk, and of another service of the same person."""
    device = steps.game.device(walker)
    await device.finish("quest.001")
    ok(await device.allocate("node.even-stride"))
    await steps.walk(count=5000, hours=(6, 10), walker=walker)
    await steps.walk(count=3000, hours=(6, 11), walker=walker)
    response = await steps.client.post(
        "/api/v1/routes",
        json={"start": {"lat": 1, "lon": 2}, "minutes": 5},
        headers=device.headers() | {"Idempotency-Key": new_key()},
    )
    assert response.status_code == 202, response.text


async def rows_of(game: Game, walker: str) -> dict[str, int]:
    counts = {}
    for table in (*TABLES, "route_requests", "onceward_idempotency_records"):
        found = await game.rows(
            f"SELECT count(*) AS n FROM {table} WHERE tenant = :tenant", tenant=walker
        )
        counts[table] = int(found[0]["n"])
    return counts


async def delete(game: Game, walker: str = "ada", key: str | None = None) -> Any:
    device = game.device(walker)
    headers = device.headers() | {"Idempotency-Key": key or new_key()}
    return await game.client.delete("/walker/me", headers=headers)


async def is_deleted(steps: Stepping) -> bool:
    return not await steps.game.rows("SELECT 1 FROM walkers WHERE tenant = 'ada'")


async def nothing_is_left(steps: Stepping) -> None:
    left = await rows_of(steps.game, "ada")
    assert {table: left[table] for table in TABLES} == dict.fromkeys(TABLES, 0)


async def test_a_walker_is_deleted_and_starts_anew(steps: Stepping) -> None:
    await live(steps, "ada")
    await live(steps, "eve")
    await steps.work()
    before = await rows_of(steps.game, "eve")
    assert min(before[name] for name in ("walk_reviews", "step_reports", "tree_allocations")) > 0
    key = new_key()
    response = await delete(steps.game, key=key)
    assert (response.status_code, response.json()) == (202, {"status": "accepted"})
    assert (await delete(steps.game, key=key)).headers["idempotency-replayed"] == "true"
    details = refused(await steps.game.ada.start("quest.002"), 409, "WALKER_BEING_DELETED")
    assert details["requestedAt"].startswith("2026-05-22T12:00")
    refused(await steps.report(), 409, "WALKER_BEING_DELETED")
    await steps.work(until=lambda: is_deleted(steps))
    left = await rows_of(steps.game, "ada")
    # The routes of the same person, and the record of the request for one.
    assert {table: n for table, n in left.items() if n} == {
        "route_requests": 1,
        "onceward_idempotency_records": 1,
    }
    assert await rows_of(steps.game, "eve") == before
    assert await steps.game.ada.events() == []
    assert await steps.game.ada.finish("quest.001") > 0


async def test_what_is_known_of_a_walkers_jobs_is_deleted_with_it(steps: Stepping) -> None:
    names = ("job_completions", "dead_letters", "job_failures", "job_steps", "job_causes")
    await live(steps, "ada")
    await live(steps, "eve")
    await steps.work()

    async def count(walker: str) -> list[int]:
        return [
            (
                await steps.game.rows(
                    f"SELECT count(*) AS n FROM onceward_{name} WHERE tenant = :tenant",
                    tenant=walker,
                )
            )[0]["n"]
            for name in names
        ]

    store = steps.game.store
    (job,) = await store.read(
        store.table_names.render(
            "SELECT job_id FROM onceward_job_completions"
            " WHERE tenant = 'ada' AND queue = 'walk' ORDER BY job_id LIMIT 1"
        )
    )
    now = "now()" if store.name == "postgresql" else "0"
    failure = "(tenant, job_id, attempt, reason, error, failed_at)"
    step = "(tenant, job_id, name, result, attempt, finished_at)"
    for who in ("ada", "eve"):
        # As after an attempt that failed: rows that only the job's id connects with walk.
        values = {"who": who, "id": job["job_id"]}
        await store.write(
            store.table_names.render(
                f"INSERT INTO onceward_job_failures {failure}"
                f" VALUES (:who, :id, 1, 'error', 'boom', {now})"
            ),
            values,
        )
        await store.write(
            store.table_names.render(
                f"INSERT INTO onceward_job_steps {step} VALUES (:who, :id, 'push', '1', 1, {now})"
            ),
            values,
        )
    eve = await count("eve")
    before = await count("ada")
    assert (before[0], *before[2:4]) >= (1, 1, 1)
    assert (await delete(steps.game)).status_code == 202
    await steps.work(until=lambda: is_deleted(steps))
    routes = await steps.game.rows(
        "SELECT 1 FROM onceward_job_completions WHERE tenant = 'ada' AND queue <> 'walk'"
    )
    assert await count("ada") == [len(routes), 0, 0, 0, 0]
    assert await count("eve") == eve


async def test_deleting_twice_and_a_concurrent_action_end_in_nothing(steps: Stepping) -> None:
    await live(steps, "ada")
    first, second, action = await asyncio.gather(
        delete(steps.game), delete(steps.game), steps.game.ada.allocate("node.light-pack")
    )
    assert sorted([first.status_code, second.status_code]) == [202, 409]
    assert action.status_code in (200, 409, 422)
    await steps.work(until=lambda: is_deleted(steps))
    await nothing_is_left(steps)


async def test_a_deletion_killed_after_any_statement_is_finished_by_the_next_attempt(
    steps: Stepping, monkeypatch: pytest.MonkeyPatch
) -> None:
    await live(steps, "ada")
    await steps.work()
    assert (await delete(steps.game)).status_code == 202
    store, survived = steps.game.store, 0
    original = store.write

    async def killing(*args: Any, **kwargs: Any) -> Any:
        nonlocal survived
        result = await original(*args, **kwargs)
        if survived == 0:
            raise Killed
        survived -= 1
        return result

    monkeypatch.setattr(store, "write", killing)
    attempts = 0
    while not await is_deleted(steps):
        # Each attempt gets one statement further than the one before.
        survived = attempts = attempts + 1
        with suppress(Killed):
            await erasure.erase_walker(store, "ada", queue="walk")
    assert attempts > len(TABLES)
    await nothing_is_left(steps)
    assert await erasure.erase_walker(store, "ada", queue="walk") == 0
