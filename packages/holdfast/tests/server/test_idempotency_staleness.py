"""Actions made offline, over HTTP: how old they may be, on the server's clock."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Policy, Staleness
from packages.holdfast.tests.support.harness import HeldClock, open_lab
from packages.holdfast.tests.support.policies import ENVELOPE_WITH_STALENESS

UUID4 = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
OTHER = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a11"
MOST = timedelta(days=7, hours=6)
GRACE = timedelta(hours=6)
MICRO = timedelta(microseconds=1)


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/lab.db"


def iso(instant: datetime) -> str:
    return instant.isoformat().replace("+00:00", "Z")


@pytest.mark.parametrize(
    ("age", "status"),
    [
        (timedelta(0), 201),
        (MOST - MICRO, 201),
        (MOST, 201),
        (MOST + MICRO, 422),
        (timedelta(days=400), 422),
        (-GRACE, 201),
        (-GRACE - MICRO, 422),
    ],
)
async def test_the_boundaries(database: str, age: timedelta, status: int) -> None:
    clock = HeldClock()
    made_at = clock.now() - age
    async with open_lab(database, ENVELOPE_WITH_STALENESS, clock=clock) as lab:
        answer = await lab.send(UUID4, json={"clientGeneratedAt": iso(made_at)})
        assert answer.status_code == status
        assert await lab.effects() == len(lab.runs) == (1 if status == 201 else 0)
        if status == 422:
            told = answer.json()
            assert told["error"] == "STALE_ACTION"
            assert told["requestId"] == answer.headers["x-request-id"]
            details = told["details"]
            assert datetime.fromisoformat(details["clientGeneratedAt"]) == made_at
            assert datetime.fromisoformat(details["serverNow"]) == clock.now()
            assert (details["capDays"], details["graceHours"]) == (7, 6)
            assert details["ageDays"] == age // timedelta(days=1)


async def test_a_replay_is_never_stale(database: str) -> None:
    clock = HeldClock()
    policy = ENVELOPE_WITH_STALENESS.replace(success_ttl=timedelta(days=30))
    body = {"clientGeneratedAt": iso(clock.now())}
    async with open_lab(database, policy, clock=clock, memory_bytes=0) as lab:
        first = await lab.send(UUID4, json=body)
        clock.pass_by(days=8)
        again = await lab.send(UUID4, json=body)
        assert (again.status_code, again.content) == (201, first.content)
        assert (await lab.send(OTHER, json=body)).status_code == 422


@pytest.mark.parametrize("memory_bytes", [0, 1024 * 1024])
async def test_a_stale_attempt_leaves_a_record_and_its_replay_is_the_same(
    database: str, memory_bytes: int
) -> None:
    clock = HeldClock()
    body = {"clientGeneratedAt": iso(clock.now() - timedelta(days=8))}
    async with open_lab(
        database, ENVELOPE_WITH_STALENESS, clock=clock, memory_bytes=memory_bytes
    ) as lab:
        first = await lab.send(UUID4, json=body, headers={"X-Request-ID": "r-1"})
        assert [r["response_status"] for r in await lab.records()] == [422]
        assert await lab.audits() == []
        clock.pass_by(hours=1)
        again = await lab.send(UUID4, json={**body, "clientSubmittedAt": iso(clock.now())})
        assert (again.status_code, again.content) == (422, first.content)
        assert again.headers["content-type"] == first.headers["content-type"]
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["x-original-request-id"] == "r-1"
        assert lab.runs == []
        conflict = await lab.send(UUID4, json={"clientGeneratedAt": iso(clock.now())})
        assert conflict.json()["error"] == "IDEMPOTENCY_CONFLICT"


@pytest.mark.parametrize(
    ("early", "status"), [(GRACE, 201), (GRACE + MICRO, 400), (timedelta(days=-3), 201)]
)
async def test_an_action_cannot_be_sent_before_it_was_made(
    database: str, early: timedelta, status: int
) -> None:
    clock = HeldClock()
    body = {
        "clientGeneratedAt": iso(clock.now()),
        "clientSubmittedAt": iso(clock.now() - early),
    }
    async with open_lab(database, ENVELOPE_WITH_STALENESS, clock=clock) as lab:
        answer = await lab.send(UUID4, json=body)
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"] == "BAD_REQUEST"
            assert answer.json()["details"] == {"field": "clientSubmittedAt"}
            assert lab.runs == await lab.records() == []
            del body["clientSubmittedAt"]
            assert (await lab.send(UUID4, json=body)).status_code == 201


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        "text",
        {"clientGeneratedAt": None},
        {"clientGeneratedAt": 1700000000},
        {"clientGeneratedAt": "2026-03-01T12:00:00"},
        {"clientGeneratedAt": "yesterday"},
        {"clientGeneratedAt": "2026-02-30T12:00:00Z"},
        {"clientGeneratedAt": "2026-03-01T12:00:00Z", "clientSubmittedAt": "2026-03-01T12:00"},
        {"clientGeneratedAt": "2026-03-01T12:00:00Z", "clientSubmittedAt": 5},
    ],
)
async def test_a_time_that_is_missing_or_none_is_400(database: str, body: Any) -> None:
    async with open_lab(database, ENVELOPE_WITH_STALENESS, clock=HeldClock()) as lab:
        answer = await lab.send(UUID4, json=body)
        assert (answer.status_code, answer.json()["error"]) == (400, "BAD_REQUEST")
        assert lab.runs == await lab.records() == []
        good = {"clientGeneratedAt": "2026-03-01T12:00:00Z"}
        assert (await lab.send(UUID4, json=good)).status_code == 201, "the key was burnt"


async def test_without_a_key_an_action_may_be_stale_too(database: str) -> None:
    clock = HeldClock()
    policy = Policy(key_required=False, staleness=Staleness())
    async with open_lab(database, policy, clock=clock) as lab:
        old = {"clientGeneratedAt": iso(clock.now() - timedelta(days=8))}
        told = await lab.send(None, json=old)
        assert (told.status_code, told.json()["code"]) == (422, "action.stale")
        assert (await lab.send(None, json={})).status_code == 400
        assert lab.runs == []
        fresh = await lab.send(None, json={"clientGeneratedAt": iso(clock.now())})
        assert fresh.status_code == 201


# -- the key in the body --------------------------------------------------------------------


IN_BODY = Policy(
    key_field="idempotencyKey",
    key_format=ENVELOPE_WITH_STALENESS.key_format,
    error_format=ENVELOPE_WITH_STALENESS.error_format,
)


async def test_the_key_may_stand_in_the_body(database: str) -> None:
    async with open_lab(database, IN_BODY) as lab:
        body = {"day": "2026-03-01", "idempotencyKey": UUID4}
        first = await lab.send(None, json=body)
        again = await lab.send(UUID4, json=dict(reversed(body.items())))
        assert first.status_code == 201
        assert again.content == first.content
        two_keys = await lab.send(OTHER, json=body)
        assert two_keys.json()["error"] == "IDEMPOTENCY_KEY_INVALID", "two keys in one request"
        assert again.headers["idempotency-replayed"] == "true"
        conflict = await lab.send(None, json={**body, "day": "2026-03-02"})
        assert conflict.json()["error"] == "IDEMPOTENCY_CONFLICT"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{}", "IDEMPOTENCY_KEY_REQUIRED"),
        (b'{"idempotencyKey":null}', "IDEMPOTENCY_KEY_REQUIRED"),
        (b'{"idempotencyKey":""}', "IDEMPOTENCY_KEY_INVALID"),
        (b'{"idempotencyKey":5}', "IDEMPOTENCY_KEY_INVALID"),
        (b'{"idempotencyKey":["a"]}', "IDEMPOTENCY_KEY_INVALID"),
        (b'{"idempotencyKey":"%s"}' % UUID4.upper().encode(), "IDEMPOTENCY_KEY_INVALID"),
        (b'{"idempotencyKey":"\\ud800"}', "BAD_REQUEST"),
        (b"", "BAD_REQUEST"),
        (b"[]", "BAD_REQUEST"),
        (b'{"idempotencyKey":', "BAD_REQUEST"),
        (b"\xff", "BAD_REQUEST"),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", "BAD_REQUEST"),
        (b'{"idempotencyKey":' + b"[" * 5000 + b"]" * 5000 + b"}", "BAD_REQUEST"),
        (b'{"idempotencyKey":1' + b"0" * 5000 + b"}", "BAD_REQUEST"),
    ],
)
async def test_a_key_in_the_body_that_is_none(database: str, content: bytes, code: str) -> None:
    async with open_lab(database, IN_BODY) as lab:
        headers = {"Content-Type": "application/json"}
        answer = await lab.send(UUID4, content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (400, code)
        assert lab.runs == []


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
async def test_a_body_too_deep_to_read_its_time_is_400(database: str, content_type: str) -> None:
    deep = b'{"clientGeneratedAt":' + b"[" * 5000 + b"]" * 5000 + b"}"
    async with open_lab(database, ENVELOPE_WITH_STALENESS, clock=HeldClock()) as lab:
        answer = await lab.send(UUID4, content=deep, headers={"Content-Type": content_type})
        assert (answer.status_code, answer.json()["error"]) == (400, "BAD_REQUEST")
        assert len(lab.holdfast.idempotency.in_flight) == 0
