"""The audit log over HTTP: one event per execution, paged by cursor, filtered, one's own only."""

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.core.fingerprint import body_hash
from holdfast.ids import new_id
from holdfast_services.planning import audit
from packages.services.tests.conftest import signed_in

from .fixtures import Office, ok, refused, tag

PATCH = "PATCH /v1/missions/{mission_id}"


async def events(office: Office, **filters: str) -> list[dict[str, Any]]:
    answer = await office.client.get("/v1/audit", params=filters, headers=office._signed_in)
    found: list[dict[str, Any]] = ok(answer)["items"]
    return found


async def test_an_event_says_who_did_what_to_which_version_by_which_request(
    office: Office,
) -> None:
    path = await office.mission()
    answer = await office.patch(
        path, {"title": "Dive", "version": 1}, X_Request_ID="r-1", X_Correlation_ID="c-1"
    )
    [event] = await events(office, endpoint=PATCH)
    assert datetime.fromisoformat(event.pop("created_at")) <= datetime.now(UTC)
    assert event.pop("id")
    assert event == {
        "actor": "ada",
        "endpoint": PATCH,
        "resource": f"mission:{answer.json()['id']}",
        "version": 2,
        "status": 200,
        "payload_hash": body_hash(b'{"version":1,"title":"Dive"}', "application/json"),
        "request_id": "r-1",
        "correlation_id": "c-1",
    }
    [job] = [
        e for e in await events(office) if e["endpoint"] == "job.enqueued planning mission.index"
    ]
    assert job["resource"].startswith("job:acme:planning:mission.index:")
    every = [e for e in await events(office) if not e["endpoint"].startswith("job.")]
    assert [(e["endpoint"].partition(" ")[0], e["version"]) for e in every] == [
        ("PATCH", 2), ("POST", 1), ("POST", 1),
    ]  # fmt: skip


async def test_replays_and_refusals_have_no_event_and_a_replay_is_logged(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    path = await office.mission()
    ok(await office.patch(path, {"title": "x"}, key="secret-key", **tag(1)))
    before = await events(office)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        replay = await office.patch(path, {"title": "x"}, key="secret-key", **tag(1))
    refused(await office.patch(path, {"title": "x"}), 428, "concurrency.version_required")
    refused(await office.patch(path, {"title": "x"}, **tag(9)), 409, "concurrency.version_mismatch")
    assert await events(office) == before
    [logged] = [record for record in caplog.records if record.message == "audit.replay"]
    assert logged.__dict__["original_audit_id"] == before[0]["id"]
    assert logged.__dict__["request_id"] == replay.headers["x-request-id"]
    assert "secret-key" not in str(logged.__dict__)


async def test_pages_go_from_the_newest_to_the_oldest_without_a_gap(office: Office) -> None:
    for _ in range(7):
        await office.project()
    whole = await events(office, limit="200")
    assert [e["id"] for e in whole] == sorted((e["id"] for e in whole), reverse=True)
    pages = await office.pages("/v1/audit", 3)
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [event for page in pages for event in page] == whole
    first = await office.read("/v1/audit?limit=3")
    await office.project()  # what is new comes before the first page, not into the second
    second = await office.read(f"/v1/audit?limit=3&after={first['next']}")
    assert second["items"] == pages[1]


async def test_filters_can_be_combined(office: Office) -> None:
    bob = office.member("bob", "acme")
    ours, theirs = await office.mission(), await bob.mission()
    await bob.patch(ours, {"title": "x"}, **tag(1))
    await office.patch(theirs, {"title": "x"}, **tag(1))
    mine = f"mission:{ours.rpartition('/')[2]}"
    assert {e["actor"] for e in await events(office)} == {"ada", "bob"}
    assert {e["actor"] for e in await events(office, actor="bob")} == {"bob"}
    assert [e["version"] for e in await events(office, resource=mine)] == [2, 1]
    assert [e["version"] for e in await events(office, resource=mine, actor="bob")] == [2]
    both = await events(office, resource=mine, actor="ada", endpoint=PATCH)
    assert both == []
    for nobody in ("nobody", "bob\x00", "", "' OR 1=1 --"):
        assert await events(office, actor=nobody) == []


async def test_times_bound_what_is_shown_from_inclusive_to_exclusive(office: Office) -> None:
    for _ in range(3):
        await office.project()
    newest, middle, oldest = await events(office)
    assert await events(office, **{"from": middle["created_at"]}) == [newest, middle]
    assert await events(office, to=middle["created_at"]) == [oldest]
    between = {"from": middle["created_at"], "to": newest["created_at"]}
    assert await events(office, **between) == [middle]
    assert await events(office, **{"from": "2999-01-01T00:00:00Z"}) == []
    assert await events(office, to="1969-01-01T00:00:00Z") == []
    assert len(await events(office, **{"from": "0001-01-01T00:00:00Z"})) == 3
    assert len(await events(office, to="9999-12-31T23:59:59Z")) == 3
    for strange in ("yesterday", "2026-01-01", "2026-01-01T00:00:00", ""):
        for name in ("from", "to"):
            answer = await office.client.get(
                "/v1/audit", params={name: strange}, headers=office._signed_in
            )
            refused(answer, 400, "request.invalid")


async def test_an_event_of_a_job_is_found_by_its_time_though_the_clocks_differ(
    office: Office,
) -> None:
    """Ids are made by the server's clock, times of jobs by the database's."""
    at = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    for seconds in (-3, 3):
        await office.holdfast.store.write(
            "INSERT INTO audit_events (tenant, id, actor, endpoint, payload_hash, status,"
            " request_id, correlation_id, created_at)"
            " VALUES ('acme', :id, 'ada', 'job.enqueued planning x', '', 202, '', '', :at)",
            {"id": new_id(at + timedelta(seconds=seconds)), "at": at},
        )
    found = await events(office, **{"from": "2026-03-01T12:00:00Z", "to": "2026-03-01T12:00:01Z"})
    assert len(found) == 2


async def test_only_ones_own_organization_is_ever_shown(office: Office) -> None:
    eve = office.member("eve", "globex")
    await eve.project("theirs")
    await office.project("ours")
    [ours] = await events(office)
    [theirs] = (await eve.read("/v1/audit"))["items"]
    assert (ours["actor"], theirs["actor"]) == ("ada", "eve")
    for asked in (f"actor={ours['actor']}", f"resource={ours['resource']}"):
        assert (await eve.read(f"/v1/audit?{asked}"))["items"] == []
    await office.project("more")
    cursor = (await office.read("/v1/audit?limit=1"))["next"]
    elsewhere = (await eve.read(f"/v1/audit?after={cursor}"))["items"]
    assert elsewhere in ([], [theirs])


async def test_a_user_of_another_service_named_like_the_organization_is_not_shown(
    office: Office,
) -> None:
    route = {"start": {"lat": 1, "lon": 2}, "minutes": 5}
    asked = await office.client.post("/api/v1/routes", json=route, headers=signed_in("acme"))
    assert asked.status_code == 202
    rows = await office.rows("SELECT endpoint FROM audit_events WHERE tenant = 'acme'")
    assert len(rows) == 2  # the request and its job, of the user acme
    assert await events(office) == []
    assert await events(office, endpoint="POST /api/v1/routes") == []


async def test_every_page_walks_an_index_and_sorts_nothing(office: Office) -> None:
    """Else the ten-thousandth page would cost more than the first."""
    store = office.holdfast.store
    is_sqlite = store.name == "sqlite"
    await office.project()
    if not is_sqlite:  # a table of a few rows is read as a whole, whatever the indexes
        await store.write(
            "INSERT INTO audit_events SELECT 'acme',"
            " lpad(to_hex(n), 8, '0') || '-0000-7000-8000-000000000000', 'a' || n % 50,"
            " 'POST /v1/' || n % 50, '', 200, 'r' || n % 500, 1, '', '', now()"
            " FROM generate_series(1, 20000) AS n"
        )
        await store.write("ANALYZE audit_events")
    for given, index in (
        ({}, "audit_events_pkey"),
        ({"from": datetime(2026, 1, 1, tzinfo=UTC)}, "audit_events_pkey"),
        ({"actor": "a1"}, "idx_audit_events_actor"),
        ({"resource": "r1"}, "idx_audit_events_resource"),
        ({"endpoint": "POST /v1/1"}, "idx_audit_events_endpoint"),
        ({"endpoint": "POST /v1/1", "resource": "r1"}, "idx_audit_events_resource"),
    ):
        query = audit._query(tuple(given), is_sqlite=is_sqlite)
        values = given | {"tenant": "acme", "least": "", "before": "g", "limit": 51}
        how = "EXPLAIN QUERY PLAN " if is_sqlite else "EXPLAIN "
        rows = await store.read(how + query, values)
        plan = "\n".join(str(row.get("detail") or row.get("QUERY PLAN")) for row in rows)
        wanted = index.replace("audit_events_pkey", "PRIMARY KEY") if is_sqlite else index
        assert wanted in plan, plan
        assert not any(word in plan for word in ("Sort", "TEMP B-TREE", "SCAN audit")), plan
        assert "Seq Scan" not in plan
