"""The store fails: before the handler, in the commit, or with an unknown outcome."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from onceward import Policy
from onceward.errors import CommitUnknownError, StoreUnavailableError
from onceward.guard.request import Principal, RequestHead
from onceward.observability.metrics import PrometheusMetrics
from onceward.stores.breaker import Breaker
from packages.onceward.tests.support.harness import HeldClock, Lab, fresh_database, open_lab
from packages.onceward.tests.support.policies import (
    ENVELOPE_WITH_STALENESS,
    OPTIONAL_KEY,
)

UUID4 = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
AWAY = StoreUnavailableError("away", retry_after_seconds=2.5)


# -- down before the handler ------------------------------------------------------------------


def breaker_series(metrics: PrometheusMetrics) -> tuple[float | None, float | None]:
    """Return the gauge and the counter of the breaker."""
    read = metrics.registry.get_sample_value
    return read("onceward_breaker_open"), read("onceward_breaker_opened_total")


async def test_the_breaker_opens_after_failures_and_recovers(tmp_path: Path) -> None:
    clock = HeldClock()
    breaker = Breaker(failure_limit=3, open_seconds=30)
    metrics = PrometheusMetrics()
    options: dict[str, Any] = {"clock": clock, "breaker": breaker, "memory_bytes": 0}
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", metrics=metrics, **options) as lab:
        assert breaker_series(metrics) == (0, 0)
        lab.store.down = AWAY
        for _ in range(3):
            unreachable = await lab.send()
            assert unreachable.headers["retry-after"] == "3"
            assert unreachable.json()["details"] == {"reason": "unreachable"}
        assert lab.store.calls["claim"] == 3
        assert breaker_series(metrics) == (1, 1)
        refused = await lab.send()
        assert refused.json()["details"] == {"reason": "breaker_open"}
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        assert lab.store.calls["claim"] == 3, "an open breaker calls the store no more"
        lab.store.down = None
        assert (await lab.send()).status_code == 503, "it stays open for its time"

        clock.pass_by(seconds=30)
        lab.store.down = AWAY
        assert (await lab.send()).headers["retry-after"] == "3"  # the probe, which fails
        lab.store.down = None
        assert (await lab.send()).status_code == 503, "a failed probe opens the breaker again"
        assert lab.store.calls["claim"] == 4
        assert breaker_series(metrics) == (1, 1)

        clock.pass_by(seconds=30)
        assert (await lab.send()).status_code == 201
        assert lab.store.calls["claim"] == 5
        assert breaker_series(metrics) == (0, 1)
        lab.store.down = AWAY
        for _ in range(2):
            assert (await lab.send("key-2")).headers["retry-after"] == "3"
        lab.store.down = None
        assert (await lab.send("key-2")).status_code == 201, "a success resets the failures"
        assert lab.runs == ["", ""]


async def test_only_one_request_at_a_time_tries_a_store_that_was_down(tmp_path: Path) -> None:
    clock = HeldClock()
    breaker = Breaker(failure_limit=1, open_seconds=30)
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", clock=clock, breaker=breaker) as lab:
        lab.store.down = AWAY
        assert (await lab.send()).status_code == 503
        clock.pass_by(seconds=30)
        claims = lab.store.calls["claim"]
        await asyncio.gather(*(lab.send(f"key-{n}") for n in range(5)))
        assert lab.store.calls["claim"] == claims + 1


async def test_a_store_error_that_is_no_outage_does_not_open_the_breaker(
    tmp_path: Path,
) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", breaker=Breaker(failure_limit=1)) as lab:
        for number in range(3):
            assert (await lab.send(f"key-{number}", do="raise")).status_code == 500
        assert (await lab.send("key-1")).status_code == 201


@pytest.mark.parametrize("tenant", ["evil \x00", "evil \ud800"], ids=["NUL", "surrogate"])
@pytest.mark.parametrize("key", [UUID4, None])
async def test_caller_whose_name_cannot_be_stored_gets_400_and_stops_no_other_tenant(
    database: str, tenant: str, key: str | None
) -> None:
    def identify(head: RequestHead) -> Principal:
        return Principal(head.header("x-tenant") or tenant, "phone")

    async with open_lab(database, OPTIONAL_KEY, identify=identify, memory_bytes=0) as lab:
        for _ in range(50):
            refused = await lab.send(key)
            assert (refused.status_code, refused.json()["code"]) == (400, "request.invalid")
        assert (await lab.send(key, headers={"x-tenant": "good"})).status_code == 201
        assert lab.runs == [""]


@pytest.mark.parametrize("driver", ["postgresql", "postgresql+psycopg"])
async def test_error_of_a_statement_in_the_claim_does_not_open_the_breaker(
    driver: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = await fresh_database(request, tmp_path, "postgresql")
    url = url.replace("postgresql", driver, 1)
    broken = """
        CREATE FUNCTION fail() RETURNS text LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'broken for one tenant' USING ERRCODE = '22012'; END $$;
        ALTER TABLE onceward.idempotency_records ENABLE ROW LEVEL SECURITY;
        CREATE POLICY per_tenant ON onceward.idempotency_records
         USING (CASE tenant WHEN 'evil' THEN fail() = '' ELSE true END);
        INSERT INTO onceward.idempotency_records SELECT 'evil', 'POST /things', 'key-1', '', '',
               200, '', '{}', '', '', NULL, now(), now() + interval '1 day';
        DO $$ BEGIN CREATE ROLE hf_app LOGIN; EXCEPTION WHEN duplicate_object THEN END $$;
        GRANT ALL ON ALL TABLES IN SCHEMA public, onceward TO hf_app;
        GRANT ALL ON SCHEMA public, onceward TO hf_app;
    """
    async with open_lab(url, breaker=Breaker(failure_limit=5, open_seconds=60)) as lab:
        connection = await asyncpg.connect(url.replace("+psycopg", ""))
        await connection.execute(broken)
        await connection.close()
        assert (await lab.send("key-2", headers={"x-tenant": "good"})).status_code == 201
    url = url.replace("postgres@", "hf_app@")
    async with open_lab(url, breaker=Breaker(failure_limit=5, open_seconds=60)) as lab:
        for _ in range(50):
            failed = await lab.send(headers={"x-tenant": "evil"})
            assert failed.status_code == 503
        assert lab.store.calls["claim"] == 50
        assert (await lab.send(headers={"x-tenant": "good"})).status_code == 201


async def test_probe_that_fails_without_an_outage_lets_the_next_request_probe(
    tmp_path: Path,
) -> None:
    clock = HeldClock()
    options: dict[str, Any] = {"clock": clock, "breaker": Breaker(1, 30), "memory_bytes": 0}
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", **options) as lab:
        for failure, status in (
            (StoreUnavailableError("one statement", is_outage=False), 503),
            (RuntimeError("a bug in the store"), 500),
        ):
            lab.store.down = AWAY
            assert (await lab.send()).status_code == 503
            clock.pass_by(seconds=30)
            lab.store.down = failure
            assert (await lab.send()).status_code == status
            lab.store.down = None
            assert (await lab.send(f"key-{status}")).status_code == 201


# -- failing in the commit --------------------------------------------------------------------


async def lost_after_committing(unit: Any, record: Any, audit: Any) -> None:
    await unit.commit(record, audit)
    raise CommitUnknownError("the connection is gone")


async def lost_before_committing(unit: Any, record: Any, audit: Any) -> None:
    await unit.rollback()
    raise CommitUnknownError("the connection is gone")


async def rolled_back(unit: Any, record: Any, audit: Any) -> None:
    await unit.rollback()
    raise StoreUnavailableError("the disk is full")


async def counts(lab: Lab) -> tuple[int, int, int]:
    return await lab.effects(), len(await lab.records()), len(await lab.audits())


async def test_while_the_old_transaction_is_alive_nothing_is_claimed(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Only on PostgreSQL a transaction can outlive its connection."""
    database = await fresh_database(request, tmp_path, "postgresql")
    policy = Policy(wait=timedelta(milliseconds=80))
    async with open_lab(database, policy) as lab:
        left_open: list[tuple[Any, ...]] = []

        async def lost_while_committing(*args: Any) -> None:
            left_open.append(args)
            raise CommitUnknownError("the connection is gone")

        lab.store.commits.append(lost_while_committing)
        assert (await lab.send()).status_code == 503
        assert (await lab.send()).json()["code"] == "idempotency.in_progress"
        unit, record, audit = left_open[0]
        await unit.commit(record, audit)
        again = await lab.send()
        assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
        assert len(lab.runs) == 1
        assert await counts(lab) == (1, 1, 1)


async def test_a_lost_commit_superseded_by_a_retry_elsewhere_replays_the_retrys_response(
    database: str,
) -> None:
    """Clients repeat their X-Request-ID with a retry, so it does not identify the attempt."""
    ids = {"X-Request-ID": "the-same"}
    async with open_lab(database) as lab, open_lab(database) as other:
        elsewhere: list[Any] = []

        async def lost_and_retried(unit: Any, record: Any, audit: Any) -> None:
            await unit.rollback()
            elsewhere.append(await other.send(headers=ids))
            raise CommitUnknownError("the connection is gone")

        lab.store.commits.append(lost_and_retried)
        response = await lab.send(headers=ids)
        assert response.status_code == elsewhere[0].status_code == 201
        assert response.content == elsewhere[0].content, (
            "the response is of an effect that was rolled back"
        )
        assert response.headers["idempotency-replayed"] == "true"
        assert lab.background == []
        assert (await lab.send()).content == response.content
        assert await counts(lab) == (1, 1, 1)


async def test_a_lost_commit_superseded_by_a_different_request_is_a_conflict(database: str) -> None:
    async with open_lab(database) as lab, open_lab(database) as other:

        async def lost_and_taken(unit: Any, record: Any, audit: Any) -> None:
            await unit.rollback()
            await other.send(json={"item": "hat"})
            raise CommitUnknownError("the connection is gone")

        lab.store.commits.append(lost_and_taken)
        response = await lab.send()
        assert (response.status_code, response.json()["code"]) == (
            409,
            "idempotency.payload_mismatch",
        )
        assert lab.background == []
        assert await counts(lab) == (1, 1, 1)


@pytest.mark.parametrize("lost", [lost_after_committing, lost_before_committing, rolled_back])
async def test_a_stale_action_that_cannot_be_recorded_is_503(tmp_path: Path, lost: Any) -> None:
    clock = HeldClock()
    old = {"clientGeneratedAt": "2020-01-01T00:00:00Z"}
    async with open_lab(
        f"sqlite:///{tmp_path}/lab.db", ENVELOPE_WITH_STALENESS, clock=clock
    ) as lab:
        lab.store.commits.append(lost)
        response = await lab.send(UUID4, json=old)
        assert (response.status_code, response.json()["error"]) == (503, "STORE_UNAVAILABLE")
        assert (await lab.send(UUID4, json=old)).json()["error"] == "STALE_ACTION"
        assert [r["response_status"] for r in await lab.records()] == [422]


async def test_a_connection_lost_in_the_handler_is_503_and_the_retry_has_the_one_effect(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = await fresh_database(request, tmp_path, "postgresql")
    async with open_lab(database) as lab:
        first = lab.send_soon(do="wait")
        await lab.started.wait()
        waiter = lab.send_soon()
        connection = await asyncpg.connect(database)
        cut = await connection.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND state = 'idle in transaction'"
        )
        await connection.close()
        assert len(cut) == 1
        lab.gate.set()
        response = await first
        assert (response.status_code, response.json()["code"]) == (
            503,
            "idempotency.store_unavailable",
        )
        assert (await waiter).status_code == 201
        assert await counts(lab) == (1, 1, 1)
        assert len(lab.background) == 1
