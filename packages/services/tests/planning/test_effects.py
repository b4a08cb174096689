"""Effects of writes by jobs: counters, notifications and search, each exactly once."""

import asyncio
import random
from datetime import UTC, datetime
from typing import Any

import pytest

from onceward.errors import StoreUnavailableError
from onceward.jobs.executor import FAULT_POINTS
from onceward_services.planning import jobs
from onceward_services.planning.jobs import COUNT, INDEX, NOTIFY
from onceward_services.planning.repository import sql
from packages.services.tests.conftest import Serve

from .fixtures import OpenPlanning, PlanningServer, ok, opener, refused, tag

ZEROS = {"planned": 0, "active": 0, "done": 0, "cancelled": 0}


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


async def test_a_new_projects_dashboard_is_true_as_of_its_creation(
    planning: PlanningServer,
) -> None:
    project = await planning.project()
    board = await planning.get(f"{project}/dashboard")
    assert ok(board) == {
        "project_id": project.rpartition("/")[2],
        "missions": ZEROS,
        "assignments": 0,
        "people": 0,
        "as_of": (await planning.read(project))["created_at"],
    }
    assert board.headers["etag"] == '"0"'


async def test_the_dashboard_is_right_once_the_jobs_are_done(planning: PlanningServer) -> None:
    project = await planning.project()
    missions = [await planning.mission(project) for _ in range(4)]
    await planning.patch(missions[0], {"status": "active"}, **tag(1))
    await planning.patch(missions[1], {"status": "done"}, **tag(1))
    await planning.delete(missions[2], **tag(1))
    for person in ("bob", "cleo", "bob"):
        await planning.assignment(missions[0], person)
    stranded = await planning.mission(project)
    await planning.assignment(stranded, "dora")
    await planning.delete(stranded, **tag(1))
    before = datetime.now(UTC)
    assert (await planning.read(f"{project}/dashboard"))["missions"] == ZEROS
    await planning.all_jobs_done()
    board = await planning.read(f"{project}/dashboard")
    assert board["missions"] == ZEROS | {"planned": 1, "active": 1, "done": 1}
    assert (board["assignments"], board["people"]) == (3, 2)
    assert at(board["as_of"]) >= before


async def test_a_move_between_projects_is_counted_in_both(planning: PlanningServer) -> None:
    here, there = await planning.project(), await planning.project()
    target = (await planning.read(await planning.mission(there)))["id"]
    path = await planning.assignment(await planning.mission(here))
    await planning.all_jobs_done()
    ok(await planning.post(f"{path}/move", {"mission_id": target, "version": 1}))
    await planning.all_jobs_done()
    boards = [await planning.read(f"{each}/dashboard") for each in (here, there)]
    assert [board["assignments"] for board in boards] == [0, 1]


async def test_many_writes_to_a_project_are_one_job_that_counts(planning: PlanningServer) -> None:
    project = await planning.project()
    mission = await planning.mission(project)
    for version in range(1, 6):
        status = ("active", "planned")[version % 2]
        ok(await planning.patch(mission, {"status": status, "version": version}))
    jobs = await planning.rows("SELECT type, tenant, coalesce_key FROM onceward_jobs ORDER BY type")
    assert [(job["type"], job["tenant"]) for job in jobs] == [
        (COUNT, "org:acme"),
        (INDEX, "org:acme"),
    ]
    assert jobs[0]["coalesce_key"] == project.rpartition("/")[2]


async def test_failed_and_replayed_writes_enqueue_no_jobs(planning: PlanningServer) -> None:
    project = await planning.project()
    first = await planning.post(f"{project}/missions", {"title": "x"}, key="k")
    path = first.headers["location"]
    await planning.all_jobs_done()
    again = await planning.post(f"{project}/missions", {"title": "x"}, key="k")
    assert again.headers["idempotency-replayed"] == "true"
    refused(
        await planning.patch(path, {"status": "done"}, **tag(2)),
        409,
        "concurrency.version_mismatch",
    )
    refused(await planning.patch(path, {"status": "done"}), 428, "concurrency.version_required")
    late = {"starts_at": "2026-01-02T00:00:00Z", "ends_at": "2026-01-01T00:00:00Z"}
    refused(await planning.patch(path, {"status": "done"} | late, **tag(1)), 422, "request.invalid")
    assert await planning.count("onceward_jobs") == 0


async def test_assignees_are_notified_once_per_creation_and_move(planning: PlanningServer) -> None:
    one, two = await planning.mission(), await planning.mission()
    path = await planning.assignment(one)
    target = {"mission_id": two.rpartition("/")[2], "version": 1}
    for _ in range(3):
        ok(await planning.post(f"{path}/move", target, key="the-same-move"))
    keys = {
        row["key"]
        for row in await planning.rows("SELECT key FROM onceward_jobs WHERE type = :t", t=NOTIFY)
    }
    about = path.rpartition("/")[2]
    assert keys == {f"job:org:acme:planning:{NOTIFY}:{about}:{version}" for version in (1, 2)}
    await planning.all_jobs_done()
    expected = await planning.rows(
        "SELECT tenant, assignment_id, version, kind, mission_id, recipient"
        " FROM planning_notifications ORDER BY version"
    )
    common = {"tenant": "org:acme", "assignment_id": about, "recipient": "bob"}
    assert [dict(row) for row in expected] == [
        common | {"version": 1, "kind": "assigned", "mission_id": one.rpartition("/")[2]},
        common | {"version": 2, "kind": "moved", "mission_id": two.rpartition("/")[2]},
    ]


async def test_missions_are_found_by_their_words_once_the_jobs_are_done(
    planning: PlanningServer,
) -> None:
    project = await planning.project()
    great = await planning.mission(project, title="Große Fahrt", description="100% rope_work!")
    await planning.mission(project, title="Survey")

    async def found(text: str) -> list[str]:
        response = await planning.client.get(
            f"{project}/missions", params={"search": text}, headers=planning._signed_in
        )
        return [item["title"] for item in ok(response)["items"]]

    assert await found("fahrt") == []
    await planning.all_jobs_done()
    for text in ("GROSSE", "fahrt", "100%", "rope_w", "!", "\uff26ahrt"):
        assert await found(text) == ["Große Fahrt"], text
    for text in ("100_", "r%k", "\x00", "grosser"):
        assert await found(text) == [], text
    ok(await planning.patch(great, {"title": "Small trip", "version": 1}))
    await planning.all_jobs_done()
    assert (await found("fahrt"), await found("small")) == ([], ["Small trip"])
    await planning.delete(great, **tag(2))
    assert await found("small") == []
    await planning.all_jobs_done()
    assert await planning.count("planning_search") == 1


class Dies:
    """Fails a worker once at each statement, as a crash would."""

    def __init__(self, *points: str) -> None:
        self.left = list(points)

    async def reach(self, point: str) -> None:
        if point in self.left:
            self.left.remove(point)
            raise StoreUnavailableError(f"killed at {point}")


async def test_worker_retry_with_the_dedup_store_counts_and_notifies_once(
    planning: PlanningServer,
) -> None:
    """Wherever a worker is killed, the effects of the job happen once."""
    project = await planning.project()
    mission = await planning.mission(project)
    for person in ("bob", "cleo"):
        await planning.assignment(mission, person)
    points = [point for point in FAULT_POINTS if point != "job_before_retry"]
    faults = Dies(*points, *points)
    await planning.all_jobs_done(faults=faults, lease_seconds=0.4, concurrency=2)
    assert faults.left == []
    board = await planning.read(f"{project}/dashboard")
    assert (board["missions"]["planned"], board["assignments"], board["people"]) == (1, 2, 2)
    assert await planning.count("planning_notifications") == 2
    assert await planning.count("onceward_dead_letters") == 0
    done = await planning.rows("SELECT key, attempts FROM onceward_job_completions")
    assert len(done) == len({row["key"] for row in done}) == 4
    # Attempts that were lost beside other jobs do not count, but they are recorded.
    lost = await planning.count("onceward_job_failures")
    assert sum(row["attempts"] for row in done) + lost > len(done)


async def test_counters_are_correct_after_writes_during_concurrent_recounts(
    open_planning: OpenPlanning,
) -> None:
    """Also, the counters always include writes acknowledged before ``as_of``."""
    dice = random.Random(5)
    async with open_planning() as planning, open_planning() as other:
        project = await planning.project()
        answered: list[datetime] = []
        checked = 0
        async with planning.working(), other.working():
            for number in range(24):
                member: Any = dice.choice((planning, other))
                path = await member.mission(project)
                answered.append(datetime.now(UTC))
                if dice.random() < 0.5:
                    await member.assignment(path, f"p{number % 5}")
                if dice.random() < 0.3:
                    await asyncio.sleep(0.02)
                board = await member.read(f"{project}/dashboard")
                certain = sum(each < at(board["as_of"]) for each in answered)
                assert board["missions"]["planned"] >= certain
                checked += certain
            async with asyncio.timeout(20):
                while await planning.count("onceward_jobs"):
                    await asyncio.sleep(0.02)
        assert checked > 0
        truth = await planning.rows(
            "SELECT count(*) AS assignments, count(DISTINCT assignee) AS people"
            " FROM planning_assignments"
        )
        board = await other.read(f"{project}/dashboard")
        assert board["missions"] == ZEROS | {"planned": 24}
        assert {name: board[name] for name in ("assignments", "people")} == dict(truth[0])


async def test_a_slow_recount_does_not_write_over_a_later_one(
    serve: Serve, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL two recounts can overlap. SQLite has one writer."""
    saves = 0

    def slow_once(name: str) -> str:
        nonlocal saves
        text = sql(name)
        if name == "save_dashboard":
            saves += 1
            text += " AND (SELECT pg_sleep(0.4)) IS NOT NULL" if saves == 2 else ""
        return text

    async with opener(serve, postgres_url, monkeypatch)() as planning:
        project = await planning.project()
        await planning.mission(project)
        await planning.all_jobs_done()
        monkeypatch.setattr(jobs, "sql", slow_once)
        saves = 1
        async with planning.working(), asyncio.timeout(20):
            await planning.mission(project)
            while saves < 2:
                await asyncio.sleep(0.01)
            await planning.mission(project)  # the slow recount has not seen this mission
            while await planning.count("onceward_jobs"):
                await asyncio.sleep(0.01)
        assert saves == 3
        assert (await planning.read(f"{project}/dashboard"))["missions"]["planned"] == 3


@pytest.mark.parametrize("point", ["before_commit", "after_business_write"])
async def test_a_write_that_is_cut_off_leaves_no_job(
    sqlite_planning: PlanningServer, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = await sqlite_planning.project()
    faults = Dies(point)
    monkeypatch.setattr(sqlite_planning.onceward.runtime.idempotency, "faults", faults)
    cut = await sqlite_planning.post(f"{project}/missions", {"title": "x"}, key="k")
    refused(cut, 503, "idempotency.store_unavailable")
    assert (
        await sqlite_planning.count("onceward_jobs")
        == await sqlite_planning.count("planning_missions")
        == 0
    )
    again = await sqlite_planning.post(f"{project}/missions", {"title": "x"}, key="k")
    assert again.status_code == 201
    assert await sqlite_planning.count("onceward_jobs") == 2
