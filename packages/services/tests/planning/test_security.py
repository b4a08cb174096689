"""Security: cross-organization isolation of records and job dedup entries, header tampering
rejection, inference prevention by key scoping. That no route leaks a resource is generated from the
OpenAPI document, in ``packages/services/tests/test_isolation.py``."""

import re

from holdfast.core.job import job_id, job_key
from holdfast.jobs.admin import JobAdmin
from holdfast_services.planning.jobs import NOTIFY, QUEUE

from .fixtures import Office, made, ok, refused, tag, token


async def test_cross_org_isolation_of_idempotency_records(office: Office) -> None:
    """The same key at the same endpoint, in two organizations, is two keys."""
    eve = office.member()
    ours = await office.post("/v1/projects", {"name": "ours"}, key="k")
    theirs = await eve.post("/v1/projects", {"name": "theirs"}, key="k")
    assert made(ours) != made(theirs)
    replayed = await eve.post("/v1/projects", {"name": "theirs"}, key="k")
    assert replayed.content == theirs.content
    rows = await office.rows("SELECT tenant FROM idempotency_records ORDER BY tenant")
    assert [row["tenant"] for row in rows] == ["acme", "globex"]


async def test_cross_org_isolation_of_job_dedup_entries(office: Office) -> None:
    path = await office.assignment()
    about = f"{path.rpartition('/')[2]}:1"
    await office.all_jobs_done()
    desk = JobAdmin(office.holdfast.store)
    ours = job_id(job_key("acme", QUEUE, NOTIFY, about))
    assert await desk.state(ours, tenant="acme") == "done"
    assert await desk.find(ours, tenant="globex") is None
    assert ours != job_id(job_key("globex", QUEUE, NOTIFY, about))
    assert await desk.jobs(tenant="globex") == []


async def test_header_tampering_rejection(office: Office) -> None:
    """A token that was changed, two tokens, and headers that claim another organization."""
    path = await office.mission()
    signed_in = office._signed_in["Authorization"]
    head, body, signature = signed_in.removeprefix("Bearer ").split(".")
    other = token("ada", "globex")["Authorization"].removeprefix("Bearer ").split(".")
    for forged in (
        f"{head}.{other[1]}.{signature}",
        f"{head}.{body}.{other[2]}",
        f"{head}.{body}.",
    ):
        answer = await office.client.get(path, headers={"Authorization": f"Bearer {forged}"})
        refused(answer, 401, "auth.required")
    eve = token("eve", "globex")
    for name in ("X-Org", "X-Tenant", "X-Organization-ID", "X-Forwarded-User"):
        answer = await office.client.get(path, headers=eve | {name: "acme"})
        refused(answer, 404, "resource.not_found")
    both = [("Authorization", signed_in), *eve.items()]
    office.client.headers.pop("authorization", None)
    refused(await office.client.get(path, headers=both), 401, "auth.required")


async def test_a_key_sent_twice_differently_is_refused(office: Office) -> None:
    signed_in = list(office._signed_in.items())
    two = [*signed_in, ("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    answer = await office.client.post("/v1/projects", json={"name": "x"}, headers=two)
    refused(answer, 400, "idempotency.key_invalid")
    assert await office.count("planning_projects") == 0


async def test_inference_prevention_via_key_scoping(office: Office) -> None:
    """Nobody learns from an answer whether another organization has used a key."""
    eve = office.member()
    await office.post("/v1/projects", {"name": "ours"}, key="guessed")
    used = await eve.post("/v1/projects", {"name": "x"}, key="guessed")
    free = await eve.post("/v1/projects", {"name": "x"}, key="not-guessed")
    assert used.status_code == free.status_code == 201
    own = {"x-request-id", "x-correlation-id", "location"}
    assert {n: v for n, v in used.headers.items() if n not in own} == {
        n: v for n, v in free.headers.items() if n not in own
    }


async def test_versions_of_others_are_not_told_by_conflicts(office: Office) -> None:
    path = await office.mission()
    ok(await office.patch(path, {"title": "x"}, **tag(1)))
    eve = office.member()
    for version in (1, 2, 3):
        answer = await eve.patch(path, {"title": "x"}, **tag(version))
        assert refused(answer, 404, "resource.not_found") == {}


async def test_metrics_name_no_organization_no_person_and_no_key(office: Office) -> None:
    eve = office.member("eve-the-user", "globex-the-organization")
    await eve.post("/v1/projects", {"name": "x"}, key="a-key-to-look-for")
    text = (await office.client.get("/metrics")).text
    assert "POST /v1/projects" in text
    assert not re.search("globex|eve-the-user|a-key-to-look-for", text)
