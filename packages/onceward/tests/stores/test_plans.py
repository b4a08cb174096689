"""Plans that were cached while tables were empty or tiny read no whole table when these have grown.

Every path of requests, jobs and sweeps is warmed up on analysed tables that are empty or tiny; then
the tables grow without ANALYZE, and the number of their sequential scans stays.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from onceward import Policy, open_store
from onceward.stores.parts import JOBS
from packages.onceward.tests.support.harness import Lab, open_lab
from packages.onceward.tests.support.jobs_harness import JobsLab

ROUNDS = 8  # PostgreSQL considers a generic plan after five executions
TABLES = (
    *("idempotency_records", "audit_events", "audit_seals", "request_log", "sequences"),
    *("sequence_numbers", "jobs", "job_completions", "job_failures", "job_steps", "job_causes"),
    "dead_letters",
)
GROW = """
INSERT INTO onceward.idempotency_records
SELECT 'other-' || n % 1000, 'orders', 'key-' || n, repeat('a', 64), repeat('b', 64), 201, '',
       '{}', 'r' || n, 'c' || n, NULL, now(), now() + interval '1 day', NULL
  FROM generate_series(1, $1::int) AS n;
INSERT INTO onceward.audit_events
       (tenant, id, actor, endpoint, payload_hash, status, request_id, correlation_id,
        created_at, seal)
SELECT 'other-' || n % 1000, 'id-' || n, 'a', 'orders', 'h', 201, 'r', 'c' || n, now(), 1
  FROM generate_series(1, $1::int) AS n;
INSERT INTO onceward.sequences (tenant, client_id, last_number, updated_at)
SELECT 'other-' || n % 1000, 'client-' || n, 1, now() FROM generate_series(1, $1::int) AS n;
INSERT INTO onceward.sequence_numbers (tenant, client_id, number, key_hash)
SELECT 'other-' || n % 1000, 'client-' || n, 1, 'h' FROM generate_series(1, $1::int) AS n;
INSERT INTO onceward.jobs
       (tenant, id, key, queue, type, payload, payload_hash, visible_at, run_at, max_attempts,
        actor, request_id, correlation_id)
SELECT 'other-' || n % 1000, gen_random_uuid(), 'key-' || n, 'later', 'work', '{}', 'h',
       now() + interval '1 day', now(), 5, 'a', 'r', 'c' || n
  FROM generate_series(1, $1::int) AS n;
INSERT INTO onceward.job_completions
       (tenant, job_id, key, queue, type, payload_hash, attempts, request_id, correlation_id,
        enqueued_at)
SELECT 'other-' || n % 1000, gen_random_uuid(), 'key-' || n, 'q', 'work', 'h', 1, 'r', 'c' || n,
       now()
  FROM generate_series(1, $1::int) AS n;
INSERT INTO onceward.job_failures (tenant, job_id, attempt, reason, error)
SELECT 'other-' || n % 1000, gen_random_uuid(), 1, 'error', 'e'
  FROM generate_series(1, $1::int) AS n;
INSERT INTO onceward.job_steps (tenant, job_id, name, result, attempt)
SELECT 'other-' || n % 1000, gen_random_uuid(), 'n', '1', 1
  FROM generate_series(1, $1::int) AS n;
INSERT INTO onceward.job_causes (tenant, job_id, request_id, correlation_id)
SELECT 'other-' || n % 1000, gen_random_uuid(), 'r', 'c'
  FROM generate_series(1, $1::int) AS n;
"""


class Paths:
    """The statements of requests, jobs and sweeps, on one connection that keeps its plans."""

    def __init__(self, lab: Lab, strict: Lab, jobs: JobsLab) -> None:
        self._lab, self._strict, self._jobs = lab, strict, jobs
        self._numbers = itertools.count(1)

    async def request(self) -> None:
        assert (await self._lab.send(str(uuid4()))).status_code == 201

    async def replay(self) -> None:
        for _ in range(2):
            assert (await self._lab.send("replayed")).status_code == 201

    async def numbered_request(self) -> None:
        headers = {"X-Client-ID": "phone", "X-Sequence": str(next(self._numbers))}
        sent = await self._strict.send(str(uuid4()), headers=headers)
        assert sent.status_code == 201, sent.text

    async def sweep(self) -> None:
        await self._lab.store.inner.sweep(datetime.now(UTC), 10)

    async def completed_job(self) -> None:
        await self._jobs.enqueue("work", str(uuid4()), queue="default")
        job = await self._jobs.claim_one("w")
        store = self._jobs.job_store
        await store.renew([job.lease], worker="w", lease_seconds=9)
        await store.mark_alone([job.lease], worker="w", alone=True)
        await store.lost_before(job.lease)
        await store.save_step(job.lease, "n", "1", worker="w")
        await store.steps(job.lease.tenant, job.lease.job_id)
        unit = await self._jobs.store.begin()
        await store.complete_within(unit, job, "1", worker="w")
        await unit.commit(None, None)

    async def failed_job(self) -> None:
        await self._jobs.enqueue("work", str(uuid4()), queue="default", max_attempts=2)
        store = self._jobs.job_store
        job = await self._jobs.claim_one("w")
        await store.retry(job, worker="w", delay_seconds=0, reason="error", error="e")
        job = await self._jobs.claim_one("w")
        await store.release(job, worker="w")
        job = await self._jobs.claim_one("w")
        await store.dead_letter(job, worker="w", reason="error", error="e")

    async def simple_job(self) -> None:
        await self._jobs.enqueue("work", str(uuid4()), queue="default")
        job = await self._jobs.claim_one("w")
        await self._jobs.job_store.complete_alone([(job.lease, None)], worker="w")
        await self._jobs.job_store.due_in(["default"])

    async def clean(self) -> None:
        # Steps, failures and causes are cleaned by a scan, which no index would save.
        store = self._jobs.job_store
        await store.clean("clean_completions", older_than_seconds=9e6, limit=10)


PATHS = (
    *("request", "replay", "numbered_request", "sweep"),
    *("completed_job", "failed_job", "simple_job", "clean"),
)


async def scans(connection: Any) -> dict[str, int]:
    rows = await connection.fetch(
        "SELECT relname, seq_scan FROM pg_stat_user_tables WHERE relname = ANY ($1)", list(TABLES)
    )
    return {row["relname"]: row["seq_scan"] for row in rows}


async def run(paths: Paths, names: Iterable[str], rounds: int) -> None:
    for name in names:
        for _ in range(rounds):
            await getattr(paths, name)()


async def settle(paths: Paths) -> None:
    """Let the connections send their statistics: once a second, at the end of a transaction."""
    await asyncio.sleep(1.1)
    await run(paths, ("request", "completed_job"), 1)


async def grow(connection: Any, rows: int) -> None:
    for statement in GROW.split(";"):
        if statement.strip():
            await connection.execute(statement.replace("$1::int", str(rows)))


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Paths]:
    store = open_store(url)
    store.schema.want(JOBS)
    await store.open()
    try:
        async with open_lab(url) as lab, open_lab(url, Policy(ordering="strict")) as strict:
            yield Paths(lab, strict, JobsLab(store))
    finally:
        await store.close()


async def check(url: str, rows: int, *, is_empty: bool) -> None:
    """Warm up plans while the tables are tiny or empty, let them grow, and count their scans."""
    connection = await asyncpg.connect(url)
    try:
        async with opened(url) as paths:
            if not is_empty:
                await run(paths, PATHS, 5)
            await connection.execute("VACUUM ANALYZE")
            await run(paths, PATHS, ROUNDS)
            await grow(connection, rows)
            await settle(paths)
            before = await scans(connection)
            await run(paths, PATHS, ROUNDS)
            await settle(paths)
            after = await scans(connection)
            assert {
                table: n - before[table] for table, n in after.items() if n != before[table]
            } == {}
    finally:
        await connection.close()


async def test_tables_that_have_grown_are_not_scanned(migrated_postgres_url: str) -> None:
    await check(migrated_postgres_url, 20_000, is_empty=False)


@pytest.mark.long
@pytest.mark.parametrize("is_empty", [False, True])
async def test_large_tables_are_not_scanned(migrated_postgres_url: str, is_empty: bool) -> None:
    await check(migrated_postgres_url, 300_000, is_empty=is_empty)
