"""What ASGI fronts check before the sign-in, and what is refused at start-up."""

from pathlib import Path

import pytest

from onceward import SINGLE_TENANT, GuardConfig, Onceward, Policy
from onceward.errors import ConfigurationError
from onceward.guard.rate_limits import LimitsRateLimiter
from onceward_testing.guard_harness import LimiterOf
from packages.onceward.tests.support.harness import Connection, open_lab


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/lab.db"


async def test_size_sign_in_and_rate_limit_are_checked_before_the_body(database: str) -> None:
    limiter = LimiterOf(0)
    policy = Policy(max_body_bytes=100, rate_limit="5/minute")
    async with open_lab(database, policy, limiter=limiter) as lab:

        async def refused(key: str | None, tenant: str, content: bytes) -> tuple[int, str]:
            headers = {"X-Tenant": tenant, "Content-Type": "application/json"}
            response = await lab.send(key, content=content, headers=headers)
            return response.status_code, response.json()["code"]

        huge, bad = b"[" + b" " * 100, b'{"a":1,"a":2}'
        assert await refused("no key", "not-signed-in", huge) == (413, "request.too_large")
        assert await refused("no key", "not-signed-in", bad) == (401, "auth.required")
        assert limiter.calls == []
        assert await refused("no key", "ada", bad) == (429, "rate.limited")
        limiter.left = 99
        assert await refused("no key", "ada", bad) == (400, "idempotency.key_invalid")
        assert await refused(None, "ada", bad) == (400, "idempotency.key_required")
        assert await refused("key-1", "ada", bad) == (400, "request.invalid")
        assert (lab.runs, lab.store.calls) == ([], {})


async def test_key_with_parameters_and_the_bare_key_are_one_key(database: str) -> None:
    async with open_lab(database) as lab:
        connection = Connection()
        connection.scope["headers"] = [
            (b"idempotency-key", value) for value in (b'"key-1";a=1', b"key-1")
        ]
        connection.feed(b"")
        await connection.run(lab.app)
        assert connection.status == 201


@pytest.mark.parametrize(
    ("limit", "limiter", "line"),
    [("5/minute", None, "limiter"), ("often", LimitsRateLimiter(), "often")],
)
async def test_rate_limit_that_cannot_be_counted_is_refused_at_start_up(
    database: str, limit: str, limiter: LimitsRateLimiter | None, line: str
) -> None:
    onceward = Onceward(database, tenants=SINGLE_TENANT, config=GuardConfig(limiter=limiter))
    onceward.guard_path("POST", "/orders", policy=Policy(rate_limit=limit))
    with pytest.raises(ConfigurationError, match=line):
        await onceward.open()
