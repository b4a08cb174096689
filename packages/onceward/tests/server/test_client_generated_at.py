"""The time of the device that a record has."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from onceward import Policy
from onceward.guard.request import RequestHead
from onceward.ports import RecordQuery
from packages.onceward.tests.support.harness import HeldClock, open_lab
from packages.onceward.tests.support.policies import ENVELOPE_WITH_STALENESS

UUID4 = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
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
