"""Projects are renamed and archived, assignments changed and ended, on both databases."""

import asyncio
import sqlite3
from importlib.resources import files
from typing import Any

import pytest

from .fixtures import Member, OpenPlanning, PlanningServer, ok, refused, tag

MISMATCH = "concurrency.version_mismatch"


def id_of(path: str) -> str:
    return path.rpartition("/")[2]


# -- projects -------------------------------------------------------------------------------------


async def test_a_project_is_renamed_archived_and_taken_out_again(planning: PlanningServer) -> None:
    path, other = await planning.project(), await planning.project("Other")
    before = await planning.read(path)
    assert before["archived_at"] is None
    renamed = await planning.patch(path, {"name": "Quay", "description": "d"}, **tag(1))
    assert (ok(renamed)["name"], renamed.headers["etag"]) == ("Quay", '"2"')
    archived = ok(await planning.patch(path, {"archived": True, "version": 2}))
    assert (archived["name"], archived["description"]) == ("Quay", "d")
    assert archived["archived_at"] == archived["updated_at"]
    again = ok(await planning.patch(path, {"archived": True, "description": None}, **tag(3)))
    assert (again["archived_at"], again["description"]) == (archived["archived_at"], None)
    assert await planning.read(path) == again
    listed = (await planning.read("/v1/projects"))["items"]
    assert [item["id"] for item in listed] == [id_of(other)]
    assert (await planning.read("/v1/projects?archived=true"))["items"] == [again]
    back = ok(await planning.patch(path, {"archived": False}, **tag(4)))
    assert back["archived_at"] is None
    assert len((await planning.read("/v1/projects"))["items"]) == 2
    refused(await planning.patch(path, {"name": "x"}), 428, "concurrency.version_required")
    refused(await planning.patch(path, {"name": "x"}, **tag(1)), 409, MISMATCH)
    for body in ({"name": ""}, {"name": None}, {"archived": None}, {"archived": 1}, {"x": 1}):
        assert (await planning.patch(path, body, **tag(5))).status_code in (400, 422), body
    assert (await planning.read(path))["version"] == 5


async def test_an_archived_project_gets_no_missions_and_assignments(
    planning: PlanningServer,
) -> None:
    project = await planning.project()
    mission = await planning.mission(project)
    elsewhere = await planning.assignment()
    ok(await planning.patch(project, {"archived": True}, **tag(1)))
    move = {"mission_id": id_of(mission)}
    for response in (
        await planning.post(f"{project}/missions", {"title": "x"}),
        await planning.post(f"{mission}/assignments", {"assignee": "bob"}),
        await planning.post(f"{elsewhere}/move", move, **tag(1)),
    ):
        details = refused(response, 409, "project.archived")
        assert details == {"project_id": id_of(project)}
    assert (await planning.read(elsewhere))["version"] == 1
    # What is there can be finished.
    ok(await planning.patch(mission, {"status": "done"}, **tag(1)))


async def test_pages_of_archived_projects_show_everything_once(planning: PlanningServer) -> None:
    paths = [await planning.project(f"P{n}") for n in range(5)]
    for path in paths[1:]:
        ok(await planning.patch(path, {"archived": True}, **tag(1)))
    pages = await planning.pages("/v1/projects?archived=true", 3)
    assert [len(page) for page in pages] == [3, 1]
    # Projects of the same millisecond have any order.
    assert sorted(item["name"] for page in pages for item in page) == ["P1", "P2", "P3", "P4"]
    cursor = (await planning.read("/v1/projects?archived=true&limit=1"))["next"]
    refused(await planning.get(f"/v1/projects?after={cursor}"), 400, "request.invalid")


# -- assignments ----------------------------------------------------------------------------------


async def test_an_assignment_passes_to_another_person_and_both_are_notified(
    planning: PlanningServer,
) -> None:
    path = await planning.assignment()
    role = ok(await planning.patch(path, {"role": "pilot"}, **tag(1)))
    assert (role["assignee"], role["role"]) == ("bob", "pilot")
    passed = await planning.patch(path, {"assignee": "cleo", "role": None, "version": 2})
    assert (ok(passed)["assignee"], ok(passed)["role"]) == ("cleo", None)
    gone = await planning.delete(path, **tag(3))
    assert (gone.status_code, gone.content) == (204, b"")
    await planning.all_jobs_done()
    rows = await planning.rows(
        "SELECT version, kind, recipient FROM planning_notifications ORDER BY version, recipient"
    )
    assert [tuple(row.values()) for row in rows] == [
        (1, "assigned", "bob"),
        (2, "changed", "bob"),
        (3, "ended", "bob"),
        (3, "assigned", "cleo"),
        (4, "ended", "cleo"),
    ]


async def test_an_ended_assignment_is_gone_and_not_counted(planning: PlanningServer) -> None:
    project = await planning.project()
    mission = await planning.mission(project)
    path, other = await planning.assignment(mission), await planning.assignment(mission, "cleo")
    refused(await planning.delete(path), 428, "concurrency.version_required")
    refused(await planning.delete(path, **tag(2)), 409, MISMATCH)
    key = "end-it"
    assert (await planning.send("DELETE", path, {"version": 1}, key=key)).status_code == 204
    again = await planning.send("DELETE", path, {"version": 1}, key=key)
    assert (again.status_code, again.headers["idempotency-replayed"]) == (204, "true")
    for response in (
        await planning.get(path),
        await planning.patch(path, {"role": "x"}, **tag(2)),
        await planning.delete(path, **tag(2)),
        await planning.post(f"{path}/move", {"mission_id": id_of(mission)}, **tag(2)),
    ):
        refused(response, 404, "resource.not_found")
    listed = (await planning.read(f"{mission}/assignments"))["items"]
    assert [item["id"] for item in listed] == [id_of(other)]
    await planning.all_jobs_done()
    board = await planning.read(f"{project}/dashboard")
    assert (board["assignments"], board["people"]) == (1, 1)


async def test_ones_own_assignments_are_listed_with_their_missions(
    planning: PlanningServer,
) -> None:
    bob = planning.member("bob", "acme")
    first = await planning.mission(title="Survey", starts_at="2026-06-01T07:00:00Z")
    second, deleted = await planning.mission(title="Dive"), await planning.mission()
    one, two = await planning.assignment(first), await planning.assignment(second)
    await planning.assignment(first, "cleo")
    ended = await planning.assignment(second)
    await planning.assignment(deleted)
    assert (await planning.delete(ended, **tag(1))).status_code == 204
    assert (await planning.delete(deleted, **tag(1))).status_code == 204
    items = (await bob.read("/v1/me/assignments"))["items"]
    assert [item["id"] for item in items] == [id_of(one), id_of(two)]
    assert (items[0]["mission_title"], items[0]["starts_at"]) == (
        "Survey",
        "2026-06-01T07:00:00.000000Z",
    )
    pages = await bob.pages("/v1/me/assignments", 1)
    assert [item["id"] for page in pages for item in page] == [id_of(one), id_of(two)]
    assert (await planning.read("/v1/me/assignments"))["items"] == []
    namesake = planning.member("bob", "globex")
    assert (await namesake.read("/v1/me/assignments"))["items"] == []


# -- races ----------------------------------------------------------------------------------------


@pytest.fixture
async def writers(open_planning: OpenPlanning) -> Any:
    """16 members on two servers with one database."""
    async with open_planning() as one, open_planning() as two:
        yield [Member((one, two)[n % 2].client, sub=f"writer-{n}") for n in range(16)]


async def test_of_many_writers_on_a_project_and_an_assignment_one_wins_each_version(
    writers: Any,
) -> None:
    project, assignment = await writers[0].project(), await writers[0].assignment()
    mission = id_of(await writers[0].mission())
    for version in range(1, 4):
        renames = [
            w.patch(project, {"name": f"by {n}"}, **tag(version)) for n, w in enumerate(writers)
        ]
        edits = [
            w.post(f"{assignment}/move", {"mission_id": mission}, **tag(version))
            if n % 2
            else w.patch(assignment, {"assignee": f"person {n}"}, **tag(version))
            for n, w in enumerate(writers)
        ]
        responses = await asyncio.gather(*renames, *edits)
        for path, group in (project, responses[:16]), (assignment, responses[16:]):
            won = [response for response in group if response.status_code == 200]
            assert len(won) == 1, [response.text for response in group]
            assert {response.status_code for response in group} == {200, 409}
            assert await writers[0].read(path) == won[0].json()
            assert won[0].json()["version"] == version + 1


async def test_of_an_end_a_change_and_a_move_of_one_version_one_happens(writers: Any) -> None:
    mission = id_of(await writers[0].mission())
    for _ in range(4):
        path = await writers[0].assignment()
        responses = await asyncio.gather(
            *(w.delete(path, **tag(1)) for w in writers[:5]),
            *(w.patch(path, {"role": "x"}, **tag(1)) for w in writers[5:10]),
            *(w.post(f"{path}/move", {"mission_id": mission}, **tag(1)) for w in writers[10:]),
        )
        won = [r for r in responses if r.status_code in (200, 204)]
        assert len(won) == 1
        # After an end the others find no assignment.
        assert {r.status_code for r in responses} <= {200, 204, 404, 409}


# -- the migration --------------------------------------------------------------------------------


def test_notifications_of_before_keep_their_order_and_get_ids() -> None:
    scripts = files("onceward_services.planning.migrations").joinpath("sqlite")
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE onceward_audit_events (tenant, id, actor, resource, endpoint)")
    database.executescript(scripts.joinpath("0001_planning.sql").read_text())
    told = ["2026-01-31T09:30:00.500000+00:00", "2026-01-31T09:30:01.000000+00:00"]
    for version, at in enumerate(told, 1):
        database.execute(
            "INSERT INTO planning_notifications"
            " VALUES ('acme', 'a1', ?, 'assigned', 'm', 'bob', ?)",
            (version, at),
        )
    database.executescript(scripts.joinpath("0002_archive_end_notify.sql").read_text())
    rows = database.execute(
        "SELECT id, version, told_at, read_at FROM planning_notifications ORDER BY id"
    ).fetchall()
    database.close()
    assert [row[1:] for row in rows] == [(1, told[0], None), (2, told[1], None)]
    assert all(len(row[0]) == 36 and row[0][14] == "7" for row in rows)
    assert rows[0][0].startswith("019c1")
