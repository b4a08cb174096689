"""Rate limits per tenant and endpoint, in one process and across several."""

import asyncio
import socket
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from onceward.errors import ConfigurationError
from onceward.guard import rate_limits
from onceward.guard.rate_limits import LimitsRateLimiter, check_limit


class HeldClock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.seconds, UTC)

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
def limiter(clock: HeldClock) -> LimitsRateLimiter:
    return LimitsRateLimiter(clock=clock)


@pytest.fixture(params=["memory", "file"])
async def counting(
    request: pytest.FixtureRequest, tmp_path: Path, clock: HeldClock
) -> AsyncIterator[LimitsRateLimiter]:
    url = "async+memory://" if request.param == "memory" else f"file://{tmp_path}/counts"
    limiter = LimitsRateLimiter(url, clock=clock)
    yield limiter
    await limiter.close()


async def test_the_fifty_first_request_of_a_minute_waits_for_the_first_to_leave(counting, clock):
    for _ in range(50):
        assert await counting.seconds_to_wait("50/minute", "ana", "step.ingest") is None
        clock.seconds += 0.5
    assert await counting.seconds_to_wait("50/minute", "ana", "step.ingest") == 35.0
    clock.seconds += 34.75
    assert await counting.seconds_to_wait("50/minute", "ana", "step.ingest") == 0.25
    clock.seconds += 0.25
    assert await counting.seconds_to_wait("50/minute", "ana", "step.ingest") is None
    assert await counting.seconds_to_wait("50/minute", "ana", "step.ingest") == 0.5


async def test_no_window_of_a_minute_has_more_hits_than_the_limit(counting, clock):
    passed: list[float] = []
    for _ in range(2000):
        if await counting.seconds_to_wait("5/minute", "ana", "e") is None:
            passed.append(clock.seconds)
        clock.seconds += 0.7
    assert len(passed) > 100
    for first, sixth in zip(passed, passed[5:], strict=False):
        assert sixth - first >= 60


async def test_a_refused_request_does_not_count(counting, clock):
    assert await counting.seconds_to_wait("1/minute", "ana", "e") is None
    for _ in range(59):
        clock.seconds += 1
        assert await counting.seconds_to_wait("1/minute", "ana", "e") is not None
    clock.seconds += 1
    assert await counting.seconds_to_wait("1/minute", "ana", "e") is None


async def test_tenants_and_endpoints_are_counted_apart(counting):
    pairs = [("a/b", "c"), ("a", "b/c"), ("a", "c"), ("b", "c"), ("", "a/b/c"), ("1:a", "c")]
    for tenant, endpoint in pairs:
        assert await counting.seconds_to_wait("1/hour", tenant, endpoint) is None
    for tenant, endpoint in pairs:
        assert await counting.seconds_to_wait("1/hour", tenant, endpoint) is not None


async def test_of_two_limits_the_longer_wait_counts(counting, clock):
    limit = "2/second; 3/minute"
    for _ in range(2):
        assert await counting.seconds_to_wait(limit, "ana", "e") is None
    assert await counting.seconds_to_wait(limit, "ana", "e") == 1.0
    clock.seconds += 1
    assert await counting.seconds_to_wait(limit, "ana", "e") == 59.0


async def test_windows_without_recent_hits_are_dropped(limiter, clock):
    for number in range(5000):
        await limiter.seconds_to_wait("1/minute", f"tenant {number}", "e")
        clock.seconds += 1
    # Sixty are alive; between two sweeps there are at most 1024 more.
    assert len(limiter._windows._windows) <= 1024 + 60


@pytest.mark.parametrize(
    "text",
    ["", "50", "fifty/minute", "50/fortnight", "0/minute", "-1/minute", "50/minute;", "x" * 99],
)
async def test_a_malformed_limit_is_refused(text, limiter):
    with pytest.raises(ConfigurationError, match=r"is not a rate limit; write for example 50/min"):
        check_limit(text)
    with pytest.raises(ConfigurationError):
        await limiter.seconds_to_wait(text, "ana", "e")


@pytest.mark.parametrize("text", ["50/minute", "50 per minute", "5/2 hours", "1/second;9/day"])
def test_common_notations_of_limits_are_accepted(text):
    check_limit(text)


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "async+nonsense://x", "mysql://user:hunter2@host", "async+memcachedx://"],
)
def test_an_unknown_storage_is_refused_without_showing_its_password(url):
    with pytest.raises(ConfigurationError, match="cannot be counted in") as caught:
        LimitsRateLimiter(url)
    assert "hunter2" not in str(caught.value)


async def test_counting_in_memory_takes_less_than_50_microseconds():
    limiter = LimitsRateLimiter()
    for number in range(10_000):
        await limiter.seconds_to_wait("50/minute", f"tenant {number}", "e")
    started = time.thread_time()
    for _ in range(2000):
        await limiter.seconds_to_wait("50/minute", "ana", "e")
    assert (time.thread_time() - started) / 2000 < 50e-6  # a few µs; slow machines exist


# -- in a file ---------------------------------------------------------------------------------


async def test_several_processes_share_a_limit_in_a_file(tmp_path):
    limiters = [LimitsRateLimiter(f"file://{tmp_path}/counts") for _ in range(4)]
    try:
        waits = await asyncio.gather(
            *(limiter.seconds_to_wait("50/minute", "ana", "e") for limiter in limiters * 30)
        )
        assert waits.count(None) == 50
        refused = [wait for wait in waits if wait is not None]
        assert all(0 < wait <= 60 for wait in refused)
    finally:
        for limiter in limiters:
            await limiter.close()


async def test_counts_from_before_a_restart_of_the_machine_are_ignored(tmp_path, clock):
    url = f"file://{tmp_path}/counts"
    for _ in range(2):
        limiter = LimitsRateLimiter(url, clock=clock)
        assert await limiter.seconds_to_wait("1/minute", "ana", "e") is None
        assert await limiter.seconds_to_wait("1/minute", "ana", "e") is not None
        await limiter.close()
        clock.seconds = 5.0  # the monotonic clock after a restart


async def test_expired_hits_are_deleted_from_the_file(tmp_path, clock):
    limiter = LimitsRateLimiter(f"file://{tmp_path}/counts", clock=clock)
    for number in range(200):
        await limiter.seconds_to_wait("1/minute", f"tenant {number}", "e")
        clock.seconds += 1
    await limiter.close()
    with closing(sqlite3.connect(tmp_path / "counts")) as db:
        assert db.execute("SELECT count(*) FROM hits").fetchone() == (60,)


async def test_a_file_that_cannot_be_used_lets_requests_pass(tmp_path, caplog):
    limiter = LimitsRateLimiter(f"file://{tmp_path}/nowhere/counts")
    for _ in range(3):
        assert await limiter.seconds_to_wait("1/minute", "ana", "e") is None
    assert len([r for r in caplog.records if "counter failed" in r.getMessage()]) == 1
    await limiter.close()


# -- in Redis ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "async+"])
async def test_two_processes_share_a_limit_in_redis(redis_url, prefix):
    one, two = LimitsRateLimiter(prefix + redis_url), LimitsRateLimiter(prefix + redis_url)
    try:
        for limiter in (one, two, one):
            assert await limiter.seconds_to_wait("3/minute", "ana", "e") is None
        for limiter in (one, two):
            wait = await limiter.seconds_to_wait("3/minute", "ana", "e")
            assert wait is not None
            assert 50 < wait <= 60
            assert await limiter.seconds_to_wait("3/minute", "bo", "e") is None
    finally:
        await one.close()
        await two.close()


async def test_a_flood_passes_exactly_the_limit_in_redis(redis_url, monkeypatch):
    # On a busy machine sixty connections take a while; a late hit would pass uncounted.
    monkeypatch.setattr(rate_limits, "_TIMEOUT_SECONDS", 60)
    limiter = LimitsRateLimiter(redis_url)
    try:
        waits = await asyncio.gather(
            *(limiter.seconds_to_wait("20/minute", "ana", "e") for _ in range(60))
        )
        assert waits.count(None) == 20
    finally:
        await limiter.close()


async def test_requests_pass_while_redis_is_down_and_are_counted_again_later(
    redis_server, redis_url, caplog, clock
):
    limiter = LimitsRateLimiter(redis_url, clock=clock)
    try:
        assert await limiter.seconds_to_wait("1/minute", "ana", "e") is None
        assert await limiter.seconds_to_wait("1/minute", "ana", "e") is not None
        redis_server.kill()
        started = time.monotonic()
        for _ in range(20):
            assert await limiter.seconds_to_wait("1/minute", "ana", "e") is None
        assert time.monotonic() - started < 9
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "requests pass uncounted" in caplog.text
        redis_server.start()
        clock.seconds += 5
        assert await limiter.seconds_to_wait("1/minute", "ana", "e") is None
        assert await limiter.seconds_to_wait("1/minute", "ana", "e") is not None
    finally:
        redis_server.start()
        await limiter.close()


async def test_a_redis_that_does_not_respond_costs_one_short_wait(monkeypatch):
    monkeypatch.setattr(rate_limits, "_TIMEOUT_SECONDS", 0.5)
    silent = socket.create_server(("127.0.0.1", 0))  # accepts connections and never reads from them
    port = silent.getsockname()[1]
    limiter = LimitsRateLimiter(f"async+redis://127.0.0.1:{port}")
    try:
        started = time.monotonic()
        for _ in range(20):
            assert await limiter.seconds_to_wait("1/minute", "ana", "e") is None
        assert time.monotonic() - started < 9  # twenty such waits take 10
    finally:
        await limiter.close()
        silent.close()
