"""Real servers for every test that asks for one. Each test process has its own."""

import gc
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from onceward_testing.nats_server import RealNatsCluster
from onceward_testing.servers import RealNats, RealPostgres, RealRedis
from packages.onceward.tests.support.citus import empty_citus
from packages.onceward.tests.support.databases import SpareDatabases
from tests import session_guard

# Failed assertions of the contracts say what they compared, like those of test files.
for _contract in ("engine", "guard", "guard_batch", "lifecycle", "sequence", "store"):
    pytest.register_assert_rewrite(f"onceward_testing.{_contract}_contract")

# Files with tests that take long. These begin first: in the end, the other processes would wait
# for the last of them.
LONG = (
    "packages/lab/tests/test_chaos.py",
    "packages/lab/tests/test_simulation.py",
    "packages/onceward/tests/acceptance/",
    "packages/services/tests/cli/",
)


GUARD: pytest.StashKey[subprocess.Popen[bytes]] = pytest.StashKey()
MEMORY = Path("/dev/shm")  # noqa: S108 - tempfile makes the files safe
# More than the files of a whole run take.
MEMORY_BYTES = 6 * 1024**3


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C work where the shell has switched it off (``make test &``); choose a TMPDIR."""
    if not hasattr(config, "workerinput"):
        config.stash[GUARD] = session_guard.start()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "TMPDIR" not in os.environ and has_memory():
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Wait until everything that the run has started is gone."""
    guard = config.stash.get(GUARD, None)
    if guard is not None:
        guard.communicate()


def has_memory() -> bool:
    """Return whether files can be in memory, where fsync is a hundred times as fast.

    The databases still call it: processes are killed in tests, machines are not.
    """
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return False
    free = min(found.f_bavail * found.f_frsize, psutil.virtual_memory().available)
    return free >= MEMORY_BYTES and not found.f_flag & os.ST_NOEXEC


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file; tests of an xdist group begin before all others anyway."""
    order = {
        item: next((at for at, file in enumerate(LONG) if item.nodeid.startswith(file)), len(LONG))
        for item in items
    }
    items.sort(key=order.__getitem__)


def pytest_collection_finish() -> None:
    """Spare the collector what stays: thousands of tests and modules, looked at again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session")
def postgres() -> Iterator[RealPostgres]:
    with RealPostgres() as server:
        yield server


@pytest.fixture(scope="session")
def spare_databases(postgres: RealPostgres) -> SpareDatabases:
    return SpareDatabases(postgres)


@pytest.fixture
def postgres_url(spare_databases: SpareDatabases) -> Iterator[str]:
    with spare_databases.lend() as url:
        yield url


@pytest.fixture
async def citus_url() -> str:
    """Return the URL of a database on Citus whose tables are distributed and empty."""
    return await empty_citus()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RealRedis]:
    with RealRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RealRedis) -> str:
    redis_server.start()
    redis_server.flush()
    return redis_server.url()


@pytest.fixture(scope="session")
def nats_server() -> Iterator[RealNats]:
    with RealNats() as server:
        yield server


@pytest.fixture(scope="session")
def started_nats_cluster() -> Iterator[RealNatsCluster]:
    with RealNatsCluster() as cluster:
        yield cluster


@pytest.fixture
def nats_cluster(started_nats_cluster: RealNatsCluster) -> RealNatsCluster:
    """Return three nodes that a test may freeze, kill and isolate.

    Its tests are in the group ``nats-cluster``, so that one process starts it.
    """
    started_nats_cluster.restore()
    return started_nats_cluster
