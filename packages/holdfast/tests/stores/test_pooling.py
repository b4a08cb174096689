"""Transaction pooling is refused when a store is opened; session pooling is not noticed."""

import asyncio
from collections.abc import Callable

import pytest

from holdfast.errors import ConfigurationError
from holdfast.ports import Store
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.postgres.pooling import refuse_transaction_pooling
from holdfast.stores.psycopg import PsycopgStore, PsycopgSyncStore
from holdfast.testing.servers import RealPostgres
from packages.holdfast.tests.support.pooling_proxy import PoolingProxy

STORES = pytest.mark.parametrize("make", [PostgresStore, PsycopgStore, PsycopgSyncStore])


def through(proxy: PoolingProxy, postgres: RealPostgres, url: str) -> str:
    return url.replace(f":{postgres.port}/", f":{proxy.port}/")


@STORES
async def test_transaction_pooling_is_refused_with_one_line(
    make: Callable[[str], Store], postgres: RealPostgres, clean_postgres_url: str
):
    async with PoolingProxy(postgres.port, per_transaction=True) as proxy:
        store = make(through(proxy, postgres, clean_postgres_url))
        with pytest.raises(ConfigurationError, match="use session pooling") as refused:
            await store.open()
    assert "\n" not in str(refused.value)


@STORES
async def test_session_pooling_is_accepted(
    make: Callable[[str], Store], postgres: RealPostgres, clean_postgres_url: str
):
    async with PoolingProxy(postgres.port, per_transaction=False) as proxy:
        store = make(through(proxy, postgres, clean_postgres_url))
        await store.open()
        try:
            rows = await asyncio.gather(*(store.read("SELECT 1 AS one") for _ in range(20)))
            assert all(found[0]["one"] == 1 for found in rows)
        finally:
            await store.close()


class _Backends:
    """A connection whose backends are given, one per statement."""

    def __init__(self, *backends: object) -> None:
        self._backends = list(backends)
        self.is_terminated = False

    async def fetchrow(self, _sql: str) -> object:
        backend = self._backends.pop(0)
        if isinstance(backend, Exception):
            raise backend
        return backend

    def transaction(self):
        return asyncio.Lock()

    def terminate(self) -> None:
        self.is_terminated = True


class _StatementError(Exception):
    def __init__(self, sqlstate: str) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


A, B, SAME_PID = (1, "monday"), (2, "monday"), (1, "tuesday")


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ([A] * 6, [B] * 3, False),
        ([A] * 6, [SAME_PID] * 3, False),  # two servers behind one proxy
        ([A, B], [A], True),
        ([A, A, A, B], [B, B], True),  # another client was faster in the first round
        ([_StatementError("26000")], [], True),
        ([A], [_StatementError("42P05")], True),
    ],
)
async def test_a_backend_seen_on_two_connections_is_refused(first, second, is_refused):
    connections = [_Backends(*first), _Backends(*second)]
    waiting = list(connections)

    async def connect() -> _Backends:
        return waiting.pop(0)

    if is_refused:
        with pytest.raises(ConfigurationError):
            await refuse_transaction_pooling(connect)
    else:
        await refuse_transaction_pooling(connect)
    assert all(connection.is_terminated for connection in connections)


async def test_other_errors_of_the_check_are_raised():
    async def connect() -> _Backends:
        return _Backends(_StatementError("42501"))

    with pytest.raises(_StatementError):
        await refuse_transaction_pooling(connect)
