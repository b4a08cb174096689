"""The order of checks, and bodies of every kind."""

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from onceward import SINGLE_TENANT, Onceward, Policy
from onceward.errors import ConfigurationError
from onceward.server.rate_limits import LimitsRateLimiter
from packages.onceward.tests.support.harness import Connection, HeldClock, open_lab
from packages.onceward.tests.support.policies import ENVELOPE_WITH_STALENESS

UUID4 = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
MULTIPART = "multipart/form-data; boundary=b"
OTHER = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a11"


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/lab.db"


class CountingLimiter:
    """A limiter that allows ``left`` requests and counts the calls."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.calls: Counter[tuple[str, str, str]] = Counter()

    def check(self, limit: str) -> None:
        assert limit == "5/minute"

    async def seconds_to_wait(self, limit: str, tenant: str, endpoint: str) -> float | None:
        self.calls[limit, tenant, endpoint] += 1
        self.left -= 1
        return None if self.left >= 0 else 7.2


async def test_checks_run_in_the_documented_order(database: str) -> None:
    clock = HeldClock()
    limiter = CountingLimiter(left=1)
    policy = ENVELOPE_WITH_STALENESS.replace(max_body_bytes=100, rate_limit="5/minute")
    old = (clock.now() - timedelta(days=30)).isoformat()
    options: dict[str, Any] = {"clock": clock, "limiter": limiter, "memory_bytes": 0}
    async with open_lab(database, policy, **options) as lab:
        stored = await lab.send(UUID4, json={"clientGeneratedAt": clock.now().isoformat()})
        assert stored.status_code == 201
        calls = lab.store.calls.total()

        async def refused(key: str, tenant: str, content: bytes) -> tuple[int, str]:
            headers = {"X-Tenant": tenant, "Content-Type": "application/json"}
            response = await lab.send(key, content=content, headers=headers)
            return response.status_code, response.json()["error"]

        huge, bad = b"[" + b" " * 100, b'{"a":1,"a":2}'
        assert await refused("no key", "not-signed-in", huge) == (413, "BODY_TOO_LARGE")
        assert await refused("no key", "not-signed-in", bad) == (401, "UNAUTHENTICATED")
        assert limiter.calls.total() == 1, "unauthenticated requests are not counted"
        assert await refused("no key", "ada", bad) == (429, "RATE_LIMITED")
        limiter.left = 99
        assert await refused("no key", "ada", bad) == (400, "IDEMPOTENCY_KEY_INVALID")
        assert await refused(UUID4, "ada", bad) == (400, "BAD_REQUEST")
        assert lab.store.calls.total() == calls, "none of these may reach the store"
        stale = b'{"clientGeneratedAt":"%s"}' % old.encode()
        assert await refused(UUID4, "ada", stale) == (409, "IDEMPOTENCY_CONFLICT")
        assert await refused(OTHER, "ada", stale) == (422, "STALE_ACTION")
        assert len(lab.runs) == 1


async def test_a_missing_key_is_reported_before_a_malformed_body(database: str) -> None:
    async with open_lab(database) as lab:
        response = await lab.send(None, content=b"{", headers={"Content-Type": "application/json"})
        assert (response.status_code, response.json()["code"]) == (400, "idempotency.key_required")


async def test_a_replay_is_counted_by_the_rate_limit(database: str) -> None:
    limiter = CountingLimiter(left=2)
    async with open_lab(database, Policy(rate_limit="5/minute"), limiter=limiter) as lab:
        assert [(await lab.send()).status_code for _ in range(3)] == [201, 201, 429]
        assert limiter.calls == {("5/minute", "ada", "POST /things"): 3}
        refused = await lab.send()
        assert (refused.headers["retry-after"], refused.json()["code"]) == ("8", "rate.limited")
        limiter.left = 1
        assert (await lab.send()).headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize("declared", [True, False], ids=["by its length", "by its bytes"])
async def test_a_body_over_the_limit_is_refused(database: str, declared: bool) -> None:
    async with open_lab(database, Policy(max_body_bytes=10)) as lab:
        connection = Connection(headers={"content-length": "11"} if declared else {})
        if not declared:
            connection.feed(b"123456", more=True)
            connection.feed(b"78901", more=True)
        await connection.run(lab.app)
        assert connection.status == 413
        connection = Connection(headers={"content-length": "10", "content-type": "text/plain"})
        connection.feed(b"1234567890")
        await connection.run(lab.app)
        assert connection.status == 201


@pytest.mark.parametrize(
    "request_parts",
    [
        {"content": b"some text", "headers": {"Content-Type": "text/plain; charset=utf-8"}},
        {"content": bytes(range(256)), "headers": {"Content-Type": "application/octet-stream"}},
        {"content": b"--b\r\n\r\nx\r\n--b--", "headers": {"Content-Type": MULTIPART}},
        {"content": b"a=1&b=2", "headers": {"Content-Type": "application/x-www-form-urlencoded"}},
        {"content": b"\xff\xfe", "headers": {}},
        {"content": b"{not json", "headers": {}},
        {"content": b"", "headers": {}},
        {"content": b"", "headers": {"Content-Type": "application/json"}},
        {"content": b"x", "headers": {"Content-Type": "\xff;;="}},
        {"content": b'{"a":1}', "headers": {"Content-Type": "application/problem+json"}},
    ],
)  # fmt: skip
async def test_a_body_of_any_kind_is_guarded(database: str, request_parts: dict[str, Any]) -> None:
    raw = {**request_parts}
    content_type = raw["headers"].get("Content-Type")
    raw["headers"] = (
        {} if content_type is None else {"Content-Type": content_type.encode("latin-1")}
    )
    async with open_lab(database) as lab:
        first, again = await lab.send(**raw), await lab.send(**raw)
        assert first.status_code == 201
        assert again.content == first.content
        assert again.headers["idempotency-replayed"] == "true"
        other = await lab.send(content=raw["content"] + b" !", headers=raw["headers"])
        assert other.status_code in {400, 409}
        assert len(lab.runs) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":1}}',
        b"\xff",
        b'"\\ud800"',
        b"1e400",
        b"NaN",
        b"-Infinity",
        b"[" * 129 + b"]" * 129,
        b"[" * 100_000,
        b"\xef\xbb\xbf{}",
        b" ",
        b"{} {}",
        b'{"a":1,}',
        b"01",
        b"\x00",
    ],
)
async def test_malformed_json_is_400_and_the_handler_does_not_run(
    database: str, content: bytes
) -> None:
    async with open_lab(database) as lab:
        headers = {"Content-Type": "application/json"}
        response = await lab.send(content=content, headers=headers)
        assert (response.status_code, response.json()["code"]) == (400, "request.invalid")
        assert lab.runs == []
        assert lab.store.calls == {}


@pytest.mark.parametrize("content", [b"[" * 128 + b"]" * 128, b"9" * 400, b"1e308", b'"\\u0000"'])
async def test_json_at_the_limits_is_accepted(database: str, content: bytes) -> None:
    async with open_lab(database) as lab:
        headers = {"Content-Type": "application/json"}
        assert (await lab.send(content=content, headers=headers)).status_code == 201


@pytest.mark.parametrize(
    ("values", "status"),
    [
        (["key-1", "key-1"], 201),
        (["key-1", '"key-1"'], 201),
        (['"key-1"'], 201),
        ([" key-1\t"], 201),
        (["k" * 128], 201),
        (["key-1", "key-2"], 400),
        (["key-1", ""], 400),
        ([""], 400),
        (['""'], 400),
        (["k" * 129], 400),
        (["key\x01"], 400),
        (["key 1"], 400),
        (["k\xe4se"], 400),
        (['"key-1'], 400),
        (['"key-1";a=1', "key-1"], 201),
        (['"key-1";A=1'], 400),
    ],
)
async def test_keys_in_headers(database: str, values: list[str], status: int) -> None:
    async with open_lab(database) as lab:
        connection = Connection()
        connection.scope["headers"] = [
            (b"idempotency-key", value.encode("latin-1")) for value in values
        ]
        connection.feed(b"")
        await connection.run(lab.app)
        assert connection.status == status
        assert len(lab.runs) == (1 if status == 201 else 0)
        if status == 400:
            assert b'"code":"idempotency.key_invalid"' in connection.body


async def test_a_rate_limit_without_a_limiter_is_refused_at_start_up(database: str) -> None:
    onceward = Onceward(database, tenants=SINGLE_TENANT)
    onceward.guard_path(
        "POST", "/orders", policy=ENVELOPE_WITH_STALENESS.replace(rate_limit="5/minute")
    )
    with pytest.raises(ConfigurationError, match="limiter"):
        await onceward.open()


async def test_a_malformed_rate_limit_is_refused_at_start_up(database: str) -> None:
    onceward = Onceward(database, tenants=SINGLE_TENANT, limiter=LimitsRateLimiter())
    onceward.guard_path(
        "POST", "/orders", policy=ENVELOPE_WITH_STALENESS.replace(rate_limit="often")
    )
    with pytest.raises(ConfigurationError, match="often"):
        await onceward.open()
