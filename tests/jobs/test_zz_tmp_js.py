from collections.abc import AsyncIterator
import pytest
from holdfast import open_store
from holdfast.testing.engine_contract import EngineContract
from tests.support.nats_lab import NatsLab
from tests.jobs.conftest import *
class TestJetStream(EngineContract):
    @pytest.fixture
    async def store(self, database):
        store = open_store(database)
        await store.open()
        yield store
        await store.close()
    @pytest.fixture
    def new_engine(self, nats_server):
        nats_server.start()
        return NatsLab(nats_server.url()).engine()
