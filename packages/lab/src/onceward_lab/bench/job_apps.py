"""The job queues under load: Onceward and its peers, each in its own process.

Each line of standard input is one task; the result is one line with a number::

    enqueue 8 2.0    orders placed per second on 8 connections: one insert, one job, one commit
    work 4000        jobs per second, from the first claim to the last durable completion

All run on uvloop. procrastinate uses psycopg's C implementation and keeps its finished jobs, which
is its default (deleting them was not faster), with concurrency 64 (8 and 16 were not faster).
pgqueuer uses logged tables and a pool; it has no concurrency limit, only a batch size: the default
of 10 was the slowest from 10 to 1024, and above 512 it was not faster.
"""

import asyncio
import logging
import re
import sqlite3
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

ITEM = "a pair of walking boots, size 42, brown"
CREATE = "CREATE TABLE orders (id text PRIMARY KEY, item text NOT NULL, quantity integer NOT NULL)"
NUMBERED = "INSERT INTO orders (id, item, quantity) VALUES ($1, $2, $3)"
NAMED = "INSERT INTO orders (id, item, quantity) VALUES (:id, :item, :quantity)"
CONNECTIONS = 16


def _payload(order: str) -> dict[str, Any]:
    return {"order": order, "item": ITEM, "quantity": 3}


class _Span:
    """The time from the first claim to the last completion of a number of jobs."""

    def __init__(self, jobs: int) -> None:
        self._left = jobs
        self.started = 0.0
        self.ended = 0.0
        self.over = asyncio.Event()

    def begin(self) -> None:
        self.started = self.started or time.perf_counter()

    def end(self, jobs: int = 1) -> None:
        self._left -= jobs
        if self._left == 0:
            self.ended = time.perf_counter()
            self.over.set()

    @property
    def seconds(self) -> float:
        if self._left != 0:
            raise RuntimeError(f"{self._left} jobs did not run, or ran twice")
        return self.ended - self.started

    def starts(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def timed(*args: Any, **named: Any) -> Any:
            self.begin()
            return await call(*args, **named)

        return timed


class OncewardJobs:
    """Onceward: markers, leases with fencing tokens, an audit event per enqueue."""

    def __init__(self, concurrency: int, *, writes: bool = False, marker: bool = True) -> None:
        self._concurrency = concurrency
        self._writes = writes
        self._marker = marker

    async def open(self, url: str) -> None:
        from onceward.jobs.job_store import JobStore
        from onceward.jobs.registry import JobRegistry
        from onceward.stores.factory import open_store
        from onceward.stores.parts import JOBS

        options: dict[str, Any] = {}
        if url.startswith("postgresql"):
            options = {"min_connections": CONNECTIONS, "max_connections": CONNECTIONS}
        self.store = open_store(url, **options)
        self.store.schema.want(JOBS)
        await self.store.open()
        self.table = JobStore(self.store)
        self.notifier = self.store.notifier()
        self.registry = JobRegistry()

        @self.registry.handler("order.placed")
        async def placed(job: Any) -> None:
            if self._writes:
                values = {"id": job.id, "item": ITEM, "quantity": 3}
                await job.transaction.execute(NAMED, values)

    async def enqueue(self, _client: int) -> None:
        unit = await self.store.begin()
        await self._place(unit.statements)
        await unit.commit(None, None)
        self.notifier.notify()

    async def _place(self, tx: Any) -> None:
        from onceward.jobs.enqueue import Cause, new_job

        order = str(uuid.uuid4())
        await tx.execute(NAMED, {"id": order, "item": ITEM, "quantity": 3})
        cause = Cause("bench", "someone", order, order)
        job = new_job("order.placed", _payload(order), cause=cause, resource_id=order)
        await self.table.enqueue(tx, job)

    async def fill(self, jobs: int) -> None:
        for table in (
            "onceward_jobs",
            "onceward_job_completions",
            "onceward_audit_events",
            "orders",
        ):
            empty = "DELETE FROM" if self.store.name == "sqlite" else "TRUNCATE"
            await self.store.write(self.store.table_names.render(f"{empty} {table}"))
        unit = await self.store.begin()
        for _ in range(jobs):
            await self._place(unit.statements)
        await unit.commit(None, None)
        if self.store.name != "sqlite":
            await self.store.write(self.store.table_names.render("VACUUM ANALYZE onceward_jobs"))

    async def work(self, jobs: int) -> float:
        from onceward.jobs.worker import Worker
        from onceward.observability.noop import NullJobMetrics

        span = _Span(jobs)

        class Metrics(NullJobMetrics):
            def job_ended(self, _queue: str, _type: str, outcome: str, _seconds: float) -> None:
                if outcome == "done":
                    span.end()

        worker: Any = Worker(
            self.store, self.registry, concurrency=self._concurrency, metrics=Metrics()
        )
        worker.engine.take = span.starts(worker.engine.take)
        if not self._marker:
            worker.job_store.complete_alone = self._delete
        await worker.start()
        await span.over.wait()
        await worker.stop()
        return span.seconds

    async def _delete(self, results: Any, *, worker: str) -> set[tuple[str, str]]:
        """Complete jobs without a marker: the same statement without its insert."""
        from onceward.jobs.job_store import _results, _statements

        (sql,) = _statements(self.store.name, self.store.table_names, "complete")
        without = re.sub(r", marked AS \(.*?\n\)\n", "\n", sql, flags=re.DOTALL)
        assert "INSERT" in sql
        assert "INSERT" not in without
        values = _results(list(results), is_sqlite=False) | {"worker": worker}
        rows = await self.store.write(without, values)
        return {(row["tenant"], row["job_id"]) for row in rows}

    async def close(self) -> None:
        await self.notifier.close()
        await self.store.close()


class ProcrastinateJobs:
    """procrastinate: psycopg's C implementation, one statement per claim and per completion."""

    def __init__(self, concurrency: int, *, writes: bool = False) -> None:
        self._concurrency = concurrency
        self._writes = writes

    async def open(self, url: str) -> None:
        import psycopg
        from procrastinate import App, PsycopgConnector

        self.app = App(
            connector=PsycopgConnector(
                conninfo=url, min_size=CONNECTIONS, max_size=CONNECTIONS, num_workers=3
            )
        )
        await self.app.open_async()
        if not await self.app.check_connection_async():
            await self.app.schema_manager.apply_schema_async()
        self.clients = [await psycopg.AsyncConnection.connect(url) for _ in range(8)]

        @self.app.task(name="order.placed", queue="default")
        async def placed(order: str, item: str, quantity: int) -> None:
            if self._writes:
                connector: Any = self.app.connector
                async with connector.pool.connection() as connection:
                    await connection.execute(
                        "INSERT INTO orders (id, item, quantity) VALUES (%s, %s, %s)",
                        (f"done {order}", item, quantity),
                    )

        self.task = placed

    async def enqueue(self, client: int) -> None:
        connection = self.clients[client]
        order = str(uuid.uuid4())
        await connection.execute(
            "INSERT INTO orders (id, item, quantity) VALUES (%s, %s, %s)", (order, ITEM, 3)
        )
        await self.task.configure(connection=connection).defer_async(**_payload(order))
        await connection.commit()

    async def fill(self, jobs: int) -> None:
        connection = self.clients[0]
        await connection.execute("TRUNCATE procrastinate_jobs, orders CASCADE")
        for start in range(0, jobs, 500):
            orders = [str(uuid.uuid4()) for _ in range(min(500, jobs - start))]
            await self.task.configure(connection=connection).batch_defer_async(
                *(_payload(order) for order in orders)
            )
        await connection.commit()
        await connection.set_autocommit(True)
        await connection.execute("VACUUM ANALYZE procrastinate_jobs")
        await connection.set_autocommit(False)

    async def work(self, jobs: int) -> float:
        span = _Span(jobs)
        manager: Any = self.app.job_manager
        fetch, finish = type(manager).fetch_job, type(manager).finish_job

        async def finished(*args: Any, **named: Any) -> None:
            await finish(manager, *args, **named)
            span.end()

        manager.fetch_job = span.starts(fetch.__get__(manager))
        manager.finish_job = finished
        await self.app.run_worker_async(
            queues=["default"],
            concurrency=self._concurrency,
            wait=False,
            install_signal_handlers=False,
        )
        return span.seconds

    async def close(self) -> None:
        for connection in self.clients:
            await connection.close()
        await self.app.close_async()


class PgQueuerJobs:
    """pgqueuer on asyncpg, all tables logged: one statement claims or completes a batch."""

    def __init__(self, concurrency: int, *, writes: bool = False) -> None:
        self._concurrency = concurrency
        self._writes = writes

    async def open(self, url: str) -> None:
        import asyncpg
        from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
        from pgqueuer.queries import Queries

        self.pool = await asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS)
        self.queries = Queries(AsyncpgPoolDriver(self.pool))
        if not await self.queries.schema_is_installed():
            await self.queries.install()
        self.clients = []
        for _ in range(8):
            connection = await asyncpg.connect(url)
            self.clients.append((connection, Queries(AsyncpgDriver(connection))))

    async def enqueue(self, client: int) -> None:
        import msgspec

        connection, queries = self.clients[client]
        order = str(uuid.uuid4())
        async with connection.transaction():
            await connection.execute(NUMBERED, order, ITEM, 3)
            await queries.enqueue("order.placed", msgspec.json.encode(_payload(order)))

    async def fill(self, jobs: int) -> None:
        import msgspec

        connection, queries = self.clients[0]
        await connection.execute("TRUNCATE pgqueuer, pgqueuer_log, pgqueuer_statistics, orders")
        orders = [str(uuid.uuid4()) for _ in range(jobs)]
        await queries.enqueue(
            ["order.placed"] * jobs,
            [msgspec.json.encode(_payload(order)) for order in orders],
            [0] * jobs,
        )
        await connection.execute("VACUUM ANALYZE pgqueuer")

    async def work(self, jobs: int) -> float:
        from pgqueuer.core.qm import QueueManager
        from pgqueuer.types import QueueExecutionMode

        span = _Span(jobs)
        manager = QueueManager(self.queries)

        @manager.entrypoint("order.placed")
        async def placed(job: Any) -> None:
            if self._writes:
                await self.pool.execute(NUMBERED, f"done {job.id}", ITEM, 3)

        queries: Any = self.queries
        kind = type(queries)

        async def logged(job_status: list[Any]) -> None:
            await kind.log_jobs(queries, job_status)
            span.end(len(job_status))

        queries.dequeue = span.starts(kind.dequeue.__get__(queries))
        queries.log_jobs = logged
        await manager.run(batch_size=self._concurrency, mode=QueueExecutionMode.drain)
        return span.seconds

    async def close(self) -> None:
        for connection, _ in self.clients:
            await connection.close()
        await self.pool.close()


class BareSqlite(OncewardJobs):
    """A bare loop on the same tables: one commit per claim and one per completion."""

    async def work(self, jobs: int) -> float:
        return await asyncio.to_thread(self._loop, jobs)

    async def open(self, url: str) -> None:
        await super().open(url)
        self._path = url.removeprefix("sqlite:///")

    def _loop(self, jobs: int) -> float:
        now = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
        claim = f"""
            UPDATE onceward_jobs SET state = 'running', lease = lease + 1, attempts = attempts + 1,
                            worker = 'bare', visible_at = {now} + 30000
             WHERE seq = (SELECT seq FROM onceward_jobs
                           WHERE queue = 'default' AND visible_at <= {now}
                           ORDER BY visible_at LIMIT 1)
            RETURNING tenant, id, lease, key, queue, type, payload_hash, attempts, worker,
                      request_id, correlation_id, enqueued_at"""
        delete = (
            "DELETE FROM onceward_jobs"
            " WHERE tenant = ? AND id = ? AND lease = ? AND worker = 'bare'"
        )
        mark = f"""
            INSERT INTO onceward_job_completions
                   (tenant, job_id, key, queue, type, payload_hash, attempts, worker,
                    request_id, correlation_id, enqueued_at, completed_at)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {now})"""
        db = sqlite3.connect(self._path, isolation_level=None, timeout=60)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        started = time.perf_counter()
        for _ in range(jobs):
            db.execute("BEGIN IMMEDIATE")
            row = db.execute(claim).fetchone()
            db.execute("COMMIT")
            db.execute("BEGIN IMMEDIATE")
            db.execute(delete, row[:3])
            db.execute(mark, (*row[:2], *row[3:]))
            db.execute("COMMIT")
        seconds = time.perf_counter() - started
        db.close()
        return seconds


QUEUES: dict[str, Callable[..., Any]] = {
    "onceward": OncewardJobs,
    "onceward_without_marker": lambda concurrency: OncewardJobs(concurrency, marker=False),
    "onceward_writing": lambda concurrency: OncewardJobs(concurrency, writes=True),
    "procrastinate": ProcrastinateJobs,
    "procrastinate_writing": lambda concurrency: ProcrastinateJobs(concurrency, writes=True),
    "pgqueuer": PgQueuerJobs,
    "pgqueuer_writing": lambda concurrency: PgQueuerJobs(concurrency, writes=True),
    "bare_sqlite": BareSqlite,
}


async def enqueue_for(queue: Any, connections: int, seconds: float) -> float:
    """Return orders per second of clients that each place one after another."""
    until = time.perf_counter() + seconds
    placed = 0

    async def client(number: int) -> None:
        nonlocal placed
        while time.perf_counter() < until:
            await queue.enqueue(number)
            placed += 1

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(connections)))
    return placed / (time.perf_counter() - started)


async def serve(name: str, concurrency: str, url: str) -> None:
    queue = QUEUES[name](int(concurrency))
    await queue.open(url)
    logging.disable(logging.INFO)
    print("open", flush=True)
    while task := (await asyncio.to_thread(sys.stdin.readline)).split():
        if task[0] == "work":
            jobs = int(task[1])
            await queue.fill(jobs)
            print(jobs / await queue.work(jobs), flush=True)
        else:
            print(await enqueue_for(queue, int(task[1]), float(task[2])), flush=True)
    await queue.close()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(*sys.argv[1:4]))
