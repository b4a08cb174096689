"""The store contract, on every adapter."""

import asyncio
import gc
import sqlite3
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from onceward.errors import StoreUnavailableError
from onceward.ports import Found, Store, UnitOfWork
from onceward.stores.postgres import PostgresStore
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from onceward.stores.sqlite import SqliteStore
from onceward_testing.samples import claimed
from onceward_testing.store_contract import NOW, StoreContract, a_record
from packages.onceward.tests.support.citus import CITUS_URL, empty_citus
from packages.onceward.tests.support.django_project import add_django_database
from packages.onceward.tests.support.django_threads import ThreadedDjangoStore


@pytest.fixture
def postgres_url_of_contract(request: pytest.FixtureRequest) -> str:
    """Return the URL of a new database for tests of migrations, else of a migrated one."""
    name: str = request.node.name
    is_new = any(word in name for word in ("migrat", "new_database", "0_1", "_part_"))
    return str(request.getfixturevalue(f"{'clean' if is_new else 'migrated'}_postgres_url"))


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def new_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: SqliteStore(tmp_path / "contract.db")


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def new_store(self, postgres_url_of_contract: str) -> Callable[[], Store]:
        return lambda: PostgresStore(postgres_url_of_contract)


class TestPsycopgStore(StoreContract):
    rounds = 20

    @pytest.fixture
    def new_store(self, postgres_url_of_contract: str) -> Callable[[], Store]:
        return lambda: PsycopgStore(postgres_url_of_contract)


class TestPsycopgSyncStore(StoreContract):
    rounds = 10  # each statement changes threads

    @pytest.fixture
    def new_store(self, postgres_url_of_contract: str) -> Callable[[], Store]:
        return lambda: PsycopgSyncStore(postgres_url_of_contract)

    async def execute(
        self, unit: UnitOfWork, sql: str, params: Mapping[str, str] | None = None
    ) -> None:
        await asyncio.to_thread(unit.transaction.execute, sql, params)


class OnSqlAlchemy(StoreContract):
    @pytest.fixture
    async def new_store(self, url: str) -> AsyncIterator[Callable[[], Store]]:
        engines = []

        def new() -> Store:
            engines.append(create_async_engine(url, pool_size=16))
            return SqlAlchemyStore(async_sessionmaker(engines[-1]))

        yield new
        for engine in engines:
            await engine.dispose()

    async def execute(
        self, unit: UnitOfWork, sql: str, params: Mapping[str, str] | None = None
    ) -> None:
        await unit.transaction.execute(text(sql.replace(":00", r"\:00")), params)


class TestSqlAlchemyStoreOnSqlite(OnSqlAlchemy):
    rounds = 20  # aiosqlite changes threads four times per statement

    @pytest.fixture
    def url(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
        path = tmp_path / "contract.db"
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA journal_mode=WAL")  # stays with the file
        yield f"sqlite+aiosqlite:///{path}"
        if "cancel" in request.node.name:
            # aiosqlite (0.22) leaves the connection of a cancelled connect to the garbage
            # collector, and Python 3.13 warns about that, in whichever test comes later.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()


class TestSqlAlchemyStoreOnPostgres(OnSqlAlchemy):
    @pytest.fixture
    def url(self, postgres_url_of_contract: str) -> str:
        return postgres_url_of_contract.replace("postgresql://", "postgresql+asyncpg://")


class OnSyncSqlAlchemy(StoreContract):
    rounds = 10  # each statement changes threads

    @pytest.fixture
    def new_store(self, url: str) -> Iterator[Callable[[], Store]]:
        engines = []

        def new() -> Store:
            engines.append(create_engine(url, pool_size=16))
            return SqlAlchemySyncStore(engines[-1])

        yield new
        for engine in engines:
            engine.dispose()

    async def execute(
        self, unit: UnitOfWork, sql: str, params: Mapping[str, str] | None = None
    ) -> None:
        statement = text(sql.replace(":00", r"\:00"))
        await asyncio.to_thread(unit.transaction.execute, statement, params)


class TestSqlAlchemySyncStoreOnSqlite(OnSyncSqlAlchemy):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        path = tmp_path / "contract.db"
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA journal_mode=WAL")  # stays with the file
        return f"sqlite:///{path}"


class TestSqlAlchemySyncStoreOnPostgres(OnSyncSqlAlchemy):
    @pytest.fixture
    def url(self, postgres_url_of_contract: str) -> str:
        return postgres_url_of_contract.replace("postgresql://", "postgresql+psycopg://")


class OnDjango(StoreContract):
    rounds = 5  # each transaction has a thread and a connection
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def new_store(self, url: str) -> Iterator[Callable[[], Store]]:
        stores: list[ThreadedDjangoStore] = []

        def new() -> Any:
            alias = add_django_database(url, **self.options)
            stores.append(ThreadedDjangoStore(alias))
            return stores[-1]

        yield new
        for store in stores:
            store.end_threads()

    async def execute(self, unit: Any, sql: str, params: Mapping[str, str] | None = None) -> None:
        await unit.execute(sql, params)

    async def test_store_that_is_not_open_is_unavailable_at_once(
        self, new_store: Callable[[], Store], store: Store
    ) -> None:
        """The connections are Django's: it opens and closes them, not the store."""
        await store.close()
        assert await store.find(a_record().id, NOW) is None


class TestDjangoStoreOnPostgres(OnDjango):
    """BEGIN and the claim, and the record and COMMIT, are one message each."""

    @pytest.fixture
    def url(self, postgres_url_of_contract: str) -> str:
        return postgres_url_of_contract


class TestDjangoStoreOneByOne(TestDjangoStoreOnPostgres):
    """An isolation level makes psycopg's BEGIN differ, so that no message can begin."""

    options: ClassVar = {"isolation_level": psycopg.IsolationLevel.READ_COMMITTED}


class TestDjangoStoreOnSqlite(OnDjango):
    """A claim has the write lock: a second one waits for it, as long as Django's timeout says."""

    @pytest.fixture
    def url(self, tmp_path: Path, request: pytest.FixtureRequest) -> str:
        is_waiting = "second_claim" in request.node.name or "superseded" in request.node.name
        self.options = {"timeout": 0.05 if is_waiting else 20}  # type: ignore[misc]
        return f"sqlite:///{tmp_path}/contract.db"

    async def test_second_claim_of_a_key_is_held_or_fails_at_its_commit(self, store: Store) -> None:
        record = a_record()
        first = await claimed(store, record.id)
        with pytest.raises(StoreUnavailableError, match="locked"):
            await store.claim(record.id, NOW)
        await first.commit(record, None)
        assert isinstance(await store.claim(record.id, NOW), Found)

    async def test_four_stores_open_a_new_database_at_once(
        self, new_store: Callable[[], Store]
    ) -> None:
        """Without a table there is nothing to lock: some find it locked, and open it again."""
        stores = [new_store() for _ in range(4)]
        opened = await asyncio.gather(*(store.open() for store in stores), return_exceptions=True)
        for store, error in zip(stores, opened, strict=True):
            assert error is None or isinstance(error, StoreUnavailableError)
            await store.open()
        assert len({await store.secret() for store in stores}) == 1
        for store in stores:
            await store.close()

    async def test_superseded_unit_writes_nothing(self, store: Store) -> None:
        """No other unit can commit while one has claimed a key, whatever that key is."""
        first = await claimed(store, a_record().id)
        with pytest.raises(StoreUnavailableError, match="locked"):
            await store.begin()
        await first.rollback()


if CITUS_URL:

    class OnCitus:
        """The tables of ``postgres_url_of_contract`` are distributed."""

        @pytest.fixture
        async def postgres_url_of_contract(self) -> str:
            return await empty_citus()

    class TestPostgresStoreOnCitus(OnCitus, TestPostgresStore):
        pass

    class TestPsycopgStoreOnCitus(OnCitus, TestPsycopgStore):
        pass

    class TestPsycopgSyncStoreOnCitus(OnCitus, TestPsycopgSyncStore):
        pass

    class TestSqlAlchemyStoreOnCitus(OnCitus, TestSqlAlchemyStoreOnPostgres):
        pass

    class TestSqlAlchemySyncStoreOnCitus(OnCitus, TestSqlAlchemySyncStoreOnPostgres):
        pass

    class TestDjangoStoreOnCitus(OnCitus, TestDjangoStoreOnPostgres):
        pass
