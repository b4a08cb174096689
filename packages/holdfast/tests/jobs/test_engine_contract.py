"""The engine contract, on the default engine and both databases."""

from collections.abc import AsyncIterator

import pytest

from holdfast import open_store
from holdfast.jobs.engines.sql import SqlEngine
from holdfast.jobs.worker import EngineMaker
from holdfast.ports import Store
from holdfast.testing.engine_contract import EngineContract


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
