"""The store contract, on every adapter."""

import asyncio
import gc
import sqlite3
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from onceward.ports import Store, UnitOfWork
from onceward.stores.postgres import PostgresStore
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward.stores.sqlalchemy import SqlAlchemyStore
from onceward.stores.sqlalchemy_sync import SqlAlchemySyncStore
from onceward.stores.sqlite import SqliteStore
from onceward_testing.store_contract import StoreContract
from packages.onceward.tests.support.citus import CITUS_URL, empty_citus


@pytest.fixture
def postgres_url_of_contract(request: pytest.FixtureRequest) -> str:
    """Return the URL of a new database for tests of migrations, else of a migrated one."""
    name: str = request.node.name
    is_new = "migrat" in name or "new_database" in name
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
