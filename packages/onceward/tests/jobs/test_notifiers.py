"""Notifiers: a commit in another process wakes an idle worker long before its next poll."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import NullPool, create_engine

from onceward import open_store
from onceward.jobs.context import JobContext
from onceward.ports import Notifier, Store
from onceward.stores.notifier import LocalNotifier
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward.stores.sessions.sqlalchemy import SqlAlchemySyncStore
from onceward.stores.sqlite import notifier as sqlite_notifier
from onceward.stores.sqlite.notifier import SocketNotifier
from packages.onceward.tests.jobs.conftest import OpenStore
from packages.onceward.tests.support.jobs_harness import JobsLab, WorkerProcess, eventually

NewNotifier = Callable[..., Coroutine[Any, Any, Notifier]]

# -- idle and awake -----------------------------------------------------------------------------


class Counted:
    """A store whose calls are counted."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def read(self, sql: str, params: Any = None) -> Sequence[Any]:
        self.calls.append(sql)
        return await self._inner.read(sql, params)

    async def write(self, sql: str, params: Any = None) -> Sequence[Any]:
        self.calls.append(sql)
        return await self._inner.write(sql, params)

    async def begin(self, **options: Any) -> Any:
        self.calls.append("BEGIN")
        return await self._inner.begin(**options)


async def test_idle_worker_queries_at_most_twice_a_second(lab: JobsLab) -> None:
    """Without jobs, with jobs that are not due, and with a lease of an ended worker."""

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        return

    for n in range(3):
        await lab.enqueue("effect", n, queue="held", order="line")
        await lab.enqueue("effect", n, queue="later", delay_seconds=60)
    assert len(await lab.job_store.claim(("held",), worker="ended", limit=9, lease_seconds=60)) == 1
    stores = {queue: Counted(lab.store) for queue in ("empty", "later", "held")}
    for queue, store in stores.items():
        await lab.start_worker(store, queues=[queue])
    await asyncio.sleep(0.2)  # each looks once when it starts, and when another does
    for store in stores.values():
        store.calls.clear()
    await asyncio.sleep(2.05)
    counts = {queue: len(store.calls) for queue, store in stores.items()}
    print(f"statements in 2 s: {counts}")
    for count in counts.values():
        assert 1 <= count <= 5


@pytest.fixture
def process(database: str, lab: JobsLab) -> Iterator[WorkerProcess]:
    """Another process on the same database, that only enqueues."""
    process = WorkerProcess(database, JOBS_WORK="no")
    yield process
    process.end()


async def test_commit_in_another_process_wakes_an_idle_worker_before_it_polls(
    lab: JobsLab, process: WorkerProcess
) -> None:
    started: asyncio.Queue[float] = asyncio.Queue()

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        started.put_nowait(time.time())

    await lab.start_worker(poll_seconds=30)  # it would not find it by itself in time
    took: list[float] = []
    for n in range(7):
        await asyncio.sleep(0.1)  # it is asleep again
        process.write_line(f'enqueue {{"type": "effect", "payload": {n}}}')
        async with asyncio.timeout(10):
            begun_at = await started.get()
        printed = await asyncio.to_thread(process.wait_for, "committed")
        took.append(begun_at - float(printed.split()[1]))
    in_ms = sorted(round(seconds * 1000, 1) for seconds in took)
    print(f"from commit to handler, in ms: {in_ms}")
    assert sorted(took)[3] < 5


async def test_end_of_an_ordered_job_wakes_the_worker_of_the_next(
    lab: JobsLab, another_store: OpenStore
) -> None:
    """And so does what a job has enqueued, in every process."""

    @lab.jobs.handler("first", queue="one")
    async def first(job: JobContext) -> None:
        await job.enqueue("second", queue="other")

    @lab.jobs.handler("second", queue="other")
    async def second(job: JobContext) -> None:
        return

    await lab.start_worker(queues=["one"], poll_seconds=30)
    await lab.start_worker(await another_store(), queues=["other"], poll_seconds=30)
    await asyncio.sleep(0.1)
    await lab.enqueue("first")

    async def both_done() -> bool:
        return await lab.count("onceward_job_completions") == 2

    await eventually(both_done, seconds=20)  # to look by itself would be after 30


async def test_retry_starts_when_it_is_due_and_not_at_the_next_poll(lab: JobsLab) -> None:
    done = asyncio.Event()

    @lab.jobs.handler("later")
    async def later(job: JobContext) -> None:
        done.set()

    await lab.start_worker(poll_seconds=30)
    started = time.monotonic()
    await lab.enqueue("later", delay_seconds=0.3)
    async with asyncio.timeout(20):  # the next look is after 30
        await done.wait()
    assert time.monotonic() - started > 0.29


# -- every notifier -------------------------------------------------------------------


@pytest.fixture(params=["local", "socket", "notify", "psycopg", "psycopg, sync", "SQLAlchemy"])
def notifier_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store | None:
    match request.param:
        case "psycopg":
            return PsycopgStore(request.getfixturevalue("clean_jobs_url"))
        case "psycopg, sync":
            return PsycopgSyncStore(request.getfixturevalue("clean_jobs_url"))
        case "SQLAlchemy":
            url: str = request.getfixturevalue("clean_jobs_url")
            # Without a pool there is nothing to dispose of.
            return SqlAlchemySyncStore(
                create_engine(
                    url.replace("postgresql", "postgresql+psycopg", 1), poolclass=NullPool
                )
            )
        case "socket":
            return open_store(f"sqlite:///{tmp_path}/jobs.db")
        case "notify":
            return open_store(request.getfixturevalue("clean_jobs_url"))
        case _:
            return None


@pytest.fixture
async def notifiers(notifier_store: Store | None) -> AsyncIterator[NewNotifier]:
    """Return a function that makes notifiers of one database."""
    local = LocalNotifier()
    if notifier_store is not None:
        await notifier_store.open()
    made: list[Notifier] = []

    async def new(*, listens: bool = True) -> Notifier:
        notifier = local if notifier_store is None else notifier_store.notifier()
        if listens:
            await notifier.open()
            await notifier.wait(0.01)  # what it rang for itself on opening
        made.append(notifier)
        return notifier

    yield new
    for notifier in made:
        await notifier.close()
        await notifier.close()
    if notifier_store is not None:
        await notifier_store.close()


async def test_notification_before_the_wait_counts_once(notifiers: NewNotifier) -> None:
    notifier = await notifiers()
    notifier.notify()
    assert await notifier.wait(5)
    assert not await notifier.wait(0.1), (
        "several notifications may become one, but one does not become several"
    )


async def test_listener_is_woken_by_a_notifier_that_does_not_listen(notifiers: NewNotifier) -> None:
    listening = [await notifiers() for _ in range(3)]
    sender = await notifiers(listens=False)
    waiting = [asyncio.create_task(notifier.wait(5)) for notifier in listening]
    await asyncio.sleep(0.01)
    for _ in range(50):
        sender.notify()
    assert await asyncio.gather(*waiting) == [True] * 3


async def test_closed_notifier_can_be_opened_again(notifiers: NewNotifier) -> None:
    notifier = await notifiers()
    await notifier.close()
    await notifier.open()
    sender = await notifiers(listens=False)
    await notifier.wait(0.05)
    waiting = asyncio.create_task(notifier.wait(5))
    await asyncio.sleep(0.01)
    sender.notify()
    assert await waiting


# -- sockets ------------------------------------------------------------------------------------


async def test_socket_of_an_ended_process_is_removed(
    tmp_path: Path,
) -> None:
    notifier = SocketNotifier(str(tmp_path / "jobs.db"))
    await notifier.open()
    try:
        dead = notifier._folder / "12345-dead"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ended:
            ended.bind(str(dead))
        sender = SocketNotifier(str(tmp_path / "jobs.db"))
        sender.notify()
        assert not dead.exists()
        assert await notifier.wait(5)
    finally:
        await notifier.close()
    assert not notifier._folder.exists(), "nothing is left behind"


async def test_listener_that_does_not_read_blocks_no_other(tmp_path: Path) -> None:
    notifier = SocketNotifier(str(tmp_path / "jobs.db"))
    await notifier.open()
    sender = SocketNotifier(str(tmp_path / "jobs.db"))
    try:
        started = time.monotonic()
        for _ in range(5000):  # the loop does not run meanwhile, so nothing is read
            sender.notify()
        assert time.monotonic() - started < 20
        assert await notifier.wait(5)
    finally:
        await notifier.close()


async def test_directory_writable_by_others_is_not_used(tmp_path: Path) -> None:
    """Another user of the machine must not be able to put something there."""
    notifier = SocketNotifier(str(tmp_path / "jobs.db"))
    notifier._folder.mkdir(mode=0o777)
    notifier._folder.chmod(0o777)
    try:
        await notifier.open()
        assert list(notifier._folder.iterdir()) == []
        notifier.notify()
        assert await notifier.wait(0), "it is notified in its own process"
    finally:
        await notifier.close()
        notifier._folder.rmdir()


async def test_listener_that_starts_while_the_last_one_closes_is_notified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last listener removes the directory; one that starts at that time creates it again."""
    path = str(tmp_path / "jobs.db")
    leaving, coming = SocketNotifier(path), SocketNotifier(path)
    real = sqlite_notifier._is_ours

    def just_now(folder: Path) -> bool:
        monkeypatch.setattr(sqlite_notifier, "_is_ours", real)
        folder.rmdir()
        return True

    monkeypatch.setattr(sqlite_notifier, "_is_ours", just_now)
    await coming.open()
    leaving.notify()
    assert await coming.wait(5)
    await coming.close()


def test_notifiers_of_one_file_share_a_directory_whatever_path_is_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    here = os.path.relpath(tmp_path / "real" / "jobs.db")
    folders = {
        SocketNotifier(name)._folder
        for name in (str(tmp_path / "real/jobs.db"), str(tmp_path / "link/jobs.db"), here)
    }
    assert len(folders) == 1
    assert SocketNotifier(str(tmp_path / "real/other.db"))._folder not in folders


# -- LISTEN -------------------------------------------------------------------------------------


@pytest.mark.parametrize("notifier_store", ["notify", "psycopg", "psycopg, sync"], indirect=True)
async def test_disconnected_listener_reconnects(
    clean_jobs_url: str, notifier_store: Store | None
) -> None:
    store = notifier_store
    assert store is not None
    await store.open()
    notifier, sender = store.notifier(), store.notifier()
    await notifier.open()
    connection = await asyncpg.connect(clean_jobs_url)
    listeners = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND query LIKE 'LISTEN%'"
    )
    try:
        assert len(await connection.fetch(listeners)) == 1
        await notifier.wait(0.05)

        async def is_notified() -> bool:
            sender.notify()
            return await notifier.wait(0.2)

        await eventually(is_notified, seconds=20)
    finally:
        await connection.close()
        await notifier.close()
        await sender.close()
        await store.close()
