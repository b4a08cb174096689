"""Opening, migrating and closing a store. Part of ``StoreContract``."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio

from onceward.errors import (
    ConfigurationError,
    NoTransactionError,
    OncewardError,
    StoreUnavailableError,
    UsageError,
)
from onceward.ports import Store, UnitOfWork
from onceward.stores.parts import JOBS, SEQUENCES, create_within
from onceward_testing.samples import NOW, a_record, claimed, commit

__all__ = ["LifecycleContract"]

_APPLIED = "SELECT namespace, number, name FROM onceward_migrations ORDER BY namespace, number"


class LifecycleContract:
    """Fixtures and helpers for adapters, and the tests of opening and closing."""

    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    def new_store(self) -> Callable[[], Store]:
        """Return a function that makes stores, not opened, on one new database."""
        raise NotImplementedError("override new_store in your test class")

    @pytest_asyncio.fixture
    async def store(self, new_store: Callable[[], Store]) -> AsyncIterator[Store]:
        """Open a store with an empty business table."""
        store = new_store()
        store.schema.want(SEQUENCES)
        await store.open()
        try:
            unit = await store.begin()
            await self.execute(unit, "CREATE TABLE contract_rows (value TEXT NOT NULL)")
            await unit.commit(None, None)
            yield store
        finally:
            await store.close()

    async def execute(
        self, unit: UnitOfWork, sql: str, params: Mapping[str, str] | None = None
    ) -> None:
        """Run a statement in the unit's transaction."""
        await unit.transaction.execute(sql, params)

    async def write_business_row(self, unit: UnitOfWork, value: str) -> None:
        """Insert a row as a handler would."""
        await self.execute(
            unit, "INSERT INTO contract_rows (value) VALUES (:value)", {"value": value}
        )

    async def count_business_rows(self, store: Store, value: str) -> int:
        """Count committed rows."""
        rows = await store.read(
            "SELECT count(*) AS n FROM contract_rows WHERE value = :value", {"value": value}
        )
        return int(rows[0]["n"])

    async def count_audit_events(self, store: Store) -> int:
        """Count committed audit events."""
        table = store.table_names.table("audit_events")
        return int((await store.read(f"SELECT count(*) AS n FROM {table}"))[0]["n"])  # noqa: S608

    async def test_store_has_a_name_and_can_be_pinged(self, store: Store) -> None:
        assert store.name in ("sqlite", "postgresql")
        await store.ping()

    async def test_parameters_without_names_are_refused(self, store: Store) -> None:
        unit = await store.begin()
        without_names: tuple[Any, ...] = (("a",), ["a"], "a")
        for params in without_names:
            for placeholder in ("?", "%s", ":value"):
                query = f"SELECT {placeholder} AS value"
                with pytest.raises(UsageError, match="write :name"):
                    await store.read(query, params)
                with pytest.raises(UsageError, match="write :name"):
                    await unit.statements.fetch_one(query, params)
        await unit.rollback()

    async def test_all_stores_on_a_database_have_the_same_secret(
        self, store: Store, new_store: Callable[[], Store]
    ) -> None:
        other = new_store()
        await other.open()
        try:
            secret = await store.secret()
            assert len(secret) >= 32  # noqa: PLR2004 - bytes
            assert await other.secret() == secret
        finally:
            await other.close()

    async def test_close_is_idempotent(self, store: Store) -> None:
        await store.open()
        await store.close()
        await store.close()

    async def test_closed_store_can_be_opened_again(self, store: Store) -> None:
        record = a_record()
        await commit(store, record)
        await store.close()
        await store.open()
        assert await store.find(record.id, NOW) == record
        await commit(store, a_record("another"))

    async def test_close_commits_or_rolls_back_open_units_within_seconds(
        self, store: Store
    ) -> None:
        record = a_record()
        unit = await claimed(store, record.id)
        await self.write_business_row(unit, "row")
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0.05)
        with suppress(OncewardError):
            await asyncio.wait_for(unit.commit(record, None), 5)
        await unit.rollback()
        await asyncio.wait_for(closing, 5)
        await store.open()
        kept = await store.find(record.id, NOW)
        assert await self.count_business_rows(store, "row") == (0 if kept is None else 1)

    async def test_store_that_is_not_open_is_unavailable_at_once(
        self, new_store: Callable[[], Store], store: Store
    ) -> None:
        await store.close()
        for closed in (store, new_store()):
            with pytest.raises(StoreUnavailableError):
                await asyncio.wait_for(closed.find(a_record().id, NOW), 5)
            with pytest.raises(StoreUnavailableError):
                await asyncio.wait_for(closed.claim(a_record().id, NOW), 5)
            with pytest.raises(StoreUnavailableError):
                await asyncio.wait_for(closed.begin(), 5)
            with pytest.raises(StoreUnavailableError):
                await asyncio.wait_for(closed.sweep(NOW, 1), 5)
            with pytest.raises(StoreUnavailableError):
                await asyncio.wait_for(closed.ping(), 5)

    async def test_ended_unit_refuses_another_commit(self, store: Store) -> None:
        record = a_record()
        unit = await claimed(store, record.id)
        await unit.commit(record, None)
        with pytest.raises(NoTransactionError):
            await asyncio.wait_for(unit.commit(a_record("other"), None), 5)
        assert await store.find(a_record("other").id, NOW) is None

    async def test_four_stores_open_a_new_database_at_once(
        self, new_store: Callable[[], Store]
    ) -> None:
        stores = [new_store() for _ in range(4)]
        try:
            await asyncio.gather(*(store.open() for store in stores))
            names = stores[0].table_names
            rows = await stores[0].read(names.render(_APPLIED))
            steps = [(row["namespace"], row["number"]) for row in rows]
            assert ("guard", 1) in steps
            assert len(steps) == len(set(steps))
            assert len({await store.secret() for store in stores}) == 1
        finally:
            for store in stores:
                await store.close()

    async def test_database_migrated_by_a_newer_version_is_refused(
        self, store: Store, new_store: Callable[[], Store]
    ) -> None:
        unit = await store.begin()
        await self.execute(
            unit,
            store.table_names.render(
                "INSERT INTO onceward_migrations (namespace, number, name, applied_at)"
                " VALUES ('guard', 9999, 'from_the_future', '2999-01-01T00:00:00.000000Z')"
            ),
        )
        await unit.commit(None, None)
        late = new_store()
        with pytest.raises(ConfigurationError, match="guard 9999"):
            await late.open()
        await late.close()

    async def test_database_of_version_0_1_is_refused(
        self, store: Store, new_store: Callable[[], Store]
    ) -> None:
        unit = await store.begin()
        for sql in (
            "DROP TABLE onceward_migrations",
            "CREATE TABLE old_migrations (namespace TEXT, number INT, name TEXT, applied_at TEXT)",
            "INSERT INTO old_migrations VALUES ('core', 1, 'records', '2026-01-01')",
        ):
            await self.execute(unit, store.table_names.render(sql))
        await unit.commit(None, None)
        late = new_store()
        with pytest.raises(ConfigurationError, match=r"version 0\.1.*another database") as raised:
            await late.open()
        assert "\n" not in str(raised.value)
        await late.close()

    async def test_open_store_creates_a_part_that_is_wanted_since(
        self, new_store: Callable[[], Store]
    ) -> None:
        store = new_store()
        await store.open()
        try:
            assert not store.schema.has(JOBS)
            before = await store.secret()
            store.schema.want(JOBS)
            await asyncio.gather(*(store.open() for _ in range(4)))
            assert store.schema.has(JOBS)
            assert await store.read(store.table_names.render("SELECT id FROM onceward_jobs")) == []
            assert await store.secret() == before
        finally:
            await store.close()

    async def test_part_that_a_rolled_back_transaction_has_created_does_not_exist(
        self, new_store: Callable[[], Store]
    ) -> None:
        store = new_store()
        await store.open()
        try:
            for ends in ("rollback", "commit"):
                unit = await store.begin()
                created = await create_within(unit.statements, store.schema, JOBS)
                sql = store.table_names.render("SELECT id FROM onceward_jobs")
                assert await unit.statements.fetch_all(sql) == []
                assert not store.schema.has(JOBS)
                if ends == "rollback":
                    await unit.rollback()
            await unit.commit(None, None)
            store.schema.committed(created)
            assert store.schema.has(JOBS)
            assert await store.read(sql) == []
        finally:
            await store.close()
