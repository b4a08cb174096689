"""The responses to guarded requests, on both databases."""

import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from onceward import Policy
from onceward.core.idempotency_record import RecordId
from onceward_protocol.keys import KeyFormat
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.harness import HeldClock, fresh_database, open_lab
from packages.onceward.tests.support.policies import (
    ENVELOPE_WITH_STALENESS,
    OPTIONAL_KEY,
    STORES_HANDLER_ERRORS,
    UUID4_FOR_A_WEEK,
)

UUID4 = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"


@pytest.fixture(scope="module")
def module_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("lab")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return await fresh_database(request, tmp_path, request.param)


def everything_in(record: logging.LogRecord) -> str:
    return f"{record.getMessage()} {record.__dict__!r}"


# -- first time, replay -----------------------------------------------------------------------


async def test_the_first_time_business_rows_record_and_audit_event_are_written(
    database: str,
) -> None:
    async with open_lab(database) as lab:
        response = await lab.send(headers={"X-Request-ID": "r-1", "X-Correlation-ID": "chain"})
        assert response.status_code == 201
        assert response.headers["x-request-id"] == "r-1"
        assert response.headers["x-correlation-id"] == "chain"
        assert "idempotency-replayed" not in response.headers
        assert "x-original-request-id" not in response.headers
        assert await lab.effects() == 1
        [audit] = await lab.audits()
        [record] = await lab.records()
        assert record["audit_id"] == audit["id"]
        assert (record["tenant"], record["endpoint"]) == ("ada", "POST /things")
        assert (record["idempotency_key"], record["response_status"]) == ("key-1", 201)
        assert (audit["tenant"], audit["actor"]) == ("ada", "ada's phone")
        assert (audit["request_id"], audit["correlation_id"]) == ("r-1", "chain")
        assert (audit["endpoint"], audit["status"]) == ("POST /things", 201)
        assert len(lab.background) == 1


@pytest.mark.parametrize("memory_bytes", [0, 1024 * 1024], ids=["from the store", "from memory"])
async def test_a_replay_repeats_the_response_and_has_its_own_request_id(
    database: str, memory_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_lab(database, memory_bytes=memory_bytes) as lab:
        first = await lab.send(headers={"X-Request-ID": "r-1"})
        with caplog.at_level(logging.DEBUG):
            again = await lab.send(headers={"X-Request-ID": "r-2", "X-Correlation-ID": "chain"})
        assert (again.status_code, again.content) == (201, first.content)
        for name in ("content-type", "etag", "location", "content-length"):
            assert again.headers[name] == first.headers[name]
        assert "x-not-stored" in first.headers
        assert "x-not-stored" not in again.headers
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["x-request-id"] == "r-2"
        assert again.headers["x-original-request-id"] == "r-1"
        assert again.headers["x-correlation-id"] == "chain"
        assert len(lab.runs) == await lab.effects() == len(lab.background) == 1

        [audit] = await lab.audits()
        [event] = [r for r in caplog.records if r.getMessage() == "audit.replay"]
        facts: dict[str, Any] = event.__dict__
        assert facts["original_audit_id"] == audit["id"]
        assert (facts["original_request_id"], facts["request_id"]) == ("r-1", "r-2")
        assert (facts["original_correlation_id"], facts["correlation_id"]) == ("r-1", "chain")
        assert (facts["tenant"], facts["endpoint"]) == ("ada", "POST /things")
        assert not [r for r in caplog.records if "key-1" in everything_in(r)]


async def test_another_process_replays_too(database: str) -> None:
    async with open_lab(database) as one, open_lab(database) as other:
        first = await one.send()
        again = await other.send()
        assert again.content == first.content
        assert again.headers["idempotency-replayed"] == "true"
        assert other.runs == []


async def test_no_log_record_contains_a_key(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_lab(database, Policy(key_format=KeyFormat.OPAQUE)) as lab:
        with caplog.at_level(logging.DEBUG):
            for do in ("raise", "stream", "422", ""):
                await lab.send("the-secret-key", do=do)
            await lab.send("the-secret-key", json={"item": "other"})
            await lab.send("the-secret-key " * 3)
        logged = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
        assert [r.getMessage() for r in logged if "the-secret-key" in everything_in(r)] == []


@pytest.mark.parametrize("do", ["204", "200", "303", "201 size=40000"])
async def test_every_kind_of_success_is_replayed(database: str, do: str) -> None:
    async with open_lab(database, Policy(redirects_stored={303}), memory_bytes=0) as lab:
        first, again = await lab.send(do=do), await lab.send(do=do)
        assert first.status_code == again.status_code < 400
        assert again.content == first.content
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["etag"] == '"7"'
        assert again.headers.get("content-length") == first.headers.get("content-length")
        if do == "204":
            assert "content-length" not in again.headers
        assert len(lab.runs) == 1


# -- mismatch -------------------------------------------------------------------------------


@pytest.mark.parametrize(("ietf", "status"), [(False, 409), (True, 422)])
async def test_another_payload_is_a_conflict_and_writes_nothing(
    database: str, ietf: bool, status: int
) -> None:
    async with open_lab(database, Policy(ietf_statuses=ietf), memory_bytes=0) as lab:
        first = await lab.send()
        conflict = await lab.send(json={"item": "hat"})
        assert conflict.status_code == status
        assert conflict.headers["content-type"] == "application/problem+json"
        problem = conflict.json()
        assert problem["status"] == status
        assert problem["code"] == "idempotency.payload_mismatch"
        hashes = problem["details"]
        assert set(hashes) == {"expectedHash", "receivedHash"}
        assert hashes["expectedHash"] != hashes["receivedHash"]
        assert {len(value) for value in hashes.values()} == {64}
        assert "idempotency-replayed" not in conflict.headers
        assert len(lab.runs) == await lab.effects() == len(await lab.audits()) == 1
        assert len(await lab.records()) == 1
        assert (await lab.send()).content == first.content


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"path": "/shelves/a"}, {"path": "/shelves/b"}),
        ({"path": "/things?on=monday"}, {"path": "/things?on=friday"}),
        ({"path": "/things"}, {"path": "/things?on=friday"}),
        ({"json": {"n": 1}}, {"json": {"n": 2}}),
        ({"json": {"a": {"b": 1}}}, {"json": {"a": {"b": 2}}}),
        ({"content": b"x"}, {"content": b"y"}),
        ({"content": b""}, {"content": b" "}),
        ({"content": b"x"}, {"content": b"x", "headers": {"Content-Type": "text/plain"}}),
    ],
)
async def test_the_same_key_for_anything_else_is_a_conflict(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        assert (await lab.send(**first)).status_code == 201
        conflict = await lab.send(**second)
        assert conflict.status_code == 409
        details = conflict.json()["details"]
        assert details["expectedHash"] != details["receivedHash"]
        assert len(lab.runs) == 1
        assert (await lab.send(**first)).headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"content": b'{"a":1,"b":2}'}, {"content": b' { "b" : 2.0, "a" : 1 } '}),
        (
            {
                "json": {
                    "a": 1,
                    "clientSubmittedAt": "2026-03-01T12:00:00Z",
                    "attestationToken": "x",
                }
            },
            {"json": {"a": 1, "clientSubmittedAt": "2026-03-01T12:05Z"}},
        ),
        ({"path": "/things?a=1&b=2"}, {"path": "/things?b=2&a=%31"}),
    ],
)
async def test_the_same_request_formatted_differently_is_a_replay(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    as_json = {"Content-Type": "application/json"}
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        one = await lab.send(**first, headers=as_json)
        again = await lab.send(**second, headers=as_json)
        assert again.content == one.content
        assert again.headers["idempotency-replayed"] == "true"


async def test_a_key_belongs_to_one_endpoint_and_method(database: str) -> None:
    async with open_lab(database) as lab:
        responses = [
            await lab.send(),
            await lab.send(path="/others"),
            await lab.send(method="PUT"),
            await lab.send(method="DELETE"),
        ]
        assert [a.status_code for a in responses] == [201] * 4
        assert len({a.content for a in responses}) == 4
        assert await lab.effects() == 4


async def test_another_tenants_key_is_treated_as_unknown(database: str) -> None:
    async with open_lab(database) as lab:
        mine = await lab.send("shared")
        theirs = await lab.send("shared", headers={"X-Tenant": "eve", "X-Request-ID": "r"})
        fresh = await lab.send("fresh", headers={"X-Tenant": "eve", "X-Request-ID": "r"})
        assert theirs.status_code == fresh.status_code == 201
        assert sorted(theirs.headers) == sorted(fresh.headers)
        assert len({mine.content, theirs.content, fresh.content}) == 3
        other = await lab.send("shared", headers={"X-Tenant": "bob"}, json={"item": "hat"})
        assert other.status_code == 201, "a conflict would reveal that the key is in use"


# -- expiry ---------------------------------------------------------------------------------


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("memory_bytes", [0, 1024 * 1024])
async def test_expired_record_is_treated_as_absent(
    database: str, swept: bool, memory_bytes: int
) -> None:
    clock = HeldClock()
    policy = Policy(success_ttl=timedelta(hours=1))
    async with open_lab(database, policy, clock=clock, memory_bytes=memory_bytes) as lab:
        first = await lab.send()
        clock.pass_by(hours=1, microseconds=-1)
        assert (await lab.send()).content == first.content
        clock.pass_by(microseconds=1)
        if swept:
            assert await lab.onceward.sweep() == 1
            assert await lab.records() == []
        second = await lab.send(json={"item": "hat"})
        assert second.status_code == 201
        assert second.content != first.content
        again = await lab.send(json={"item": "hat"})
        assert again.content == second.content
        assert await lab.effects() == len(await lab.audits()) == 2
        assert len(await lab.records()) == 1


async def test_stored_errors_expire_after_error_ttl(tmp_path: Path) -> None:
    clock = HeldClock()
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", STORES_HANDLER_ERRORS, clock=clock) as lab:
        refused = await lab.send(do="422")
        clock.pass_by(hours=4, microseconds=-1)
        assert (await lab.send()).content == refused.content
        clock.pass_by(microseconds=1)
        assert (await lab.send()).status_code == 201
        clock.pass_by(hours=24, microseconds=-1)
        assert (await lab.send()).headers["idempotency-replayed"] == "true"


# -- errors of the handler ------------------------------------------------------------------


@pytest.mark.parametrize("do", ["raise", "500", "503", "599", "stream"])
async def test_a_handler_that_fails_leaves_nothing_and_its_key_may_be_retried(
    database: str, do: str
) -> None:
    async with open_lab(database) as lab:
        failed = await lab.send(do=do)
        assert failed.status_code >= 500
        assert await lab.effects() == 0
        assert await lab.records() == await lab.audits() == []
        again = await lab.send()
        assert again.status_code == 201
        assert "idempotency-replayed" not in again.headers
        assert await lab.effects() == len(await lab.audits()) == 1


@pytest.mark.parametrize(
    ("preset", "stored"),
    [
        (STORES_HANDLER_ERRORS, True),
        (UUID4_FOR_A_WEEK, True),
        (OPTIONAL_KEY, False),
        (ENVELOPE_WITH_STALENESS, False),
    ],
)
async def test_errors_stored_decides_whether_a_409_is_replayed(
    tmp_path: Path, preset: Policy, stored: bool
) -> None:
    clock = HeldClock()
    body = {"item": "boots", "clientGeneratedAt": clock.now().isoformat()}
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", preset, clock=clock) as lab:
        refused = await lab.send(UUID4, do="409", json=body)
        assert refused.status_code == 409
        assert [r["response_status"] for r in await lab.records()] == ([409] if stored else [])
        again = await lab.send(UUID4, json=body)
        assert again.status_code == (409 if stored else 201)
        assert (again.content == refused.content) == stored
        assert ("idempotency-replayed" in again.headers) == stored
        assert len(lab.runs) == (1 if stored else 2)


@pytest.mark.parametrize("status", [400, 404, 409, 410, 418, 422, 499])
async def test_a_4xx_of_the_handler_is_stored_without_its_writes(
    tmp_path: Path, status: int
) -> None:
    async with open_lab(
        f"sqlite:///{tmp_path}/lab.db", STORES_HANDLER_ERRORS, memory_bytes=0
    ) as lab:
        refused, again = await lab.send(do=str(status)), await lab.send()
        assert again.status_code == refused.status_code == status
        assert again.content == refused.content
        assert again.headers["idempotency-replayed"] == "true"
        assert await lab.effects() == 0
        assert await lab.audits() == []


@pytest.mark.parametrize("status", [401, 403, 408, 424, 425, 428, 429])
@pytest.mark.parametrize("keep", ["", "keep"])
async def test_statuses_about_the_caller_or_the_time_are_never_stored(
    tmp_path: Path, status: int, keep: str
) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", STORES_HANDLER_ERRORS) as lab:
        assert (await lab.send(do=f"{status} {keep}")).status_code == status
        assert await lab.records() == []
        again = await lab.send()
        assert (again.status_code, len(lab.runs)) == (201, 2)


@pytest.mark.parametrize("status", [404, 500])
async def test_keep_writes_on_error_commits_a_4xx_but_never_a_5xx(
    database: str, status: int
) -> None:
    async with open_lab(database, memory_bytes=0) as lab:
        refused = await lab.send(do=f"keep {status}")
        assert refused.status_code == status
        kept = 1 if status < 500 else 0
        assert await lab.effects() == kept
        assert await lab.audits() == []
        assert [r["response_status"] for r in await lab.records()] == [404] * kept
        again = await lab.send(do="201")
        assert again.status_code == (404 if kept else 201)
        assert await lab.effects() == 1


async def test_without_a_key_every_request_is_executed_and_audited(database: str) -> None:
    async with open_lab(database, OPTIONAL_KEY) as lab:
        responses = [await lab.send(None), await lab.send(None)]
        assert [a.status_code for a in responses] == [201, 201]
        assert await lab.effects() == len(await lab.audits()) == 2
        assert await lab.records() == []
        assert (await lab.send(None, do="raise")).status_code == 500
        assert (await lab.send(None, do="404")).status_code == 404
        assert await lab.effects() == 2


async def test_a_record_keeps_the_ids_of_its_request(database: str) -> None:
    async with open_lab(database) as lab:
        await lab.send(headers={"X-Request-ID": "r-1", "X-Correlation-ID": "chain"})
        record_id = RecordId("ada", "POST /things", "key-1")
        record = await lab.store.inner.find(record_id, lab.onceward.clock.now())
        assert (record.request_id, record.correlation_id) == ("r-1", "chain")
