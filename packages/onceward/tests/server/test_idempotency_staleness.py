"""How old an action made offline may be, by the server's clock."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from onceward import Policy, Staleness
from onceward.ports import RecordQuery
from onceward.server.request_head import RequestHead
from packages.onceward.tests.support.harness import HeldClock, open_lab
from packages.onceward.tests.support.policies import ENVELOPE_WITH_STALENESS

UUID4 = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
OTHER = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a11"
MOST = timedelta(days=7, hours=6)
GRACE = timedelta(hours=6)
MICRO = timedelta(microseconds=1)
HEADER, FIELD = "X-Client-Generated-At", "clientGeneratedAt"


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/lab.db"


def iso(instant: datetime) -> str:
    return instant.isoformat().replace("+00:00", "Z")


MADE_AT = HeldClock().now() - timedelta(days=1)
JANUARY = datetime(2026, 1, 1, tzinfo=UTC)


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
async def test_the_age_limits_are_inclusive(database: str, age: timedelta, status: int) -> None:
    clock = HeldClock()
    made_at = clock.now() - age
    async with open_lab(database, ENVELOPE_WITH_STALENESS, clock=clock) as lab:
        response = await lab.send(UUID4, json={"clientGeneratedAt": iso(made_at)})
        assert response.status_code == status
        assert await lab.effects() == len(lab.runs) == (1 if status == 201 else 0)
        if status == 422:
            body = response.json()
            assert body["error"] == "STALE_ACTION"
            assert body["requestId"] == response.headers["x-request-id"]
            details = body["details"]
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
async def test_a_stale_action_leaves_a_record_that_is_replayed(
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
        response = await lab.send(UUID4, json=body)
        assert response.status_code == status
        if status == 400:
            assert response.json()["error"] == "BAD_REQUEST"
            assert response.json()["details"] == {"field": "clientSubmittedAt"}
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
async def test_a_missing_or_malformed_time_is_400(database: str, body: Any) -> None:
    async with open_lab(database, ENVELOPE_WITH_STALENESS, clock=HeldClock()) as lab:
        response = await lab.send(UUID4, json=body)
        assert (response.status_code, response.json()["error"]) == (400, "BAD_REQUEST")
        assert lab.runs == await lab.records() == []
        good = {"clientGeneratedAt": "2026-03-01T12:00:00Z"}
        assert (await lab.send(UUID4, json=good)).status_code == 201, "the key was used up"


async def test_without_a_key_an_action_may_be_stale_too(database: str) -> None:
    clock = HeldClock()
    policy = Policy(key_required=False, staleness=Staleness())
    async with open_lab(database, policy, clock=clock) as lab:
        old = {"clientGeneratedAt": iso(clock.now() - timedelta(days=8))}
        refused = await lab.send(None, json=old)
        assert (refused.status_code, refused.json()["code"]) == (422, "action.stale")
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


async def test_the_key_may_be_a_field_of_the_body(database: str) -> None:
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
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "BAD_REQUEST"),
        (b'{"idempotencyKey":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "BAD_REQUEST"),
        (b'{"idempotencyKey":1' + b"0" * 5000 + b"}", "BAD_REQUEST"),
    ],
)
async def test_a_malformed_key_in_the_body_is_refused(
    database: str, content: bytes, code: str
) -> None:
    async with open_lab(database, IN_BODY) as lab:
        headers = {"Content-Type": "application/json"}
        response = await lab.send(UUID4, content=content, headers=headers)
        assert (response.status_code, response.json()["error"]) == (400, code)
        assert lab.runs == []


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
async def test_a_body_too_deep_to_read_its_time_is_400(database: str, content_type: str) -> None:
    deep = b'{"clientGeneratedAt":' + b"[" * 5000 + b"]" * 5000 + b"}"
    async with open_lab(database, ENVELOPE_WITH_STALENESS, clock=HeldClock()) as lab:
        response = await lab.send(UUID4, content=deep, headers={"Content-Type": content_type})
        assert (response.status_code, response.json()["error"]) == (400, "BAD_REQUEST")
        assert len(lab.onceward.idempotency.in_flight) == 0


@pytest.mark.parametrize(
    ("policy", "headers", "body", "stored"),
    [
        # With a rule of staleness the body counts, also for a refused action.
        (ENVELOPE_WITH_STALENESS, {HEADER: iso(MADE_AT - MICRO)}, {FIELD: iso(MADE_AT)}, MADE_AT),
        (ENVELOPE_WITH_STALENESS, {}, {FIELD: "2026-01-01T01:00:00+01:00"}, JANUARY),
        (ENVELOPE_WITH_STALENESS, {}, {FIELD: "0001-01-01T00:00:00Z"}, None),
        # Otherwise the header does, then the body.
        (Policy(), {HEADER: iso(MADE_AT)}, {FIELD: iso(MADE_AT - MICRO)}, MADE_AT),
        (Policy(), {HEADER: "2026-01-01T01:00:00+01:00"}, {}, JANUARY),
        (Policy(), {}, {"more": [1], FIELD: iso(MADE_AT)}, MADE_AT),
        (Policy(), {}, {}, None),
        # There it is only informative.
        (Policy(), {HEADER: "yesterday"}, {}, None),
        (Policy(), {HEADER: "9999-12-31T23:59:59Z"}, {}, None),
        (Policy(), {}, {FIELD: 7}, None),
        (Policy(), {}, {"note": f'"{FIELD}"'}, None),
    ],
)
async def test_record_has_the_time_of_the_device(
    database: str,
    policy: Policy,
    headers: dict[str, str],
    body: dict[str, Any],
    stored: datetime | None,
) -> None:
    async with open_lab(database, policy, clock=HeldClock()) as lab:
        response = await lab.send(UUID4, json=body, headers=headers)
        assert response.status_code in (201, 422)
        (record,) = await lab.store.records(RecordQuery())
        assert record.client_generated_at == stored


def test_header_with_two_values_is_ignored() -> None:
    name, one, other = HEADER.lower().encode(), b"2026-01-01T00:00:00Z", b"2026-01-02T00:00:00Z"
    twice = RequestHead("POST", "/", b"", [(name, one), (name, one)])
    assert twice.client_generated_at == one.decode()
    for values in ((one, other), (one, other, one)):
        head = RequestHead("POST", "/", b"", [(name, value) for value in values])
        assert head.client_generated_at is None
