"""Projects, missions and assignments over HTTP, on SQLite and on PostgreSQL."""

from datetime import datetime
from typing import Any
from uuid import UUID

from .fixtures import NOWHERE, PlanningServer, made, ok, refused, tag, token

TIMES = {"starts_at": "2026-06-01T09:00:00+02:00", "ends_at": "2026-06-01T15:00:00Z"}


async def test_a_project_is_created_read_and_listed(planning: PlanningServer) -> None:
    response = await planning.post("/v1/projects", {"name": "Harbour", "description": "two\nlines"})
    assert response.status_code == 201
    project = response.json()
    assert set(project) == {
        "id", "name", "description", "archived_at", "version", "created_at", "updated_at",
    }  # fmt: skip
    assert response.headers["location"] == f"/v1/projects/{UUID(project['id'])}"
    assert (response.headers["etag"], project["version"]) == ('"1"', 1)
    assert datetime.fromisoformat(project["created_at"]).tzinfo is not None

    read = await planning.get(response.headers["location"])
    assert (ok(read), read.headers["etag"]) == (project, '"1"')
    assert await planning.read("/v1/projects") == {"items": [project], "next": None}


async def test_a_mission_is_created_read_changed_replaced_and_deleted(
    planning: PlanningServer,
) -> None:
    project = await planning.project()
    response = await planning.post(f"{project}/missions", {"title": "Survey", **TIMES})
    path, mission = made(response), response.json()
    assert path == f"/v1/missions/{UUID(mission['id'])}"
    assert (mission["status"], mission["description"], mission["version"]) == ("planned", None, 1)
    assert mission["starts_at"] == "2026-06-01T07:00:00.000000Z"
    assert mission["project_id"] == project.rpartition("/")[2]

    patched = await planning.patch(path, {"status": "active", "starts_at": None}, **tag(1))
    assert patched.headers["etag"] == '"2"'
    assert ok(patched) == mission | {
        "status": "active",
        "starts_at": None,
        "version": 2,
        "updated_at": patched.json()["updated_at"],
    }
    put = ok(await planning.put(path, {"title": "Dive", "description": "deep", "version": 2}))
    assert (put["title"], put["description"], put["status"]) == ("Dive", "deep", "planned")
    assert (put["starts_at"], put["ends_at"], put["version"]) == (None, None, 3)
    assert put["created_at"] == mission["created_at"]
    assert await planning.read(path) == put

    gone = await planning.delete(path, **tag(3))
    assert (gone.status_code, gone.content) == (204, b"")
    for response in (
        await planning.get(path),
        await planning.patch(path, {}, **tag(4)),
        await planning.put(path, {"title": "x"}, **tag(4)),
        await planning.delete(path, **tag(4)),
        await planning.post(f"{path}/assignments", {"assignee": "bob"}),
        await planning.get(f"{path}/assignments"),
    ):
        assert refused(response, 404, "resource.not_found") == {}
    assert (await planning.read(f"{project}/missions"))["items"] == []


async def test_a_deletion_may_say_its_version_in_the_body(planning: PlanningServer) -> None:
    path = await planning.mission()
    refused(
        await planning.send("DELETE", path, {"version": 2}), 409, "concurrency.version_mismatch"
    )
    assert (await planning.send("DELETE", path, {"version": 1})).status_code == 204


async def test_an_assignment_is_created_read_and_moved(planning: PlanningServer) -> None:
    first, second = await planning.mission(), await planning.mission()
    response = await planning.post(f"{first}/assignments", {"assignee": "bob", "role": "diver"})
    path, assignment = made(response), response.json()
    assert path == f"/v1/assignments/{UUID(assignment['id'])}"
    assert assignment["mission_id"] == first.rpartition("/")[2]
    assert await planning.read(path) == assignment

    there = await planning.read(second)
    moved = await planning.post(f"{path}/move", {"mission_id": there["id"]}, **tag(1))
    assert ok(moved) == assignment | {
        "mission_id": there["id"],
        "project_id": there["project_id"],
        "version": 2,
        "updated_at": moved.json()["updated_at"],
    }
    assert moved.headers["etag"] == '"2"'
    assert await planning.read(path) == moved.json()
    assert (await planning.read(f"{first}/assignments"))["items"] == []
    assert (await planning.read(f"{second}/assignments"))["items"] == [moved.json()]


async def test_an_assignment_of_a_deleted_mission_stays_and_can_be_moved(
    planning: PlanningServer,
) -> None:
    mission, other = await planning.mission(), await planning.mission()
    path = await planning.assignment(mission)
    await planning.delete(mission, **tag(1))
    stranded = await planning.read(path)
    assert stranded["mission_id"] == mission.rpartition("/")[2]
    back = await planning.post(f"{path}/move", {"mission_id": stranded["mission_id"], "version": 1})
    refused(back, 404, "resource.not_found")
    ok(await planning.post(f"{path}/move", {"mission_id": other.rpartition("/")[2], "version": 1}))


async def test_replay_is_the_first_response_of_every_write(planning: PlanningServer) -> None:
    mission, other = await planning.mission(), await planning.mission()
    assignment = await planning.assignment(mission)
    target = {"mission_id": other.rpartition("/")[2], "version": 1}
    for method, path, body in (
        ("POST", "/v1/projects", {"name": "Harbour"}),
        ("POST", f"{assignment}/move", target),
        ("PATCH", mission, {"title": "Dive", "version": 1}),
        ("PUT", mission, {"title": "Dive", "version": 2}),
        ("DELETE", mission, {"version": 3}),
    ):
        first = await planning.send(
            method, path, body, key=f"the {method} {path}".replace(" ", "-")
        )
        again = await planning.send(
            method, path, body, key=f"the {method} {path}".replace(" ", "-")
        )
        assert first.status_code < 300, first.text
        assert (again.status_code, again.content) == (first.status_code, first.content)
        assert again.headers.get("etag") == first.headers.get("etag")
        assert again.headers["idempotency-replayed"] == "true"
    assert (await planning.read(assignment))["version"] == 2


async def test_child_of_an_unknown_parent_is_not_found(planning: PlanningServer) -> None:
    assignment = await planning.assignment()
    for method, path, body in (
        ("GET", f"/v1/projects/{NOWHERE}", None),
        ("GET", f"/v1/projects/{NOWHERE}/dashboard", None),
        ("GET", f"/v1/projects/{NOWHERE}/missions", None),
        ("POST", f"/v1/projects/{NOWHERE}/missions", {"title": "x"}),
        ("GET", f"/v1/missions/{NOWHERE}/assignments", None),
        ("POST", f"/v1/missions/{NOWHERE}/assignments", {"assignee": "bob"}),
        ("GET", f"/v1/assignments/{NOWHERE}", None),
        ("POST", f"/v1/assignments/{NOWHERE}/move", {"mission_id": NOWHERE, "version": 1}),
        ("POST", f"{assignment}/move", {"mission_id": NOWHERE, "version": 1}),
        ("POST", f"{assignment}/move", {"mission_id": "\x00'", "version": 1}),
        ("PATCH", f"/v1/missions/{NOWHERE}", {}),  # not 428: there is nothing that has a version
        ("PATCH", f"/v1/missions/{NOWHERE}", {"version": 1}),
    ):
        response = await planning.send(method, path, body)
        assert refused(response, 404, "resource.not_found") == {}, (method, path)


async def test_a_malformed_id_is_not_found(planning: PlanningServer) -> None:
    for item_id in ("1", "x" * 500, "%00", "%F0%9F%8C%B2", NOWHERE.upper()):
        for path in (f"/v1/projects/{item_id}", f"/v1/missions/{item_id}"):
            refused(await planning.get(path), 404, "resource.not_found")


MALFORMED: list[dict[str, Any]] = [
    {"title": None},
    {"title": 5},
    {"starts_at": "tomorrow"},
    {"starts_at": "2026-06-01T07:00:00"},
    {"starts_at": 1717225200},
    {"colour": "red"},
    {"version": "1"},
    {"version": 1.5},
    {"version": True},
]
NOT_ALLOWED: list[dict[str, Any]] = [
    {"title": ""},
    {"title": " \t"},
    {"title": "two\nlines"},
    {"title": "x" * 201},
    {"title": "a\x00b"},
    {"description": "a\x1bb"},
    {"description": "x" * 10_001},
    {"status": "lost"},
    {"status": None},
    {"ends_at": "2026-06-01T07:00:00Z", "starts_at": "2026-06-01T07:00:01Z"},
]


async def test_unknown_or_mistyped_field_is_400_and_disallowed_value_is_422(
    sqlite_planning: PlanningServer,
) -> None:
    path = await sqlite_planning.mission()
    changes = [(400, change) for change in MALFORMED] + [(422, change) for change in NOT_ALLOWED]
    for status, change in changes:
        for response in (
            await sqlite_planning.patch(path, change, **tag(1)),
            await sqlite_planning.put(path, {"title": "x"} | change, **tag(1)),
        ):
            details = refused(response, status, "request.invalid")
            assert details["fields"][0]["field"] == next(iter(change))
    assert (await sqlite_planning.read(path))["version"] == 1


async def test_a_period_is_checked_as_a_whole_after_the_merge(planning: PlanningServer) -> None:
    path = await planning.mission(**TIMES)
    early = await planning.patch(path, {"ends_at": "2026-06-01T06:59:59.999999Z", "version": 1})
    refused(early, 422, "request.invalid")
    assert (await planning.read(path))["ends_at"] == "2026-06-01T15:00:00.000000Z"
    same = await planning.patch(path, {"ends_at": "2026-06-01T07:00:00Z", "version": 1})
    assert ok(same)["version"] == 2


async def test_an_empty_change_is_a_change(planning: PlanningServer) -> None:
    path = await planning.mission()
    before = await planning.read(path)
    after = ok(await planning.patch(path, {}, **tag(1)))
    assert after == before | {"version": 2, "updated_at": after["updated_at"]}


async def test_a_project_takes_a_name_and_nothing_strange(sqlite_planning: PlanningServer) -> None:
    bodies: list[Any] = [
        {},
        {"name": ""},
        {"name": "x", "colour": "red"},
        [],
        "x",
        {"name": "x" * 201},
    ]
    for body in bodies:
        response = await sqlite_planning.post("/v1/projects", body)
        assert response.status_code in (400, 422)
        assert response.json()["code"] == "request.invalid"
    assert await sqlite_planning.count("planning_projects") == 0


async def test_read_with_the_current_etag_is_304(planning: PlanningServer) -> None:
    mission = await planning.mission()
    project = f"/v1/projects/{(await planning.read(mission))['project_id']}"
    for path, current in (
        (mission, '"1"'), (project, '"1"'), (f"{project}/dashboard", '"0"'),
    ):  # fmt: skip
        for at_hand in (current, f"W/{current}", f'"x", {current}', "*"):
            response = await planning.get(path, If_None_Match=at_hand)
            assert (response.status_code, response.content) == (304, b"")
            assert response.headers["etag"] == current
        for other in ('"7"', "1", "", '"'):
            ok(await planning.get(path, If_None_Match=other))
    refused(
        await planning.get(f"/v1/missions/{NOWHERE}", If_None_Match="*"), 404, "resource.not_found"
    )


async def test_lists_are_walked_page_by_page_oldest_first(planning: PlanningServer) -> None:
    project = await planning.project("first")
    missions = [await planning.mission(project, title=f"m{n}") for n in range(5)]
    for n in range(4):
        await planning.assignment(missions[0], f"p{n}")
    await planning.project("second")
    await planning.delete(missions[2], **tag(1))
    pages = await planning.pages("/v1/projects", 1)
    assert [[item["name"] for item in page] for page in pages] == [["first"], ["second"]]
    pages = await planning.pages(f"{project}/missions", 2)
    assert [[item["title"] for item in page] for page in pages] == [["m0", "m1"], ["m3", "m4"]]
    pages = await planning.pages(f"{missions[0]}/assignments", 3)
    assert [[item["assignee"] for item in page] for page in pages] == [["p0", "p1", "p2"], ["p3"]]
    one = await planning.pages(f"{project}/missions", 200)
    assert len(one) == 1


async def test_invalid_cursor_is_400(planning: PlanningServer) -> None:
    for _ in range(2):
        await planning.project()
    given = (await planning.read("/v1/projects?limit=1"))["next"]
    assert len((await planning.read(f"/v1/projects?after={given}"))["items"]) == 1
    twisted = given[:-1] + chr(ord(given[-1]) + 1)  # the same bytes in another encoding, or invalid
    for strange in ("x", "", given + "A", given + "=", NOWHERE, "é" * 23, "%00" * 23, twisted):
        response = await planning.get(f"/v1/projects?after={strange}")
        refused(response, 400, "request.invalid")
    refused(await planning.get(f"/v1/audit?after={given}"), 400, "request.invalid")


async def test_a_limit_out_of_bounds_is_refused(sqlite_planning: PlanningServer) -> None:
    for limit, status in (("0", 422), ("201", 422), ("-1", 422), ("x", 400)):
        for path in ("/v1/projects", "/v1/audit"):
            response = await sqlite_planning.get(f"{path}?limit={limit}")
            refused(response, status, "request.invalid")
    assert len(await sqlite_planning.pages("/v1/projects", 200)) == 1


async def test_a_token_without_an_organization_is_refused(sqlite_planning: PlanningServer) -> None:
    headers = token("ada", None) | {"Idempotency-Key": "k"}
    for method in ("GET", "POST"):
        response = await sqlite_planning.client.request(
            method, "/v1/projects", headers=headers, json={"name": "x"}
        )
        assert refused(response, 401, "auth.required") == {}
        assert '"org"' in response.json()["detail"]
    assert await sqlite_planning.count("planning_projects") == 0


async def test_a_write_takes_a_key_and_a_read_takes_none(sqlite_planning: PlanningServer) -> None:
    response = await sqlite_planning.client.post(
        "/v1/projects", json={"name": "x"}, headers=sqlite_planning._signed_in
    )
    refused(response, 400, "idempotency.key_required")
    await sqlite_planning.read("/v1/projects")
    assert await sqlite_planning.count("onceward_idempotency_records") == 0
