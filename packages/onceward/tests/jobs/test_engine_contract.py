"""The engine contract, on the default engine, both databases and the other drivers."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import create_engine

from onceward import open_store
from onceward.jobs.engines import SqlEngine
from onceward.jobs.worker import EngineMaker
from onceward.ports import Store
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward.stores.sessions.sqlalchemy import SqlAlchemySyncStore
from onceward_testing.engine_contract import EngineContract
from packages.onceward.tests.support.citus import ON_CITUS


class TestSqlEngine(EngineContract):
    @pytest.fixture
    async def store(self, database: str) -> AsyncIterator[Store]:
        store = open_store(database)
        await store.open()
        yield store
        await store.close()

    @pytest.fixture
    def new_engine(self) -> EngineMaker:
        return lambda table, queues, worker, lease_seconds: SqlEngine(
            table, queues, worker=worker, lease_seconds=lease_seconds
        )


class TestSqlEngineOnPsycopg(TestSqlEngine):
    @pytest.fixture(params=["clean_jobs", *ON_CITUS])
    def url(self, request: pytest.FixtureRequest) -> str:
        return str(request.getfixturevalue(f"{request.param}_url"))

    @pytest.fixture(params=["psycopg", "psycopg, sync", "SQLAlchemy, sync"])
    async def store(self, request: pytest.FixtureRequest, url: str) -> AsyncIterator[Store]:
        engine = create_engine(url.replace("postgresql", "postgresql+psycopg", 1))
        stores: dict[str, Store] = {
            "psycopg": PsycopgStore(url),
            "psycopg, sync": PsycopgSyncStore(url),
            "SQLAlchemy, sync": SqlAlchemySyncStore(engine),
        }
        store = stores[request.param]
        await store.open()
        yield store
        await store.close()
        engine.dispose()
