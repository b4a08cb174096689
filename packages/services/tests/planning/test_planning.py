"""Projects, missions and assignments over HTTP, on SQLite and on PostgreSQL."""

from datetime import datetime
from typing import Any
from uuid import UUID

from .fixtures import NOWHERE, Office, made, ok, refused, tag, token

TIMES = {"starts_at": "2026-06-01T09:00:00+02:00", "ends_at": "2026-06-01T15:00:00Z"}


async def test_a_project_is_created_read_and_listed(office: Office) -> None:
    answer = await office.post("/v1/projects", {"name": "Harbour", "description": "two\nlines"})
    assert answer.status_code == 201
    project = answer.json()
    assert set(project) == {"id", "name", "description", "version", "created_at", "updated_at"}
    assert answer.headers["location"] == f"/v1/projects/{UUID(project['id'])}"
    assert (answer.headers["etag"], project["version"]) == ('"1"', 1)
    assert datetime.fromisoformat(project["created_at"]).tzinfo is not None

    read = await office.get(answer.headers["location"])
    assert (ok(read), read.headers["etag"]) == (project, '"1"')
    assert await office.read("/v1/projects") == {"items": [project], "next": None}


async def test_a_mission_is_created_read_changed_replaced_and_deleted(office: Office) -> None:
    project = await office.project()
    answer = await office.post(f"{project}/missions", {"title": "Survey", **TIMES})
    path, mission = made(answer), answer.json()
    assert path == f"/v1/missions/{UUID(mission['id'])}"
    assert (mission["status"], mission["description"], mission["version"]) == ("planned", None, 1)
    assert mission["starts_at"] == "2026-06-01T07:00:00.000000Z"
    assert mission["project_id"] == project.rpartition("/")[2]

    patched = await office.patch(path, {"status": "active", "starts_at": None}, **tag(1))
    assert patched.headers["etag"] == '"2"'
    assert ok(patched) == mission | {
        "status": "active",
        "starts_at": None,
        "version": 2,
        "updated_at": patched.json()["updated_at"],
    }
    put = ok(await office.put(path, {"title": "Dive", "description": "deep", "version": 2}))
    assert (put["title"], put["description"], put["status"]) == ("Dive", "deep", "planned")
    assert (put["starts_at"], put["ends_at"], put["version"]) == (None, None, 3)
    assert put["created_at"] == mission["created_at"]
    assert await office.read(path) == put

    gone = await office.delete(path, **tag(3))
    assert (gone.status_code, gone.content) == (204, b"")
    for answer in (
        await office.get(path),
        await office.patch(path, {}, **tag(4)),
        await office.put(path, {"title": "x"}, **tag(4)),
        await office.delete(path, **tag(4)),
        await office.post(f"{path}/assignments", {"assignee": "bob"}),
        await office.get(f"{path}/assignments"),
    ):
        assert refused(answer, 404, "resource.not_found") == {}
    assert (await office.read(f"{project}/missions"))["items"] == []


async def test_a_deletion_may_say_its_version_in_the_body(office: Office) -> None:
    path = await office.mission()
    refused(await office.send("DELETE", path, {"version": 2}), 409, "concurrency.version_mismatch")
    assert (await office.send("DELETE", path, {"version": 1})).status_code == 204


async def test_an_assignment_is_created_read_and_moved(office: Office) -> None:
    first, second = await office.mission(), await office.mission()
    answer = await office.post(f"{first}/assignments", {"assignee": "bob", "role": "diver"})
    path, assignment = made(answer), answer.json()
    assert path == f"/v1/assignments/{UUID(assignment['id'])}"
    assert assignment["mission_id"] == first.rpartition("/")[2]
    assert await office.read(path) == assignment

    there = await office.read(second)
    moved = await office.post(f"{path}/move", {"mission_id": there["id"]}, **tag(1))
    assert ok(moved) == assignment | {
        "mission_id": there["id"],
        "project_id": there["project_id"],
        "version": 2,
        "updated_at": moved.json()["updated_at"],
    }
    assert moved.headers["etag"] == '"2"'
    assert await office.read(path) == moved.json()
    assert (await office.read(f"{first}/assignments"))["items"] == []
    assert (await office.read(f"{second}/assignments"))["items"] == [moved.json()]


async def test_an_assignment_of_a_deleted_mission_stays_and_can_be_moved(office: Office) -> None:
    mission, other = await office.mission(), await office.mission()
    path = await office.assignment(mission)
    await office.delete(mission, **tag(1))
    stranded = await office.read(path)
    assert stranded["mission_id"] == mission.rpartition("/")[2]
    back = await office.post(f"{path}/move", {"mission_id": stranded["mission_id"], "version": 1})
    refused(back, 404, "resource.not_found")
    ok(await office.post(f"{path}/move", {"mission_id": other.rpartition("/")[2], "version": 1}))


async def test_a_replay_gives_the_first_answer_of_every_write(office: Office) -> None:
    mission, other = await office.mission(), await office.mission()
    assignment = await office.assignment(mission)
    target = {"mission_id": other.rpartition("/")[2], "version": 1}
    for method, path, body in (
        ("POST", "/v1/projects", {"name": "Harbour"}),
        ("POST", f"{assignment}/move", target),
        ("PATCH", mission, {"title": "Dive", "version": 1}),
        ("PUT", mission, {"title": "Dive", "version": 2}),
        ("DELETE", mission, {"version": 3}),
    ):
        first = await office.send(method, path, body, key=f"the {method} {path}".replace(" ", "-"))
        again = await office.send(method, path, body, key=f"the {method} {path}".replace(" ", "-"))
        assert first.status_code < 300, first.text
        assert (again.status_code, again.content) == (first.status_code, first.content)
        assert again.headers.get("etag") == first.headers.get("etag")
        assert again.headers["idempotency-replayed"] == "true"
    assert (await office.read(assignment))["version"] == 2


async def test_what_belongs_to_nothing_is_not_found(office: Office) -> None:
    assignment = await office.assignment()
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
        answer = await office.send(method, path, body)
        assert refused(answer, 404, "resource.not_found") == {}, (method, path)


async def test_a_malformed_id_is_not_found(office: Office) -> None:
    for item_id in ("1", "x" * 500, "%00", "%F0%9F%8C%B2", NOWHERE.upper()):
        for path in (f"/v1/projects/{item_id}", f"/v1/missions/{item_id}"):
            refused(await office.get(path), 404, "resource.not_found")


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


async def test_a_strange_or_mistyped_field_is_400_and_a_value_that_is_not_allowed_422(
    sqlite_office: Office,
) -> None:
    path = await sqlite_office.mission()
    changes = [(400, change) for change in MALFORMED] + [(422, change) for change in NOT_ALLOWED]
    for status, change in changes:
        for answer in (
            await sqlite_office.patch(path, change, **tag(1)),
            await sqlite_office.put(path, {"title": "x"} | change, **tag(1)),
        ):
            details = refused(answer, status, "request.invalid")
            assert details["fields"][0]["field"] == next(iter(change))
    assert (await sqlite_office.read(path))["version"] == 1


async def test_a_period_is_checked_as_a_whole_after_the_merge(office: Office) -> None:
    path = await office.mission(**TIMES)
    early = await office.patch(path, {"ends_at": "2026-06-01T06:59:59.999999Z", "version": 1})
    refused(early, 422, "request.invalid")
    assert (await office.read(path))["ends_at"] == "2026-06-01T15:00:00.000000Z"
    same = await office.patch(path, {"ends_at": "2026-06-01T07:00:00Z", "version": 1})
    assert ok(same)["version"] == 2


async def test_an_empty_change_is_a_change(office: Office) -> None:
    path = await office.mission()
    before = await office.read(path)
    after = ok(await office.patch(path, {}, **tag(1)))
    assert after == before | {"version": 2, "updated_at": after["updated_at"]}


async def test_a_project_takes_a_name_and_nothing_strange(sqlite_office: Office) -> None:
    bodies: list[Any] = [
        {},
        {"name": ""},
        {"name": "x", "colour": "red"},
        [],
        "x",
        {"name": "x" * 201},
    ]
    for body in bodies:
        answer = await sqlite_office.post("/v1/projects", body)
        assert answer.status_code in (400, 422)
        assert answer.json()["code"] == "request.invalid"
    assert await sqlite_office.count("planning_projects") == 0


async def test_a_read_with_the_tag_at_hand_is_304(office: Office) -> None:
    mission = await office.mission()
    project = f"/v1/projects/{(await office.read(mission))['project_id']}"
    for path, current in (
        (mission, '"1"'), (project, '"1"'), (f"{project}/dashboard", '"0"'),
    ):  # fmt: skip
        for at_hand in (current, f"W/{current}", f'"x", {current}', "*"):
            answer = await office.get(path, If_None_Match=at_hand)
            assert (answer.status_code, answer.content) == (304, b"")
            assert answer.headers["etag"] == current
        for other in ('"7"', "1", "", '"'):
            ok(await office.get(path, If_None_Match=other))
    refused(
        await office.get(f"/v1/missions/{NOWHERE}", If_None_Match="*"), 404, "resource.not_found"
    )


async def test_lists_are_walked_page_by_page_oldest_first(office: Office) -> None:
    project = await office.project("first")
    missions = [await office.mission(project, title=f"m{n}") for n in range(5)]
    for n in range(4):
        await office.assignment(missions[0], f"p{n}")
    await office.project("second")
    await office.delete(missions[2], **tag(1))
    pages = await office.pages("/v1/projects", 1)
    assert [[item["name"] for item in page] for page in pages] == [["first"], ["second"]]
    pages = await office.pages(f"{project}/missions", 2)
    assert [[item["title"] for item in page] for page in pages] == [["m0", "m1"], ["m3", "m4"]]
    pages = await office.pages(f"{missions[0]}/assignments", 3)
    assert [[item["assignee"] for item in page] for page in pages] == [["p0", "p1", "p2"], ["p3"]]
    one = await office.pages(f"{project}/missions", 200)
    assert len(one) == 1


async def test_a_cursor_that_was_never_given_is_400(office: Office) -> None:
    for _ in range(2):
        await office.project()
    given = (await office.read("/v1/projects?limit=1"))["next"]
    assert len((await office.read(f"/v1/projects?after={given}"))["items"]) == 1
    twisted = given[:-1] + chr(ord(given[-1]) + 1)  # the same bytes in another spelling, or none
    for strange in ("x", "", given + "A", given + "=", NOWHERE, "é" * 23, "%00" * 23, twisted):
        answer = await office.get(f"/v1/projects?after={strange}")
        refused(answer, 400, "request.invalid")
    refused(await office.get(f"/v1/audit?after={given}"), 400, "request.invalid")


async def test_a_limit_out_of_bounds_is_refused(sqlite_office: Office) -> None:
    for limit, status in (("0", 422), ("201", 422), ("-1", 422), ("x", 400)):
        for path in ("/v1/projects", "/v1/audit"):
            answer = await sqlite_office.get(f"{path}?limit={limit}")
            refused(answer, status, "request.invalid")
    assert len(await sqlite_office.pages("/v1/projects", 200)) == 1


async def test_a_token_without_an_organization_is_refused(sqlite_office: Office) -> None:
    headers = token("ada", None) | {"Idempotency-Key": "k"}
    for method in ("GET", "POST"):
        answer = await sqlite_office.client.request(
            method, "/v1/projects", headers=headers, json={"name": "x"}
        )
        assert refused(answer, 401, "auth.required") == {}
        assert '"org"' in answer.json()["detail"]
    assert await sqlite_office.count("planning_projects") == 0


async def test_a_write_takes_a_key_and_a_read_takes_none(sqlite_office: Office) -> None:
    answer = await sqlite_office.client.post(
        "/v1/projects", json={"name": "x"}, headers=sqlite_office._signed_in
    )
    refused(answer, 400, "idempotency.key_required")
    await sqlite_office.read("/v1/projects")
    assert await sqlite_office.count("idempotency_records") == 0
