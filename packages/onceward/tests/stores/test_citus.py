"""What only a database on Citus shows. Not collected without ``ONCEWARD_TEST_CITUS_URL``.

A table of the app is on the coordinator only. Citus commits on the nodes of tenants before the
coordinator does, unless it commits in two phases. A serialization failure, which PostgreSQL finds
last, shows the difference without a crash in between.
"""

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from onceward import open_store
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job_store import JobStore
from onceward.records import RecordId
from onceward.stores.citus import SEQUENTIAL
from onceward.stores.parts import JOBS, REQUEST_LOG
from onceward.stores.postgres.params import finish_statement
from onceward_testing.samples import NOW, a_record
from packages.onceward.tests.support.citus import CITUS_URL, empty_citus

KEY = RecordId("ada", "things.create", "one")
TENANTS = [f"tenant-{number}" for number in range(20)]
# How many indexes of a key each shard of the log has.
INDEXED_SHARDS = """
SELECT result FROM run_command_on_shards('upgraded.request_log', $$
       SELECT count(*) FROM pg_index WHERE indrelid = '%s'::regclass
          AND pg_get_indexdef(indexrelid) LIKE '%%(key_hash)' $$)
"""


class Shelf:
    """Two transactions on a table of the app, each of which reads what the other one writes."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self._second = second

    async def write(self) -> None:
        for connection, read, written in ((self.first, 1, 2), (self._second, 2, 1)):
            await connection.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
            await connection.execute("SELECT n FROM shelf WHERE id = $1", read)
            await connection.execute("UPDATE shelf SET n = 1 WHERE id = $1", written)

    async def commit(self) -> None:
        """Commit the second transaction, so that the first one cannot."""
        await self._second.execute("COMMIT")
        with pytest.raises(asyncpg.SerializationError):
            await self.first.execute("COMMIT")
        rows = await self.first.fetch("SELECT n FROM shelf ORDER BY id")
        assert [row["n"] for row in rows] == [1, 0]


if CITUS_URL:

    @pytest.fixture
    async def shelf() -> AsyncIterator[Shelf]:
        await empty_citus()
        first, second = [await asyncpg.connect(CITUS_URL) for _ in range(2)]
        await first.execute("CREATE TABLE shelf (id integer PRIMARY KEY, n integer)")
        await first.execute("INSERT INTO shelf VALUES (1, 0), (2, 0)")
        yield Shelf(first, second)
        await first.close()
        await second.close()

    async def test_parts_added_to_distributed_tables_are_distributed() -> None:
        connection = await asyncpg.connect(await empty_citus())
        await connection.execute("DROP SCHEMA IF EXISTS upgraded CASCADE")
        try:
            old: Any = open_store(CITUS_URL, schema="upgraded")
            old.schema.want(JOBS)
            await old.open()
            rows = await old.read(
                "SELECT attrelid::regclass::text AS name FROM pg_attribute JOIN pg_class"
                " ON pg_class.oid = attrelid WHERE relkind = 'r' AND attname = 'tenant'"
                " AND relnamespace = 'upgraded'::regnamespace"
            )
            unit = await old.begin()
            await unit.statements.execute(SEQUENTIAL)
            records = "upgraded.idempotency_records"
            for name in sorted((row["name"] for row in rows), key=lambda name: name != records):
                group = "none" if name == records else records
                await unit.statements.fetch_all(
                    "SELECT create_distributed_table(CAST(:name AS text)::regclass, 'tenant',"
                    " colocate_with => :group)",
                    {"name": name, "group": group},
                )
            await unit.commit(None, None)
            await old.close()
            new: Any = open_store(CITUS_URL, schema="upgraded")
            new.schema.want(REQUEST_LOG)
            await new.open()
            assert new.table_names.is_distributed
            for number, tenant in enumerate(TENANTS):  # on all nodes
                await connection.execute(
                    "INSERT INTO upgraded.request_log"
                    " (at, tenant, endpoint, key_hash, request_id, correlation_id, outcome, status,"
                    " code) VALUES ($1, $2, 'e', 'h', 'r', 'c', 'refused', 400, 'known')",
                    float(number),
                    tenant,
                )
            logged = await new.read(
                "SELECT tenant, code FROM upgraded.request_log WHERE key_hash = 'h'"
            )
            assert sorted((row["tenant"], row["code"]) for row in logged) == [
                (tenant, "known") for tenant in sorted(TENANTS)
            ]
            await new.close()
            indexed = await connection.fetch(INDEXED_SHARDS)
            assert len(indexed) > 1
            assert all(row["result"] == "1" for row in indexed), indexed
            known = await connection.fetch(
                "SELECT logicalrelid::text AS name, partmethod::text AS method"
                " FROM pg_dist_partition WHERE logicalrelid::text LIKE 'upgraded.%'"
            )
            methods = {row["name"].removeprefix("upgraded."): row["method"] for row in known}
            assert (methods["request_log"], methods["paused_queues"]) == ("h", "n")
        finally:
            await connection.execute("DROP SCHEMA upgraded CASCADE")
            await connection.close()

    @pytest.fixture
    async def store(shelf: Shelf) -> AsyncIterator[Any]:
        store: Any = open_store(CITUS_URL)
        await store.open()
        yield store
        await store.close()

    async def test_record_is_not_kept_on_citus_if_the_coordinator_does_not_commit(
        store: Any, shelf: Shelf
    ) -> None:
        await shelf.write()
        record = a_record(key=KEY.key, tenant=KEY.tenant, endpoint=KEY.endpoint)
        await shelf.first.execute(finish_statement(store.finish_function, record, None))
        await shelf.commit()
        assert await store.find(KEY, NOW) is None

    async def test_job_stays_on_citus_if_the_coordinator_does_not_commit(
        store: Any, shelf: Shelf
    ) -> None:
        jobs = JobStore(store)
        cause = Cause("ada", "ada", "request-1", "correlation-1")
        async with jobs.transaction() as tx:
            await jobs.enqueue(tx, new_job("effect", None, cause=cause))
        (job,) = await jobs.claim(["default"], worker="w", limit=1, lease_seconds=300)
        await shelf.write()
        completion = jobs.completion(job, None, worker="w")
        assert completion is not None
        await shelf.first.execute(completion)
        await shelf.commit()
        (row,) = await store.read(
            store.table_names.render("SELECT count(*) AS n FROM onceward_jobs")
        )
        assert row["n"] == 1
        assert not await jobs.read("is_done", {"tenant": "ada", "id": job.lease.job_id})
