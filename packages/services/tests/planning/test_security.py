"""Security: cross-organization isolation of records and job dedup entries, header tampering
rejection, inference prevention by key scoping. That no route leaks a resource is generated from the
OpenAPI document, in ``packages/services/tests/test_isolation.py``."""

import re

from onceward.jobs.admin import JobAdmin
from onceward.jobs.job import job_id, job_key
from onceward_services.planning.jobs import NOTIFY, QUEUE

from .fixtures import PlanningServer, made, ok, refused, tag, token


async def test_cross_org_isolation_of_idempotency_records(planning: PlanningServer) -> None:
    """The same key at the same endpoint, in two organizations, is two keys."""
    eve = planning.member()
    ours = await planning.post("/v1/projects", {"name": "ours"}, key="k")
    theirs = await eve.post("/v1/projects", {"name": "theirs"}, key="k")
    assert made(ours) != made(theirs)
    replayed = await eve.post("/v1/projects", {"name": "theirs"}, key="k")
    assert replayed.content == theirs.content
    rows = await planning.rows("SELECT tenant FROM onceward_idempotency_records ORDER BY tenant")
    assert [row["tenant"] for row in rows] == ["org:acme", "org:globex"]


async def test_cross_org_isolation_of_job_dedup_entries(planning: PlanningServer) -> None:
    path = await planning.assignment()
    about = f"{path.rpartition('/')[2]}:1"
    await planning.all_jobs_done()
    job_admin = JobAdmin(planning.onceward.store)
    ours = job_id(job_key("org:acme", QUEUE, NOTIFY, about))
    assert await job_admin.state(ours, tenant="org:acme") == "done"
    assert await job_admin.find(ours, tenant="org:globex") is None
    assert ours != job_id(job_key("org:globex", QUEUE, NOTIFY, about))
    assert await job_admin.jobs(tenant="org:globex") == []


async def test_header_tampering_rejection(planning: PlanningServer) -> None:
    """A modified token, two tokens, and headers that name another organization."""
    path = await planning.mission()
    signed_in = planning._signed_in["Authorization"]
    head, body, signature = signed_in.removeprefix("Bearer ").split(".")
    other = token("ada", "globex")["Authorization"].removeprefix("Bearer ").split(".")
    for forged in (
        f"{head}.{other[1]}.{signature}",
        f"{head}.{body}.{other[2]}",
        f"{head}.{body}.",
    ):
        response = await planning.client.get(path, headers={"Authorization": f"Bearer {forged}"})
        refused(response, 401, "auth.required")
    eve = token("eve", "globex")
    for name in ("X-Org", "X-Tenant", "X-Organization-ID", "X-Forwarded-User"):
        response = await planning.client.get(path, headers=eve | {name: "acme"})
        refused(response, 404, "resource.not_found")
    both = [("Authorization", signed_in), *eve.items()]
    planning.client.headers.pop("authorization", None)
    refused(await planning.client.get(path, headers=both), 401, "auth.required")


async def test_a_key_sent_twice_differently_is_refused(planning: PlanningServer) -> None:
    signed_in = list(planning._signed_in.items())
    two = [*signed_in, ("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    response = await planning.client.post("/v1/projects", json={"name": "x"}, headers=two)
    refused(response, 400, "idempotency.key_invalid")
    assert await planning.count("planning_projects") == 0


async def test_inference_prevention_via_key_scoping(planning: PlanningServer) -> None:
    """No response reveals whether another organization has used a key."""
    eve = planning.member()
    await planning.post("/v1/projects", {"name": "ours"}, key="guessed")
    used = await eve.post("/v1/projects", {"name": "x"}, key="guessed")
    free = await eve.post("/v1/projects", {"name": "x"}, key="not-guessed")
    assert used.status_code == free.status_code == 201
    own = {"x-request-id", "x-correlation-id", "location", "ratelimit"}
    assert {n: v for n, v in used.headers.items() if n not in own} == {
        n: v for n, v in free.headers.items() if n not in own
    }


async def test_conflicts_do_not_reveal_versions_of_other_organizations(
    planning: PlanningServer,
) -> None:
    path = await planning.mission()
    ok(await planning.patch(path, {"title": "x"}, **tag(1)))
    eve = planning.member()
    for version in (1, 2, 3):
        response = await eve.patch(path, {"title": "x"}, **tag(version))
        assert refused(response, 404, "resource.not_found") == {}


async def test_metrics_name_no_organization_no_person_and_no_key(planning: PlanningServer) -> None:
    eve = planning.member("eve-the-user", "globex-the-organization")
    await eve.post("/v1/projects", {"name": "x"}, key="a-key-to-look-for")
    text = (await planning.client.get("/metrics")).text
    assert "POST /v1/projects" in text
    assert not re.search("globex|eve-the-user|a-key-to-look-for", text)
