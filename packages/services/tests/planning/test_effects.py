"""What follows from writes: counters, notifications and words, each right in the end and once."""

import asyncio
import random
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast.errors import StoreUnavailableError
from holdfast.jobs.executor import FAULT_POINTS
from holdfast_services.planning import jobs
from holdfast_services.planning.jobs import COUNT, INDEX, NOTIFY
from holdfast_services.planning.repository import sql
from packages.services.tests.conftest import Serve

from .fixtures import Office, OpenOffice, ok, opener, refused, tag

ZEROS = {"planned": 0, "active": 0, "done": 0, "cancelled": 0}


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


async def test_a_new_projects_dashboard_is_true_as_of_its_creation(office: Office) -> None:
    project = await office.project()
    board = await office.get(f"{project}/dashboard")
    assert ok(board) == {
        "project_id": project.rpartition("/")[2],
        "missions": ZEROS,
        "assignments": 0,
        "people": 0,
        "as_of": (await office.read(project))["created_at"],
    }
    assert board.headers["etag"] == '"0"'


async def test_the_dashboard_is_right_once_the_jobs_are_done(office: Office) -> None:
    project = await office.project()
    missions = [await office.mission(project) for _ in range(4)]
    await office.patch(missions[0], {"status": "active"}, **tag(1))
    await office.patch(missions[1], {"status": "done"}, **tag(1))
    await office.delete(missions[2], **tag(1))
    for person in ("bob", "cleo", "bob"):
        await office.assignment(missions[0], person)
    stranded = await office.mission(project)
    await office.assignment(stranded, "dora")
    await office.delete(stranded, **tag(1))
    before = datetime.now(UTC)
    assert (await office.read(f"{project}/dashboard"))["missions"] == ZEROS
    await office.all_jobs_done()
    board = await office.read(f"{project}/dashboard")
    assert board["missions"] == ZEROS | {"planned": 1, "active": 1, "done": 1}
    assert (board["assignments"], board["people"]) == (3, 2)
    assert at(board["as_of"]) >= before


async def test_a_move_between_projects_is_counted_in_both(office: Office) -> None:
    here, there = await office.project(), await office.project()
    target = (await office.read(await office.mission(there)))["id"]
    path = await office.assignment(await office.mission(here))
    await office.all_jobs_done()
    ok(await office.post(f"{path}/move", {"mission_id": target, "version": 1}))
    await office.all_jobs_done()
    boards = [await office.read(f"{each}/dashboard") for each in (here, there)]
    assert [board["assignments"] for board in boards] == [0, 1]


async def test_many_writes_to_a_project_are_one_job_that_counts(office: Office) -> None:
    project = await office.project()
    mission = await office.mission(project)
    for version in range(1, 6):
        status = ("active", "planned")[version % 2]
        ok(await office.patch(mission, {"status": status, "version": version}))
    jobs = await office.rows("SELECT type, tenant, coalesce_key FROM jobs ORDER BY type")
    assert [(job["type"], job["tenant"]) for job in jobs] == [(COUNT, "acme"), (INDEX, "acme")]
    assert jobs[0]["coalesce_key"] == project.rpartition("/")[2]


async def test_refused_and_replayed_writes_cause_nothing(office: Office) -> None:
    project = await office.project()
    first = await office.post(f"{project}/missions", {"title": "x"}, key="k")
    path = first.headers["location"]
    await office.all_jobs_done()
    again = await office.post(f"{project}/missions", {"title": "x"}, key="k")
    assert again.headers["idempotency-replayed"] == "true"
    refused(
        await office.patch(path, {"status": "done"}, **tag(2)), 409, "concurrency.version_mismatch"
    )
    refused(await office.patch(path, {"status": "done"}), 428, "concurrency.version_required")
    late = {"starts_at": "2026-01-02T00:00:00Z", "ends_at": "2026-01-01T00:00:00Z"}
    refused(await office.patch(path, {"status": "done"} | late, **tag(1)), 422, "request.invalid")
    assert await office.count("jobs") == 0


async def test_assignees_are_told_once_per_creation_and_move(office: Office) -> None:
    one, two = await office.mission(), await office.mission()
    path = await office.assignment(one)
    target = {"mission_id": two.rpartition("/")[2], "version": 1}
    for _ in range(3):
        ok(await office.post(f"{path}/move", target, key="the-same-move"))
    keys = {
        row["key"] for row in await office.rows("SELECT key FROM jobs WHERE type = :t", t=NOTIFY)
    }
    about = path.rpartition("/")[2]
    assert keys == {f"job:acme:planning:{NOTIFY}:{about}:{version}" for version in (1, 2)}
    await office.all_jobs_done()
    told = await office.rows(
        "SELECT tenant, assignment_id, version, kind, mission_id, recipient"
        " FROM planning_notifications ORDER BY version"
    )
    common = {"tenant": "acme", "assignment_id": about, "recipient": "bob"}
    assert [dict(row) for row in told] == [
        common | {"version": 1, "kind": "assigned", "mission_id": one.rpartition("/")[2]},
        common | {"version": 2, "kind": "moved", "mission_id": two.rpartition("/")[2]},
    ]


async def test_missions_are_found_by_their_words_once_the_jobs_are_done(office: Office) -> None:
    project = await office.project()
    great = await office.mission(project, title="Große Fahrt", description="100% rope_work!")
    await office.mission(project, title="Survey")

    async def found(text: str) -> list[str]:
        answer = await office.client.get(
            f"{project}/missions", params={"search": text}, headers=office._signed_in
        )
        return [item["title"] for item in ok(answer)["items"]]

    assert await found("fahrt") == []
    await office.all_jobs_done()
    for text in ("GROSSE", "fahrt", "100%", "rope_w", "!", "\uff26ahrt"):
        assert await found(text) == ["Große Fahrt"], text
    for text in ("100_", "r%k", "\x00", "grosser"):
        assert await found(text) == [], text
    ok(await office.patch(great, {"title": "Small trip", "version": 1}))
    await office.all_jobs_done()
    assert (await found("fahrt"), await found("small")) == ([], ["Small trip"])
    await office.delete(great, **tag(2))
    assert await found("small") == []
    await office.all_jobs_done()
    assert await office.count("planning_search") == 1


class Dies:
    """Cuts a worker off from its database, once at each place, as a crash would."""

    def __init__(self, *points: str) -> None:
        self.left = list(points)

    async def reach(self, point: str) -> None:
        if point in self.left:
            self.left.remove(point)
            raise StoreUnavailableError(f"killed at {point}")


async def test_worker_retry_with_the_dedup_store_counts_and_tells_once(office: Office) -> None:
    """Wherever a worker dies, the job is done again or acknowledged, never done twice."""
    project = await office.project()
    mission = await office.mission(project)
    for person in ("bob", "cleo"):
        await office.assignment(mission, person)
    points = [point for point in FAULT_POINTS if point != "job_before_retry"]
    faults = Dies(*points, *points)
    await office.all_jobs_done(faults=faults, lease_seconds=0.4, concurrency=2)
    assert faults.left == []
    board = await office.read(f"{project}/dashboard")
    assert (board["missions"]["planned"], board["assignments"], board["people"]) == (1, 2, 2)
    assert await office.count("planning_notifications") == 2
    assert await office.count("dead_letters") == 0
    done = await office.rows("SELECT key, attempts FROM job_completions")
    assert len(done) == len({row["key"] for row in done}) == 4
    assert sum(row["attempts"] for row in done) > len(done)


async def test_writes_while_two_workers_count_end_in_the_truth(open_office: OpenOffice) -> None:
    """And at every moment, what was answered before ``as_of`` is in the counters."""
    dice = random.Random(5)
    async with open_office() as office, open_office() as other:
        project = await office.project()
        answered: list[datetime] = []
        checked = 0
        async with office.working(), other.working():
            for number in range(24):
                member: Any = dice.choice((office, other))
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
                while await office.count("jobs"):
                    await asyncio.sleep(0.02)
        assert checked > 0
        truth = await office.rows(
            "SELECT count(*) AS assignments, count(DISTINCT assignee) AS people"
            " FROM planning_assignments"
        )
        board = await other.read(f"{project}/dashboard")
        assert board["missions"] == ZEROS | {"planned": 24}
        assert {name: board[name] for name in ("assignments", "people")} == dict(truth[0])


async def test_a_slow_recount_does_not_write_over_a_later_one(
    serve: Serve, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL two can run at once. SQLite has one writer at a time."""
    saves = 0

    def slow_once(name: str) -> str:
        nonlocal saves
        text = sql(name)
        if name == "save_dashboard":
            saves += 1
            text += " AND (SELECT pg_sleep(0.4)) IS NOT NULL" if saves == 2 else ""
        return text

    async with opener(serve, postgres_url, monkeypatch)() as office:
        project = await office.project()
        await office.mission(project)
        await office.all_jobs_done()
        monkeypatch.setattr(jobs, "sql", slow_once)
        saves = 1
        async with office.working(), asyncio.timeout(20):
            await office.mission(project)
            while saves < 2:
                await asyncio.sleep(0.01)
            await office.mission(project)  # the slow one has counted, and has not seen this
            while await office.count("jobs"):
                await asyncio.sleep(0.01)
        assert saves == 3
        assert (await office.read(f"{project}/dashboard"))["missions"]["planned"] == 3


@pytest.mark.parametrize("point", ["before_commit", "after_business_write"])
async def test_a_write_that_is_cut_off_leaves_no_job(
    sqlite_office: Office, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = await sqlite_office.project()
    faults = Dies(point)
    monkeypatch.setattr(sqlite_office.holdfast.idempotency, "faults", faults)
    cut = await sqlite_office.post(f"{project}/missions", {"title": "x"}, key="k")
    refused(cut, 503, "idempotency.store_unavailable")
    assert await sqlite_office.count("jobs") == await sqlite_office.count("planning_missions") == 0
    again = await sqlite_office.post(f"{project}/missions", {"title": "x"}, key="k")
    assert again.status_code == 201
    assert await sqlite_office.count("jobs") == 2
