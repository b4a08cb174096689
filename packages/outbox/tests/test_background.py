"""Background draining: wakes up, backs off, and stops cleanly."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from onceward.errors import UsageError
from onceward_outbox import Event, EventKind, OutboxQueue, PayloadMigration, QueueSettings, Rewrite
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import DrainReport, Ended
from onceward_outbox.entry import Status
from onceward_outbox.errors import FileBusyError
from onceward_outbox.events import AsyncEventStream
from onceward_outbox.outbox import AsyncOutbox, Outbox
from onceward_outbox.transport import NoResponse, Request, Response
from onceward_protocol.retry import Jitter, RetryPolicy
from packages.onceward.tests.support.outbox_harness import SOON, Scripted, activity, response
from packages.outbox.tests.queue_harness import KEY

NETWORK_DOWN = NoResponse("could not connect: refused", may_have_been_sent=False)
LONG = RetryPolicy(first_seconds=60, ceiling_seconds=60, jitter=Jitter.UP_TO)


def eventually(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


Make = Callable[..., Outbox]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Outbox] = []

    def make(reply: Any, token: Any = "t", **options: Any) -> Outbox:
        queue = OutboxQueue.open(tmp_path / "outbox.db")
        queue.add_user("ada")
        queue.add_user("bo")
        transport = reply if isinstance(reply, Scripted) else Scripted(reply)
        made.append(Outbox(queue, transport, token, **{"retry": SOON, **options}))
        return made[-1]

    yield make
    for outbox in made:
        outbox.close()


def done(outbox: Outbox, count: int) -> Callable[[], bool]:
    return lambda: outbox.queue.stats().counts[Status.SUCCEEDED] == count


def test_entries_claimed_by_an_ended_process_are_sent_after_the_lease(tmp_path: Path) -> None:
    settings = QueueSettings(lease_seconds=0.3)
    with OutboxQueue.open(tmp_path / "outbox.db", settings=settings) as dead:
        dead.add_user("ada")
        dead.enqueue(activity("ada", "one"))
        assert dead.claim("ada") is not None
    queue = OutboxQueue.open(tmp_path / "outbox.db", settings=settings)
    with Outbox(queue, Scripted(lambda _: response(201, {"id": 1})), "t", retry=SOON) as outbox:
        outbox.start()
        eventually(done(outbox, 1))


def test_entries_queued_while_it_runs_are_sent_at_once(make: Make) -> None:
    outbox = make(lambda _: response(201, {"id": 1}))
    outbox.start()
    outbox.enqueue(activity("ada", "one"))
    eventually(done(outbox, 1))
    outbox.enqueue_many([activity("bo", "two"), activity("ada", "three")])
    eventually(done(outbox, 3))


def test_a_retry_is_sent_when_it_is_due(make: Make) -> None:
    server = Scripted([response(503), response(503), response(201, {"id": 1})])
    outbox = make(server)
    outbox.start()
    outbox.enqueue(activity("ada", "one"))
    eventually(done(outbox, 1))
    assert len(set(server.keys)) == 1


def test_without_a_network_it_backs_off_until_online(make: Make) -> None:
    is_up = threading.Event()
    server = Scripted(lambda _: response(201, {"id": 1}) if is_up.is_set() else NETWORK_DOWN)
    outbox = make(server, back_off=LONG)
    outbox.start()
    outbox.enqueue(activity("ada", "one"))
    eventually(lambda: len(server.requests) == 1)
    time.sleep(0.1)
    assert len(server.requests) == 1, "it does not wait"
    is_up.set()
    outbox.online()
    eventually(done(outbox, 1))


def raising(user: str) -> str:
    if user == "ada":
        raise RuntimeError("the key store is locked")
    return user


@pytest.mark.parametrize("token", [lambda user: user, raising], ids=["no way", "no token"])
def test_an_error_of_one_user_does_not_delay_others(
    make: Make, token: Callable[[str], str]
) -> None:
    asked: list[str] = []

    def counted(user: str) -> str:
        asked.append(user)
        return token(user)

    def reply(request: Request) -> Response | NoResponse:
        is_ada = request.headers["Authorization"] == "Bearer ada"
        return NETWORK_DOWN if is_ada else response(201, {"id": 1})

    outbox = make(reply, counted, back_off=LONG)
    outbox.enqueue(activity("ada", "one"))
    outbox.start()
    eventually(lambda: "ada" in asked)
    time.sleep(0.1)
    outbox.enqueue(activity("bo", "two"))
    eventually(done(outbox, 1), LONG.first_seconds / 3)
    assert asked.count("ada") == 1, "it does not wait"


def test_new_entries_do_not_end_a_back_off(
    make: Make,
) -> None:
    is_up = threading.Event()
    server = Scripted(lambda _: response(201, {"id": 1}) if is_up.is_set() else NETWORK_DOWN)
    outbox = make(server, back_off=LONG)
    outbox.start()
    outbox.enqueue(activity("ada", "one"))
    eventually(lambda: len(server.requests) == 1)
    outbox.enqueue(activity("bo", "two"))
    eventually(lambda: len(server.requests) == 2)
    time.sleep(0.1)
    for user in ("ada", "bo", "ada"):
        outbox.enqueue(activity(user, "more"))
        time.sleep(0.05)
    assert len(server.requests) == 2, "it does not wait"
    is_up.set()
    outbox.wake()
    eventually(done(outbox, 5))


def test_attempts_are_reset_while_another_user_backs_off(make: Make) -> None:
    policy = replace(SOON, attempts=3)

    def reply(request: Request) -> Response | NoResponse:
        return response(500) if request.headers["Authorization"] == "Bearer ada" else NETWORK_DOWN

    server = Scripted(reply)
    outbox = make(server, lambda user: user, back_off=LONG, retry=policy)
    stuck = outbox.enqueue(activity("ada", "one"))
    outbox.enqueue(activity("bo", "two"))
    outbox.start()
    eventually(lambda: server.keys.count(stuck.idempotency_key) == 3)
    time.sleep(0.1)
    assert server.keys.count(stuck.idempotency_key) == 3
    outbox.enqueue(activity("ada", "three"))
    eventually(lambda: server.keys.count(stuck.idempotency_key) == 6, LONG.first_seconds / 3)


def test_each_back_off_of_a_user_is_longer(make: Make) -> None:
    policy = RetryPolicy(first_seconds=0.1, ceiling_seconds=60, jitter=Jitter.UP_TO)
    times: list[float] = []

    def reply(_: Request) -> NoResponse:
        times.append(time.monotonic())
        return NETWORK_DOWN

    outbox = make(reply, back_off=policy)
    outbox.start()
    outbox.enqueue(activity("ada", "one"))
    eventually(lambda: len(times) == 4)
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert all(wait >= least for wait, least in zip(waits, (0.1, 0.2, 0.4), strict=True))


def test_a_wake_during_a_drain_is_not_lost(make: Make) -> None:
    sending, go_on = threading.Event(), threading.Event()

    def slow(_: Request) -> Response | NoResponse:
        if sending.is_set():
            return response(201, {"id": 1})
        sending.set()
        go_on.wait(5)
        return NETWORK_DOWN

    outbox = make(slow, back_off=LONG)
    outbox.start()
    outbox.enqueue(activity("ada", "one"))
    assert sending.wait(5)
    outbox.online()
    go_on.set()
    eventually(done(outbox, 1), LONG.first_seconds / 3)


def test_a_busy_file_is_retried(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Drain.run
    busy = iter([True])

    def once_busy(*arguments: Any, **options: Any) -> DrainReport:
        if next(busy, False):
            raise FileBusyError("busy")
        return run(*arguments, **options)

    monkeypatch.setattr(Drain, "run", once_busy)
    outbox = make(lambda _: response(201, {"id": 1}), back_off=SOON)
    outbox.enqueue(activity("ada", "one"))
    outbox.start()
    eventually(done(outbox, 1), 20)


def test_nothing_is_sent_while_offline(make: Make) -> None:
    server = Scripted(lambda _: response(201, {"id": 1}))
    outbox = make(server)
    outbox.offline()
    outbox.start()
    outbox.enqueue(activity("ada", "one"))
    time.sleep(0.1)
    assert server.requests == []
    outbox.online()
    eventually(done(outbox, 1))


def test_a_signed_out_user_does_not_block_others_and_is_sent_after_sign_in(
    make: Make,
) -> None:
    tokens: dict[str, str | None] = {"ada": "old", "bo": "good"}

    def reply(request: Request) -> Response:
        is_good = request.headers["Authorization"] == "Bearer good"
        return response(201, {"id": 1}) if is_good else response(401)

    server = Scripted(reply)
    outbox = make(server, tokens.get)
    with outbox.events() as events:
        outbox.start()
        outbox.enqueue_many([activity("ada", "one"), activity("bo", "two")])
        eventually(done(outbox, 1))
        assert any(event.kind is EventKind.PAUSED for event in events)
    sent = len(server.requests)
    outbox.wake()
    time.sleep(0.1)
    assert len(server.requests) == sent, "the refused token is tried again and again"
    tokens["ada"] = "good"
    outbox.wake()
    eventually(done(outbox, 2))


def test_it_stops_after_the_entry_that_is_being_sent(make: Make) -> None:
    sending, go_on = threading.Event(), threading.Event()

    def slow(_: Request) -> Response:
        sending.set()
        go_on.wait(5)
        return response(201, {"id": 1})

    outbox = make(slow)
    outbox.enqueue_many([activity("ada", "one"), activity("ada", "two")])
    outbox.start()
    assert sending.wait(5)
    threading.Timer(0.05, go_on.set).start()
    outbox.stop()
    counts = outbox.queue.stats().counts
    assert (counts[Status.SUCCEEDED], counts[Status.PENDING]) == (1, 1)
    assert counts[Status.IN_FLIGHT] == 0
    outbox.start()
    eventually(done(outbox, 2))


def test_it_is_not_started_twice(make: Make) -> None:
    outbox = make([])
    outbox.start()
    with pytest.raises(UsageError, match="running"):
        outbox.start()


@contextmanager
def running(outbox: Outbox) -> Iterator[threading.Thread]:
    """Run it on a thread of the test until it is stopped."""
    thread = threading.Thread(target=outbox.run_forever, daemon=True)
    thread.start()
    yield thread
    thread.join(20)
    assert not thread.is_alive(), "it was not told to stop, or does not hear"


def test_after_a_stop_it_can_run_again_on_the_callers_thread_too(make: Make) -> None:
    outbox = make(lambda _: response(201, {"id": 1}))
    for count in (1, 2, 3):
        with running(outbox):
            outbox.enqueue(activity("ada", "one"))
            eventually(done(outbox, count), 20)
            outbox.stop()
            outbox.stop()


def test_a_stop_waits_for_the_entry_that_is_sent_on_the_callers_thread(make: Make) -> None:
    sending, go_on = threading.Event(), threading.Event()

    def slow(_: Request) -> Response:
        sending.set()
        go_on.wait(5)
        return response(201, {"id": 1})

    outbox = make(slow)
    outbox.enqueue_many([activity("ada", "one"), activity("ada", "two")])
    with running(outbox):
        assert sending.wait(5)
        with pytest.raises(UsageError, match="running"):
            outbox.run_forever()
        threading.Timer(0.05, go_on.set).start()
        outbox.stop()
        assert outbox.queue.stats().counts[Status.SUCCEEDED] == 1


def test_stop_may_be_called_from_a_signal_handler(make: Make) -> None:
    outbox = make(lambda _: response(201, {"id": 1}))

    def listen(event: Event) -> None:
        if event.kind is EventKind.SUCCEEDED:
            outbox.stop()

    outbox.subscribe(listen)
    with running(outbox):
        outbox.enqueue(activity("ada", "one"))


def test_close_ends_a_run_and_prevents_another(make: Make) -> None:
    outbox = make(lambda _: response(201, {"id": 1}))
    with running(outbox):
        outbox.enqueue(activity("ada", "one"))
        eventually(done(outbox, 1))
        outbox.close()
    outbox.run_forever()
    with pytest.raises(UsageError, match="closed"):
        outbox.start()


def test_offline_stays_in_effect_after_a_stop(make: Make) -> None:
    server = Scripted(lambda _: response(201, {"id": 1}))
    outbox = make(server)
    outbox.start()
    outbox.offline()
    outbox.stop()
    outbox.enqueue(activity("ada", "one"))
    outbox.start()
    time.sleep(0.1)
    assert server.requests == []
    outbox.online()
    eventually(done(outbox, 1))


def test_a_drain_that_raises_does_not_end_the_background_run(make: Make) -> None:
    calls = 0

    def token(_: str) -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("the key store is locked")
        return "t"

    outbox = make(lambda _: response(201, {"id": 1}), token, back_off=SOON)
    outbox.start()
    outbox.enqueue(activity("ada", "one"))
    eventually(done(outbox, 1))


def test_the_event_stream_ends_with_the_outbox(make: Make) -> None:
    outbox = make(lambda _: response(201, {"id": 1}))
    events = outbox.events()
    outbox.enqueue(activity("ada", "one"))
    assert outbox.drain("ada").ended is Ended.EMPTY
    outbox.close()
    assert [event.kind for event in events] == [
        EventKind.ENQUEUED,
        EventKind.CLAIMED,
        EventKind.SENT,
        EventKind.SUCCEEDED,
        EventKind.DRAINED,
    ]


def test_close_is_idempotent(make: Make) -> None:
    outbox = make([])
    outbox.close()
    outbox.close()
    with pytest.raises(UsageError, match="closed"):
        outbox.enqueue(activity("ada", "one"))


def test_open_adds_the_users_and_an_invalid_url_creates_no_file(
    tmp_path: Path,
) -> None:
    with Outbox.open(tmp_path / "o.db", server="https://api.example", users=["ada"]) as outbox:
        assert outbox.queue.users() == ["ada"]
    with pytest.raises(UsageError):
        Outbox.open(tmp_path / "no.db", server="nowhere")
    assert not (tmp_path / "no.db").exists()


def test_open_refuses_a_misspelt_option(tmp_path: Path) -> None:
    misspelt: dict[str, Any] = {"pass_phrase": KEY}
    with pytest.raises(TypeError, match="pass_phrase"):
        OutboxQueue.open(tmp_path / "o.db", **misspelt)
    with pytest.raises(TypeError, match="pass_phrase"):
        Outbox.open(tmp_path / "o.db", server="http://127.0.0.1:9", **misspelt)
    assert list(tmp_path.iterdir()) == []


def test_open_passes_the_queues_options_on(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with Outbox.open(path, server="http://127.0.0.1:9", users=["ada"], passphrase=KEY) as outbox:
        entry = outbox.enqueue(activity("ada", "old"))
    with Outbox.open(
        path,
        server="http://127.0.0.1:9",
        passphrase=KEY,
        settings=QueueSettings(lease_seconds=7, payload_version=1),
        payloads=PayloadMigration(1, lambda _: Rewrite(payload={"title": "new"})),
    ) as outbox:
        assert outbox.queue.settings.lease_seconds == 7
        assert outbox.queue.get(entry.id).decoded() == {"title": "new"}


async def test_the_async_outbox_does_the_same(make: Make) -> None:
    outbox = AsyncOutbox(make(lambda _: response(201, {"id": 1})))
    async with outbox.events() as events:
        running = asyncio.create_task(outbox.run_forever())
        await outbox.enqueue(activity("ada", "one"))
        async for event in events:
            if event.kind is EventKind.SUCCEEDED:
                break
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await outbox.enqueue_many([activity("ada", "two")])
    report = await outbox.drain("ada")
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 1)


async def test_events_of_the_async_outbox_are_an_iterator_that_ends_when_it_is_closed(
    make: Make,
) -> None:
    kinds: list[EventKind] = []

    async def read(events: AsyncEventStream) -> None:
        kinds.extend([event.kind async for event in events])

    async with AsyncOutbox(make(lambda _: response(201, {"id": 1}))) as outbox:
        left_early = outbox.events()
        reading = asyncio.create_task(read(outbox.events()))
        await outbox.enqueue(activity("ada", "one"))
        async for event in left_early:
            assert event.kind is EventKind.ENQUEUED
            break
        await outbox.start()
        await outbox.online()
        entry = (await outbox.entries("ada"))[0]
        assert (await outbox.wait(entry.id, 20)).status is Status.SUCCEEDED
    await asyncio.wait_for(reading, 20)
    assert kinds[0] is EventKind.ENQUEUED
    assert EventKind.SUCCEEDED in kinds
    with pytest.raises(UsageError, match="closed"):
        await outbox.enqueue(activity("ada", "two"))
    await asyncio.sleep(0)
    assert left_early.is_closed


async def test_the_async_outbox_has_the_methods_of_the_outbox() -> None:
    methods = {
        name
        for name in dir(Outbox)
        if not name.startswith("_") and name not in {"open", "queue", "user_id"}
    }
    assert methods <= set(dir(AsyncOutbox))


async def test_the_async_outbox_runs_again_after_a_cancellation(make: Make) -> None:
    outbox = AsyncOutbox(make(lambda _: response(201, {"id": 1})))
    for count in (1, 2):
        run = asyncio.create_task(outbox.run_forever())
        await outbox.enqueue(activity("ada", "one"))
        await asyncio.to_thread(eventually, done(outbox.outbox, count), 20)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(run, 20)


@pytest.mark.parametrize("how", ["cancelled", "stopped", "closed"])
async def test_a_stop_before_the_thread_has_started_ends_the_run(make: Make, how: str) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    go_on = threading.Event()
    before = asyncio.create_task(asyncio.to_thread(go_on.wait, 5))
    outbox = AsyncOutbox(make([]))
    run = asyncio.create_task(outbox.run_forever())
    await asyncio.sleep(0.02)
    match how:
        case "cancelled":
            run.cancel()
        case "stopped":
            outbox.outbox.stop()
        case _:
            outbox.outbox.close()
    await asyncio.sleep(0.02)
    go_on.set()
    await before
    ended = await asyncio.wait_for(asyncio.gather(run, return_exceptions=True), 20)
    assert isinstance(ended[0], asyncio.CancelledError if how == "cancelled" else None.__class__)


async def test_a_cancelled_drain_finishes_the_entry_that_is_being_sent(make: Make) -> None:
    sending, go_on = threading.Event(), threading.Event()

    def slow(_: Request) -> Response:
        sending.set()
        go_on.wait(5)
        return response(201, {"id": 1})

    outbox = AsyncOutbox(make(slow))
    await outbox.enqueue_many([activity("ada", "one"), activity("ada", "two")])
    work = asyncio.create_task(outbox.drain("ada"))
    assert await asyncio.to_thread(sending.wait, 5)
    work.cancel()
    await asyncio.sleep(0.02)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    counts = outbox.outbox.queue.stats().counts
    assert (counts[Status.SUCCEEDED], counts[Status.IN_FLIGHT]) == (1, 0)
