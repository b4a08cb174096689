"""The console: pages with millions of records and jobs, and guarded requests beside live pages."""

import asyncio
import http.client
import statistics
import subprocess
import sys
import time
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx
from fastapi import FastAPI

from onceward import Onceward, open_store
from onceward.sign_in.jwt_auth import JwtIdentify, mint_token
from onceward.stores.table_names import TableNames
from onceward_lab.bench.environment import Environment
from onceward_lab.bench.idempotency import create_orders
from onceward_lab.bench.measurements import Measurement, at_least, at_most, measurement
from onceward_lab.bench.races import Contender, load_generator, served
from onceward_operator.console import TokenAccess, console

RECORDS, JOBS = 5_000_000, 1_000_000
ROUNDS = 9
LIVE_PAGES = 10
# Long enough for several updates of a page, of which there is at most one in two seconds.
LIVE_SECONDS = 4.5
LIVE_SLICES = 2
OPERATOR = "operator"
SECRET = "a secret of the benchmark, long enough"

# Of 1,000 tenants, one of which has a fifth of everything, 20 endpoints and 10 queues. As many jobs
# wait as are done; a tenth as many are dead letters, and one in 5,000 runs.
_TENANT = "'tenant-' || CASE WHEN n % 5 = 0 THEN 7 ELSE n % 1000 END"
_FILL: Mapping[str, str] = {
    "onceward_idempotency_records": """
        INSERT INTO onceward_idempotency_records
               (tenant, endpoint, idempotency_key, canonical_body_hash, request_fingerprint,
                response_status, response_body, response_headers, request_id, correlation_id,
                created_at, expires_at)
        SELECT {tenant}, 'POST /orders/' || n % 20, gen_random_uuid()::text, repeat('a', 64),
               repeat('b', 64), 201, '{}', '{}', gen_random_uuid()::text, gen_random_uuid()::text,
               now() - n * interval '10 milliseconds', now() + interval '1 day'
          FROM generate_series(1, $1::bigint) AS n""",
    "onceward_audit_events": """
        INSERT INTO onceward_audit_events
               (tenant, id, actor, endpoint, payload_hash, status, request_id, correlation_id,
                created_at)
        SELECT {tenant}, gen_random_uuid()::text, 'someone', 'POST /orders',
               repeat('a', 64), 201, gen_random_uuid()::text, gen_random_uuid()::text, now()
          FROM generate_series(1, $1::bigint) AS n""",
    "onceward_request_log": """
        INSERT INTO onceward_request_log
               (at, tenant, endpoint, key_hash, request_id, correlation_id, outcome, status)
        SELECT extract(epoch FROM now()) - n / 100.0, {tenant}, 'POST /orders',
               md5(n::text), gen_random_uuid()::text, gen_random_uuid()::text, 'replayed', 201
          FROM generate_series(1, $1::bigint) AS n""",
    "onceward_jobs": """
        INSERT INTO onceward_jobs
               (tenant, id, key, queue, type, payload, payload_hash, max_attempts, actor,
                request_id, correlation_id, visible_at, run_at, state, worker, started_at)
        SELECT {tenant}, gen_random_uuid(), 'job:' || n, 'queue-' || n % 10, 'work',
               '{}', repeat('a', 64), 5, 'someone', gen_random_uuid()::text,
               gen_random_uuid()::text,
               now() + n * interval '1 ms' * CASE WHEN n % 5000 = 0 THEN 1 ELSE -1 END,
               now() - n * interval '1 ms',
               CASE WHEN n % 5000 = 0 THEN 'running' ELSE 'waiting' END,
               CASE WHEN n % 5000 = 0 THEN 'worker-' || n % 7 END,
               CASE WHEN n % 5000 = 0 THEN now() END
          FROM generate_series(1, $1::bigint) AS n""",
    "onceward_job_completions": """
        INSERT INTO onceward_job_completions
               (tenant, job_id, key, queue, type, payload_hash, attempts, request_id,
                correlation_id, enqueued_at, completed_at)
        SELECT {tenant}, gen_random_uuid(), 'job:' || n, 'queue-' || n % 10, 'work',
               repeat('a', 64), 1, gen_random_uuid()::text, gen_random_uuid()::text, now(),
               now() - n * interval '10 milliseconds'
          FROM generate_series(1, $1::bigint) AS n""",
    "onceward_dead_letters": """
        INSERT INTO onceward_dead_letters
               (tenant, job_id, key, queue, type, payload, payload_hash, reason, error, attempts,
                max_attempts, actor, request_id, correlation_id, enqueued_at, died_at)
        SELECT {tenant}, gen_random_uuid(), 'job:' || n, 'queue-' || n % 10, 'work',
               '{}', repeat('a', 64), 'failed', 'TimeoutError: ' || n % 20, 5, 5, 'someone',
               gen_random_uuid()::text, gen_random_uuid()::text, now(),
               now() - n * interval '1 second'
          FROM generate_series(1, $1::bigint) AS n""",
}

# How the indexes of a table are dropped and created again, the primary key last.
_INDEXES = """
    SELECT CASE WHEN indisprimary
                THEN format('ALTER TABLE %s DROP CONSTRAINT %I', $1::text, relname)
                ELSE format('DROP INDEX %s', indexrelid::regclass) END AS drop,
           CASE WHEN indisprimary
                THEN format('ALTER TABLE %s ADD CONSTRAINT %I %s', $1::text, relname,
                            (SELECT pg_get_constraintdef(oid) FROM pg_constraint
                              WHERE conindid = indexrelid AND contype = 'p'))
                ELSE pg_get_indexdef(indexrelid) END AS create
      FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
     WHERE indrelid = $1::text::regclass ORDER BY indisprimary"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many rows the large database has."""

    records: int = RECORDS
    jobs: int = JOBS

    def of(self, table: str) -> int:
        if table in {"onceward_idempotency_records", "onceward_audit_events"}:
            return self.records
        if table == "onceward_dead_letters":
            return self.jobs // 10
        return self.jobs


def measure(environment: Environment) -> list[Measurement]:
    """Return the ratios of all pages, and that of guarded requests with live pages."""
    records = min(environment.rows, RECORDS)
    sizes = Sizes(records, max(1, JOBS * records // RECORDS))
    environment.on_step(f"filling {sizes.records:,} records and {sizes.jobs:,} jobs")
    urls = environment.database(), environment.database()
    pages = asyncio.run(measure_pages(*urls, sizes, ROUNDS))
    found = [
        measurement("console, pages", f"{name} with {sizes.records:,} ÷ empty", row, at_most(2.0))
        for name, row in pages.items()
    ]
    environment.on_step(f"guarded requests with {LIVE_PAGES} live pages")
    seconds = max(environment.seconds, LIVE_SECONDS)
    row = measure_live(environment.database(), ROUNDS, seconds, lambda: None)
    name = f"guarded requests with {LIVE_PAGES} live pages ÷ without"
    return [*found, measurement("console, live", name, row, at_least(0.95))]


# -- pages ---------------------------------------------------------------------------------------


def console_app(url: str) -> tuple[Onceward[Any], FastAPI]:
    """Return an app with a guarded endpoint that enqueues a job, and its console."""
    identify = JwtIdentify(secret=SECRET)
    onceward: Onceward[Any] = Onceward(open_store(url, max_connections=4), identify=identify)
    app = FastAPI()
    onceward.install(app)

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def create() -> dict[str, bool]:
        await onceward.enqueue("work", None, queue="queue-0", resource_id=str(uuid.uuid4()))
        return {"ok": True}

    app.mount("/console", console(onceward, access=TokenAccess(identify, operators={OPERATOR})))
    return onceward, app


def token(subject: str = OPERATOR) -> str:
    """Return a token that opens the console."""
    now, lifetime = datetime.now(UTC), timedelta(hours=8)
    return mint_token(SECRET, sub=subject, roles=("admin",), lifetime=lifetime, now=now)


@asynccontextmanager
async def signed_in(url: str) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, str]]]:
    """Yield a client that is signed in, and the paths of the pages by name."""
    onceward, app = console_app(url)
    await onceward.open()
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://bench") as client:
            key = str(uuid.uuid4())
            headers = {"authorization": f"Bearer {token()}", "idempotency-key": key}
            first = await client.post("/orders", headers=headers)
            again = await client.post("/orders", headers=headers)
            first.raise_for_status()
            again.raise_for_status()
            await onceward.runtime.request_log.stop()  # writes what was noted
            onceward.runtime.request_log.start()
            jobs = await onceward.store.read(
                onceward.store.table_names.render(
                    "SELECT id FROM onceward_jobs WHERE correlation_id = :id"
                ),
                {"id": first.headers["x-correlation-id"]},
            )
            await client.post("/console/sign-in", data={"token": token()})
            yield client, _paths(key, first, again, str(jobs[0]["id"]))
    finally:
        await onceward.close()


def _paths(key: str, first: httpx.Response, again: httpx.Response, job: str) -> dict[str, str]:
    about = {"tenant": OPERATOR, "endpoint": "POST /orders", "key": key}
    endpoint, unknown = urllib.parse.quote("POST /orders", safe=""), str(uuid.uuid4())
    return {
        "overview": "",
        "records": "records",
        "records of a tenant": "records?tenant=tenant-7",
        "records of an endpoint": f"records?endpoint={endpoint}",
        "records of a tenant and endpoint": f"records?tenant=tenant-7&endpoint={endpoint}",
        "records, unknown endpoint": "records?endpoint=none",
        "records, unknown key": "records?key=none",
        "one record": f"records/show?{urllib.parse.urlencode(about)}",
        "request of a replay": f"requests/{again.headers['x-request-id']}",
        "search by request id": f"find?q={again.headers['x-request-id']}",
        "trace": f"trace/{first.headers['x-correlation-id']}",
        "replays and refusals": "requests",
        "mismatches": "requests?outcome=mismatched",
        "mismatches of a tenant": "requests?outcome=mismatched&tenant=tenant-7",
        "jobs": "jobs",
        "jobs of a queue": "jobs?queue=queue-3",
        "jobs of an unknown type": "jobs?type=none",
        "jobs of a tenant": "jobs?tenant=tenant-7",
        "jobs waiting": "jobs?state=waiting",
        "jobs waiting of a queue": "jobs?state=waiting&queue=queue-3",
        "jobs waiting of an unknown queue": "jobs?state=waiting&queue=none",
        "jobs waiting of an unknown type": "jobs?state=waiting&type=none",
        "jobs waiting of a tenant": "jobs?state=waiting&tenant=tenant-7",
        "jobs running": "jobs?state=running",
        "jobs done": "jobs?state=done",
        "jobs done of an unknown queue": "jobs?state=done&queue=none",
        "jobs done of a tenant": "jobs?state=done&tenant=tenant-7",
        "one job": f"jobs/{job}?tenant={OPERATOR}",
        "jobs to cancel": "jobs/cancel?queue=queue-3",
        "dead letters": "dead-letters",
        "dead letters of a tenant": "dead-letters?tenant=tenant-7",
        "dead letters of an unknown queue": "dead-letters?queue=none",
        "dead letters of an unknown type": "dead-letters?type=none",
        "queues": "queues",
        "workers": "workers",
        "periodic work": "periodic",
        "tenants": "tenants",
        "one tenant": "tenants/show?tenant=tenant-7",
        "system": "system",
        "unknown id": f"find?q={unknown}",
    }


async def fill(url: str, sizes: Sizes) -> None:
    """Fill the tables, and let the planner know. Indexes are built afterwards, which is faster."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SET maintenance_work_mem = '512MB'")
        render = TableNames.chosen(None, None, is_sqlite=False).render
        for name, sql in _FILL.items():
            table = render(name)
            indexes = await connection.fetch(_INDEXES, table)
            for index in indexes:
                await connection.execute(index["drop"])
            await connection.execute(
                render(sql).replace("{tenant}", _TENANT), sizes.of(name), timeout=3_600
            )
            for index in indexes:
                await connection.execute(index["create"], timeout=3_600)
            await connection.execute(f"VACUUM ANALYZE {table}", timeout=3_600)
    finally:
        await connection.close()


async def measure_pages(
    empty_url: str, large_url: str, sizes: Sizes, rounds: int
) -> dict[str, dict[str, float]]:
    """Return how long each page takes on the large database ÷ on the empty one."""
    async with signed_in(empty_url) as (empty, paths), signed_in(large_url) as (large, others):
        await fill(large_url, sizes)
        return {
            name: await _compare(empty, path, large, others[name], rounds)
            for name, path in paths.items()
        }


async def _compare(
    empty: httpx.AsyncClient, path: str, large: httpx.AsyncClient, other: str, rounds: int
) -> dict[str, float]:
    times: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        took = await _timed(empty, path), await _timed(large, other)
        if number:  # the first load prepares statements and templates
            times.append(took)
    ratios = [slow / fast for fast, slow in times]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "empty_ms": round(statistics.median(fast for fast, _ in times) * 1e3, 2),
        "large_ms": round(statistics.median(slow for _, slow in times) * 1e3, 2),
    }


async def _timed(client: httpx.AsyncClient, path: str) -> float:
    started = time.perf_counter()
    response = await client.get(f"/console/{path}")
    took = time.perf_counter() - started
    expected = {200, 303, 404} if path.startswith("find?") else {200}
    if response.status_code not in expected:
        raise RuntimeError(f"{path}: {response.status_code}")
    return took


# -- live pages ----------------------------------------------------------------------------------


def measure_live(
    url: str, rounds: int, seconds: float, step: Callable[[], None]
) -> dict[str, float]:
    """Return the rate of one server with live pages ÷ without, in interleaved slices."""
    asyncio.run(create_orders(url))
    contender = Contender("with a console", "guarded_with_console", url)
    ratios, rates = [], []
    with served([contender]), load_generator() as load:
        load(contender, 0.7)
        for _ in range(rounds):
            done = {False: [0, 0.0], True: [0, 0.0]}
            for number in range(LIVE_SLICES):
                for is_live in (False, True) if number % 2 == 0 else (True, False):
                    with live_pages(contender.port, LIVE_PAGES if is_live else 0):
                        count, took = load(contender, seconds)
                    done[is_live][0] += count
                    done[is_live][1] += took
            plain, live = (count / took for count, took in (done[False], done[True]))
            ratios.append(live / plain)
            rates.append(live)
            step()
    return {
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "per_second": round(statistics.median(rates), 1),
    }


@contextmanager
def live_pages(port: int, number: int) -> Iterator[None]:
    """Hold live pages open in another process: each loads itself again after every event."""
    if not number:
        yield
        return
    command = [sys.executable, "-m", "onceward_lab.bench.console", str(port), str(number)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "open\n":
            raise RuntimeError("the live pages were not opened")
        yield
    finally:
        process.kill()
        process.communicate()


async def _watch(port: int, number: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    form = urllib.parse.urlencode({"token": token()})
    kind = {"content-type": "application/x-www-form-urlencoded"}
    connection.request("POST", "/console/sign-in", form, kind)
    cookie = connection.getresponse().headers["set-cookie"].partition(";")[0]
    limits = httpx.Limits(max_connections=2 * number)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers={"cookie": cookie}, limits=limits, timeout=None
    ) as client:
        ready = asyncio.Barrier(number + 1)

        async def page() -> None:
            async with client.stream("GET", "/console/events?page=") as events:
                await ready.wait()
                async for line in events.aiter_lines():
                    if line == "event: changed":
                        part = await client.get("/console/", headers={"hx-request": "true"})
                        part.raise_for_status()

        async with asyncio.TaskGroup() as pages:
            for _ in range(number):
                pages.create_task(page())
            await ready.wait()
            print("open", flush=True)


if __name__ == "__main__":
    asyncio.run(_watch(int(sys.argv[1]), int(sys.argv[2])))
