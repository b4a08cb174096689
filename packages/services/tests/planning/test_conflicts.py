"""Conflicts: the conflict matrix, forms of versions, and many writers on one mission."""

import asyncio
import json
from typing import Any

import pytest

from .fixtures import Member, OpenPlanning, PlanningServer, ok, refused, tag

MISMATCH = "concurrency.version_mismatch"

# -- the matrix -----------------------------------------------------------------------------------


async def test_mission_create_with_a_used_key_and_another_payload_conflicts(
    planning: PlanningServer,
) -> None:
    """Row one. The client corrects the payload and sends it with a new key."""
    project = await planning.project()
    first = await planning.post(f"{project}/missions", {"title": "Survey"}, key="k")
    conflict = await planning.post(f"{project}/missions", {"title": "Dive"}, key="k")
    details = refused(conflict, 409, "idempotency.payload_mismatch")
    assert set(details) == {"expectedHash", "receivedHash"}
    other = await planning.project()
    refused(
        await planning.post(f"{other}/missions", {"title": "Survey"}, key="k"),
        409,
        "idempotency.payload_mismatch",  # the same key on project A and on project B is no replay
    )
    assert (await planning.read(f"{project}/missions"))["items"] == [first.json()]

    reissued = await planning.post(f"{project}/missions", {"title": "Dive"}, key="k2")
    assert reissued.status_code == 201
    assert await planning.count("planning_missions") == 2


async def test_assignment_move_with_an_old_version_conflicts(planning: PlanningServer) -> None:
    """Row two. The client refetches and moves again with a new key and that version."""
    one, two, three = [(await planning.mission()).rpartition("/")[2] for _ in range(3)]
    path = await planning.assignment(f"/v1/missions/{one}")
    assert (
        ok(await planning.post(f"{path}/move", {"mission_id": two, "version": 1}))["version"] == 2
    )
    late = await planning.post(f"{path}/move", {"mission_id": three, "version": 1})
    assert refused(late, 409, MISMATCH) == {"currentVersion": 2, "expectedVersion": 1}
    fresh = await planning.read(path)
    assert fresh["mission_id"] == two
    moved = await planning.post(f"{path}/move", {"mission_id": three, "version": fresh["version"]})
    assert (ok(moved)["mission_id"], moved.headers["etag"]) == (three, '"3"')


async def test_of_simultaneous_mission_updates_one_wins_and_the_other_conflicts(
    planning: PlanningServer,
) -> None:
    """Row three. The client refetches, merges the fields and retries with a new key."""
    path = await planning.mission()
    responses = await asyncio.gather(
        planning.patch(path, {"title": "Left"}, **tag(1)),
        planning.patch(path, {"title": "Right"}, **tag(1)),
    )
    [won] = [response for response in responses if response.status_code == 200]
    [lost] = [response for response in responses if response.status_code != 200]
    assert refused(lost, 409, MISMATCH)["currentVersion"] == 2
    assert await planning.read(path) == won.json()
    again = await planning.patch(path, {"description": "reconciled"}, **tag(2))
    assert (ok(again)["title"], ok(again)["version"]) == (won.json()["title"], 3)


async def test_a_conflict_is_replayed_as_a_conflict_and_a_new_key_is_free(
    planning: PlanningServer,
) -> None:
    path = await planning.mission()
    first = await planning.patch(path, {"title": "x"}, key="k", **tag(7))
    refused(first, 409, MISMATCH)
    again = await planning.patch(path, {"title": "x"}, key="k", **tag(1))
    assert (again.status_code, again.content) == (409, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    ok(await planning.patch(path, {"title": "x"}, key="k2", **tag(1)))


async def test_a_write_without_a_version_is_428_and_changes_nothing(
    planning: PlanningServer,
) -> None:
    mission, other = await planning.mission(), await planning.mission()
    assignment = await planning.assignment(mission)
    there = other.rpartition("/")[2]
    for response in (
        await planning.patch(mission, {"title": "x"}),
        await planning.patch(mission, {"title": "x", "version": None}),
        await planning.put(mission, {"title": "x"}),
        await planning.delete(mission),
        await planning.send("DELETE", mission, {}),
        await planning.post(f"{assignment}/move", {"mission_id": there}),
        await planning.patch(mission, {"title": "x"}, If_Match="*"),
        await planning.delete(mission, If_Match="*"),
    ):
        assert refused(response, 428, "concurrency.version_required") == {}
    assert (await planning.read(mission))["version"] == 1
    assert (await planning.read(assignment))["version"] == 1


# -- header games ---------------------------------------------------------------------------------


async def test_malformed_etags_are_400(planning: PlanningServer) -> None:
    path = await planning.mission()
    games: list[Any] = [
        'W/"1"', "1", "", '"1', '""1""', "'1'", '"1" "2"', '"1",', "x" * 3000, '"1", W/"1"',
    ]  # fmt: skip
    for game in games:
        response = await planning.patch(path, {"title": "x"}, If_Match=game)
        assert refused(response, 400, "request.invalid") == {}, game
    assert (await planning.read(path))["version"] == 1


async def test_etags_of_no_version_are_409(planning: PlanningServer) -> None:
    path = await planning.mission()
    games = ['"0"', '"-1"', '"01"', '"+1"', '"1.0"', '"9223372036854775807"',
             '"9223372036854775808"', f'"{10**40}"', '"abc"', '""', '"2", "3"']  # fmt: skip
    for game in games:
        response = await planning.patch(path, {"title": "x"}, If_Match=game)
        assert refused(response, 409, MISMATCH)["currentVersion"] == 1, game
        response = await planning.delete(path, If_Match=game)
        assert refused(response, 409, MISMATCH)["currentVersion"] == 1, game
    assert (await planning.read(path))["version"] == 1


async def test_absurd_versions_in_the_body_are_409_and_others_400(planning: PlanningServer) -> None:
    path = await planning.mission()
    for version in (0, -1, 2, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400):
        response = await planning.patch(path, {"title": "x", "version": version})
        assert refused(response, 409, MISMATCH)["currentVersion"] == 1, version
    for text in ('"1"', "1.0", "1e0", "true", "[1]", "{}", "9" * 5000, "01", "+1"):
        response = await planning.client.patch(
            path,
            content=f'{{"title": "x", "version": {text}}}',
            headers=planning._signed_in
            | {"Content-Type": "application/json", "Idempotency-Key": text[:9]},
        )
        assert response.status_code == 400, (text[:20], response.text)
    assert (await planning.read(path))["version"] == 1


async def test_if_match_headers_and_body_must_agree(planning: PlanningServer) -> None:
    path = await planning.mission()

    async def patch(headers: list[tuple[str, str]], key: str, **body: Any) -> Any:
        signed_in = list(planning._signed_in.items())
        return await planning.client.patch(
            path,
            content=json.dumps({"title": "x"} | body),
            headers=[
                *signed_in,
                ("Content-Type", "application/json"),
                ("Idempotency-Key", key),
                *headers,
            ],
        )

    two = await patch([("If-Match", '"1"'), ("If-Match", '"2"')], "a")
    refused(two, 400, "request.invalid")
    disagree = await patch([("If-Match", '"1"')], "b", version=2)
    refused(disagree, 400, "request.invalid")
    star = await patch([("If-Match", "*")], "c", version=1)
    refused(star, 400, "request.invalid")
    assert (await planning.read(path))["version"] == 1
    assert ok(await patch([("If-Match", '"1"'), ("If-Match", '"1"')], "d"))["version"] == 2
    assert ok(await patch([("If-Match", '"2"')], "e", version=2))["version"] == 3


async def test_one_of_several_tags_is_enough(planning: PlanningServer) -> None:
    path = await planning.mission()
    assert ok(await planning.patch(path, {}, If_Match='"7", "1", "other"'))["version"] == 2
    assert ok(await planning.patch(path, {}, If_Match=' "2" '))["version"] == 3


# -- races ----------------------------------------------------------------------------------------

WRITERS = 32
ROUNDS = 6


@pytest.fixture
async def writers(open_planning: OpenPlanning) -> Any:
    """32 members on two servers with one database."""
    async with open_planning() as one, open_planning() as two:
        yield [
            Member((one, two)[number % 2].client, sub=f"writer-{number}")
            for number in range(WRITERS)
        ]


async def test_of_32_writers_on_one_mission_exactly_one_wins_each_version(writers: Any) -> None:
    path = await writers[0].mission()
    winners = []
    for version in range(1, ROUNDS + 1):
        responses = await asyncio.gather(
            *(
                writer.patch(path, {"title": f"{version} by {number}"}, **tag(version))
                for number, writer in enumerate(writers)
            )
        )
        won = [response for response in responses if response.status_code == 200]
        lost = [response for response in responses if response.status_code != 200]
        assert (len(won), len(lost)) == (1, WRITERS - 1)
        for response in lost:
            assert refused(response, 409, MISMATCH)["currentVersion"] == version + 1
        assert won[0].json()["version"] == version + 1
        assert await writers[version].read(path) == won[0].json()
        winners.append(won[0].json()["title"])
    events = await writers[0].read("/v1/audit?endpoint=PATCH /v1/missions/{mission_id}")
    assert [event["version"] for event in events["items"]] == list(range(ROUNDS + 1, 1, -1))


async def test_32_writers_who_refetch_and_reapply_lose_no_update(writers: Any) -> None:
    path = await writers[0].mission(description="")
    conflicts = 0

    async def add_my_line(number: int, writer: Member) -> None:
        nonlocal conflicts
        while True:
            seen = await writer.read(path)
            lines = [*filter(None, seen["description"].split("\n")), f"line {number}"]
            response = await writer.patch(
                path, {"description": "\n".join(lines), "version": seen["version"]}
            )
            if response.status_code == 200:
                return
            refused(response, 409, MISMATCH)
            conflicts += 1

    async with asyncio.timeout(60):
        await asyncio.gather(*(add_my_line(*each) for each in enumerate(writers)))
    mission = await writers[1].read(path)
    assert sorted(mission["description"].split("\n")) == sorted(f"line {n}" for n in range(WRITERS))
    assert mission["version"] == WRITERS + 1
    assert conflicts > 0


async def test_of_a_change_a_replacement_and_a_deletion_at_once_one_wins(writers: Any) -> None:
    for _ in range(4):
        path = await writers[0].mission()
        responses = await asyncio.gather(
            writers[1].patch(path, {"title": "patched"}, **tag(1)),
            writers[2].put(path, {"title": "replaced"}, **tag(1)),
            writers[3].delete(path, **tag(1)),
        )
        statuses = sorted(response.status_code for response in responses)
        after = await writers[4].get(path)
        if responses[2].status_code == 204:
            assert statuses in ([204, 404, 404], [204, 404, 409])
            assert after.status_code == 404
        else:
            assert statuses == [200, 409, 409]
            assert after.json()["version"] == 2


async def test_concurrent_moves_in_both_directions_do_not_deadlock(writers: Any) -> None:
    """Each move changes both projects, and both are recounted."""
    missions = [await writers[0].mission() for _ in range(2)]
    ids = [path.rpartition("/")[2] for path in missions]
    paths = [await writers[0].assignment(missions[number % 2]) for number in range(8)]
    async with asyncio.timeout(30):
        for version in (1, 2):
            responses = await asyncio.gather(
                *(
                    writers[number].post(
                        f"{path}/move",
                        {"mission_id": ids[(number + version) % 2], "version": version},
                    )
                    for number, path in enumerate(paths)
                )
            )
            assert {response.status_code for response in responses} == {200}
    first = await writers[0].read(f"{missions[0]}/assignments")
    assert [item["version"] for item in first["items"]] == [3, 3, 3, 3]
