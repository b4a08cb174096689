"""``onceward migrate --citus`` on a database without Citus."""

from pathlib import Path

import pytest

from onceward import open_store
from onceward.errors import ConfigurationError
from onceward.stores.citus import distribute, refuse_other_nodes
from onceward.stores.parts import distribute_store
from onceward.stores.table_names import DEFAULT_NAMES


async def test_missing_extension_is_refused(postgres_url: str) -> None:
    store = open_store(postgres_url)
    await store.open()
    try:
        with pytest.raises(ConfigurationError, match="extension citus is not installed"):
            await distribute_store(store, [])
    finally:
        await store.close()


async def test_sqlite_is_refused(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/shop.db")
    with pytest.raises(ConfigurationError, match="postgresql://"):
        await distribute_store(store, [])


def test_worker_node_is_refused() -> None:
    steps = refuse_other_nodes()
    next(steps)
    with pytest.raises(ConfigurationError, match="connect to the coordinator"):
        steps.send([(2,)])


def test_coordinator_that_is_no_node_is_refused() -> None:
    steps = distribute(DEFAULT_NAMES, [])
    next(steps)
    steps.send([(True,)])
    with pytest.raises(ConfigurationError, match="citus_set_coordinator_host"):
        steps.send([])
