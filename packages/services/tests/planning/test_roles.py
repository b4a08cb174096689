"""What viewers, planners, auditors and admins of an organization may do."""

from .fixtures import OpenPlanning, PlanningServer, made, ok, refused, tag


async def test_viewers_and_auditors_read_and_planners_and_admins_also_write(
    sqlite_planning: PlanningServer,
) -> None:
    planning = sqlite_planning
    project = await planning.project()
    mission = await planning.mission(project)
    assignment = await planning.assignment(mission)
    for role in ("viewer", "auditor"):
        member = planning.member("vic", "acme", role, "a role of another service")
        for path in (
            "/v1/projects", project, f"{project}/missions", f"{project}/dashboard", mission,
            f"{mission}/assignments", assignment, "/v1/me/assignments", "/v1/audit",
        ):  # fmt: skip
            ok(await member.get(path))
        target = {"mission_id": mission.rpartition("/")[2]}
        for number, response in enumerate((
            await member.post("/v1/projects", {"name": "x"}, key="0"),
            await member.patch(project, {"name": "x"}, **tag(1)),
            await member.post(f"{project}/missions", {"title": "x"}),
            await member.patch(mission, {"title": "x"}, **tag(1)),
            await member.put(mission, {"title": "x"}, **tag(1)),
            await member.delete(mission, **tag(1)),
            await member.post(f"{mission}/assignments", {"assignee": "x"}),
            await member.patch(assignment, {"assignee": "x"}, **tag(1)),
            await member.post(f"{assignment}/move", target, **tag(1)),
            await member.delete(assignment, **tag(1)),
        )):  # fmt: skip
            refused(response, 403, "auth.forbidden")
            assert "planner or admin" in response.json()["detail"], number
    # The refusal is not stored: the same key works with another token.
    promoted = planning.member("vic", "acme", "viewer", "planner")
    made(await promoted.post("/v1/projects", {"name": "x"}, key="0"))
    ok(await planning.member("root", "acme", "admin").patch(mission, {"title": "y"}, **tag(1)))
    # A token without roles of planning is a planner's.
    ok(await planning.member("eve", "acme", "other").patch(mission, {"title": "z"}, **tag(2)))


async def test_only_auditors_and_admins_see_whole_hashes(sqlite_planning: PlanningServer) -> None:
    planning = sqlite_planning
    await planning.project()
    hashes = {}
    for role in ("viewer", "planner", "auditor", "admin"):
        page = await planning.member("vic", "acme", role).read("/v1/audit")
        hashes[role] = page["items"][-1]["payload_hash"]
    assert hashes["viewer"] == hashes["planner"] == hashes["auditor"][:12]
    assert hashes["auditor"] == hashes["admin"]
    assert len(hashes["auditor"]) == 64


async def test_roles_can_be_required(open_planning: OpenPlanning) -> None:
    async with open_planning(planning_roles_required=True) as planning:
        for response in (
            await planning.get("/v1/projects"),
            await planning.get("/v1/me/assignments"),
            await planning.get("/v1/audit"),
            await planning.post("/v1/projects", {"name": "x"}),
        ):
            refused(response, 403, "auth.forbidden")
        planner = planning.member("ada", "acme", "planner")
        path = made(await planner.post("/v1/projects", {"name": "x"}))
        ok(await planning.member("vic", "acme", "viewer").get(path))
