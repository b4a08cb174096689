"""The audit log over HTTP: one event per execution, paged and filtered, of one organization."""

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onceward_protocol.fingerprint import body_hash
from onceward_protocol.ids import new_id
from onceward_services.planning import audit
from packages.services.tests.conftest import signed_in

from .fixtures import PlanningServer, ok, refused, tag, token

PATCH = "PATCH /v1/missions/{mission_id}"


async def events(planning: PlanningServer, **filters: str) -> list[dict[str, Any]]:
    auditor = token("ada", "acme", ["auditor"])
    response = await planning.client.get("/v1/audit", params=filters, headers=auditor)
    found: list[dict[str, Any]] = ok(response)["items"]
    return found


async def test_an_event_says_who_did_what_to_which_version_by_which_request(
    planning: PlanningServer,
) -> None:
    path = await planning.mission()
    response = await planning.patch(
        path, {"title": "Dive", "version": 1}, X_Request_ID="r-1", X_Correlation_ID="c-1"
    )
    [event] = await events(planning, endpoint=PATCH)
    assert datetime.fromisoformat(event.pop("created_at")) <= datetime.now(UTC)
    assert event.pop("id")
    assert event == {
        "actor": "ada",
        "endpoint": PATCH,
        "resource": f"mission:{response.json()['id']}",
        "version": 2,
        "status": 200,
        "payload_hash": body_hash(b'{"version":1,"title":"Dive"}', "application/json"),
        "request_id": "r-1",
        "correlation_id": "c-1",
    }
    [job] = [
        e for e in await events(planning) if e["endpoint"] == "job.enqueued planning mission.index"
    ]
    assert job["resource"].startswith("job:org:acme:planning:mission.index:")
    of_jobs = [e for e in await events(planning) if e["endpoint"].startswith("job.")]
    assert {e["version"] for e in of_jobs if e["request_id"] == "r-1"} == {2}
    assert {e["version"] for e in of_jobs if e["request_id"] != "r-1"} == {1}
    every = [e for e in await events(planning) if not e["endpoint"].startswith("job.")]
    assert [(e["endpoint"].partition(" ")[0], e["version"]) for e in every] == [
        ("PATCH", 2), ("POST", 1), ("POST", 1),
    ]  # fmt: skip


async def test_replays_and_errors_have_no_audit_event_and_a_replay_is_logged(
    planning: PlanningServer, caplog: pytest.LogCaptureFixture
) -> None:
    path = await planning.mission()
    ok(await planning.patch(path, {"title": "x"}, key="secret-key", **tag(1)))
    before = await events(planning)
    [patched] = [event for event in before if event["endpoint"] == PATCH]
    with caplog.at_level(logging.INFO, logger="onceward"):
        replay = await planning.patch(path, {"title": "x"}, key="secret-key", **tag(1))
    refused(await planning.patch(path, {"title": "x"}), 428, "concurrency.version_required")
    refused(
        await planning.patch(path, {"title": "x"}, **tag(9)), 409, "concurrency.version_mismatch"
    )
    assert await events(planning) == before
    [logged] = [record for record in caplog.records if record.message == "audit.replay"]
    assert logged.__dict__["original_audit_id"] == patched["id"]
    assert logged.__dict__["request_id"] == replay.headers["x-request-id"]
    assert "secret-key" not in str(logged.__dict__)


async def test_pages_go_from_the_newest_to_the_oldest_without_a_gap(
    planning: PlanningServer,
) -> None:
    for _ in range(7):
        await planning.project()
    whole = await events(planning, limit="200")
    assert [e["id"] for e in whole] == sorted((e["id"] for e in whole), reverse=True)
    pages = await planning.member("ada", "acme", "auditor").pages("/v1/audit", 3)
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [event for page in pages for event in page] == whole
    first = await planning.member("ada", "acme", "auditor").read("/v1/audit?limit=3")
    await planning.project()  # new events come before the first page, not into the second
    second = await planning.member("ada", "acme", "auditor").read(
        f"/v1/audit?limit=3&after={first['next']}"
    )
    assert second["items"] == pages[1]


async def test_filters_can_be_combined(planning: PlanningServer) -> None:
    bob = planning.member("bob", "acme")
    ours, theirs = await planning.mission(), await bob.mission()
    await bob.patch(ours, {"title": "x"}, **tag(1))
    await planning.patch(theirs, {"title": "x"}, **tag(1))
    mine = f"mission:{ours.rpartition('/')[2]}"
    assert {e["actor"] for e in await events(planning)} == {"ada", "bob"}
    assert {e["actor"] for e in await events(planning, actor="bob")} == {"bob"}
    assert [e["version"] for e in await events(planning, resource=mine)] == [2, 1]
    assert [e["version"] for e in await events(planning, resource=mine, actor="bob")] == [2]
    both = await events(planning, resource=mine, actor="ada", endpoint=PATCH)
    assert both == []
    for unknown in ("nobody", "bob\x00", "", "' OR 1=1 --"):
        assert await events(planning, actor=unknown) == []


async def test_from_is_inclusive_and_to_is_exclusive(planning: PlanningServer) -> None:
    for _ in range(3):
        await planning.project()
        await asyncio.sleep(0.002)  # events of one millisecond have no order
    newest, middle, oldest = await events(planning)
    assert await events(planning, **{"from": middle["created_at"]}) == [newest, middle]
    assert await events(planning, to=middle["created_at"]) == [oldest]
    between = {"from": middle["created_at"], "to": newest["created_at"]}
    assert await events(planning, **between) == [middle]
    assert await events(planning, **{"from": "2999-01-01T00:00:00Z"}) == []
    assert await events(planning, to="1969-01-01T00:00:00Z") == []
    assert len(await events(planning, **{"from": "0001-01-01T00:00:00Z"})) == 3
    assert len(await events(planning, to="9999-12-31T23:59:59Z")) == 3
    for strange in ("yesterday", "2026-01-01", "2026-01-01T00:00:00", ""):
        for name in ("from", "to"):
            response = await planning.client.get(
                "/v1/audit", params={name: strange}, headers=planning._signed_in
            )
            refused(response, 400, "request.invalid")


async def test_an_event_of_a_job_is_found_by_its_time_though_the_clocks_differ(
    planning: PlanningServer,
) -> None:
    """Ids come from the server's clock, times of jobs from the database's."""
    at = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    for seconds in (-3, 3):
        await planning.onceward.store.write(
            planning.onceward.store.table_names.render(
                "INSERT INTO onceward_audit_events (tenant, id, actor, endpoint, payload_hash,"
                " status, request_id, correlation_id, created_at)"
                " VALUES ('org:acme', :id, 'ada', 'job.enqueued planning x', '', 202, '', '', :at)"
            ),
            {"id": new_id(at + timedelta(seconds=seconds)), "at": at},
        )
    found = await events(planning, **{"from": "2026-03-01T12:00:00Z", "to": "2026-03-01T12:00:01Z"})
    assert len(found) == 2


async def test_only_ones_own_organization_is_ever_shown(planning: PlanningServer) -> None:
    eve = planning.member("eve", "globex")
    await eve.project("theirs")
    await planning.project("ours")
    [ours] = await events(planning)
    [theirs] = (await eve.read("/v1/audit"))["items"]
    assert (ours["actor"], theirs["actor"]) == ("ada", "eve")
    for asked in (f"actor={ours['actor']}", f"resource={ours['resource']}"):
        assert (await eve.read(f"/v1/audit?{asked}"))["items"] == []
    await planning.project("more")
    cursor = (await planning.read("/v1/audit?limit=1"))["next"]
    elsewhere = (await eve.read(f"/v1/audit?after={cursor}"))["items"]
    assert elsewhere in ([], [theirs])


async def test_a_user_of_another_service_named_like_the_organization_is_not_shown(
    planning: PlanningServer,
) -> None:
    route = {"start": {"lat": 1, "lon": 2}, "minutes": 5}
    asked = await planning.client.post("/api/v1/routes", json=route, headers=signed_in("acme"))
    assert asked.status_code == 202
    rows = await planning.rows("SELECT endpoint FROM onceward_audit_events WHERE tenant = 'acme'")
    assert len(rows) == 2  # the request and its job, of the user acme
    assert await events(planning) == []
    assert await events(planning, endpoint="POST /api/v1/routes") == []


async def test_every_page_uses_an_index_and_sorts_nothing(planning: PlanningServer) -> None:
    """Otherwise the ten-thousandth page would cost more than the first."""
    store = planning.onceward.store
    is_sqlite = store.name == "sqlite"
    await planning.project()
    if not is_sqlite:  # PostgreSQL scans small tables
        await store.write(
            store.table_names.render(
                "INSERT INTO onceward_audit_events SELECT 'org:acme',"
                " lpad(to_hex(n), 8, '0') || '-0000-7000-8000-000000000000', 'a' || n % 50,"
                " 'POST /v1/' || n % 50, '', 200, 'r' || n % 500, 1, '', '', now()"
                " FROM generate_series(1, 20000) AS n"
            )
        )
        await store.write(store.table_names.render("ANALYZE onceward_audit_events"))
    for given, index in (
        ({}, "audit_events_pkey"),
        ({"from": datetime(2026, 1, 1, tzinfo=UTC)}, "audit_events_pkey"),
        ({"actor": "a1"}, "idx_onceward_audit_events_actor"),
        ({"resource": "r1"}, "idx_onceward_audit_events_resource"),
        ({"endpoint": "POST /v1/1"}, "idx_onceward_audit_events_endpoint"),
        ({"endpoint": "POST /v1/1", "resource": "r1"}, "idx_onceward_audit_events_resource"),
    ):
        query = audit._query(tuple(given), store.table_names, is_sqlite=is_sqlite)
        values = given | {"tenant": "org:acme", "least": "", "before": "g", "limit": 51}
        how = "EXPLAIN QUERY PLAN " if is_sqlite else "EXPLAIN "
        rows = await store.read(how + query, values)
        plan = "\n".join(str(row.get("detail") or row.get("QUERY PLAN")) for row in rows)
        wanted = index.replace("idx_onceward_", "idx_")
        if is_sqlite:
            wanted = index.replace("audit_events_pkey", "PRIMARY KEY")
        assert wanted in plan, plan
        assert not any(word in plan for word in ("Sort", "TEMP B-TREE", "SCAN audit")), plan
        assert "Seq Scan" not in plan
