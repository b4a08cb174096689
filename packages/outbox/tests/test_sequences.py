"""Strict sequences of a device, against a real app: numbered in order, healed, never stuck."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from onceward import GuardConfig, Onceward, Policy, Principal
from onceward.errors import ConfigurationError
from onceward_outbox import Event, EventKind, OutboxQueue, Profile, QueueSettings
from onceward_outbox.batch_offer import BatchOffer
from onceward_outbox.drain import Drain
from onceward_outbox.entry import Entry, NewEntry
from onceward_outbox.errors import OutboxError
from onceward_outbox.transport import NoResponse, Response
from onceward_outbox.transport import Request as Sent
from onceward_protocol.retry import Jitter, RetryPolicy
from onceward_protocol.sequence import Ordering

STRICT = Profile(name="strict", strict_endpoints=("/numbered", "/numbered/*"))
ON_DEMAND = replace(STRICT, numbers_on_demand=True)
AT_ONCE = RetryPolicy(first_seconds=0.001, ceiling_seconds=0.001, jitter=Jitter.PLUS_MINUS)
USER = "ada"


class KilledError(BaseException):
    """The process ends in the middle of a send."""


class App:
    """A guarded app on an event loop in a thread."""

    def __init__(self, database: str, ordering: Ordering = "strict") -> None:
        self.onceward = Onceward(
            database,
            policy=Policy(ordering=ordering, wait=timedelta(seconds=30)),
            identify=lambda _: Principal(USER, USER),
            config=GuardConfig(sweep_every_seconds=None),
        )
        self.done: list[str] = []
        app = FastAPI()
        self.onceward.install(app, batch="/batch")

        @app.post("/numbered", status_code=201)
        @self.onceward.guard("numbered")
        async def act(request: Request) -> Any:
            body = await request.json()
            if body["do"] and self.moods.get(body["name"], 1):
                self.moods[body["name"]] = self.moods.get(body["name"], 1) - (body["do"] >= 500)
                return JSONResponse({"code": "as.asked"}, body["do"])
            self.onceward.execution.after_commit(lambda: self.done.append(body["name"]))
            return {"id": body["name"]}

        # How often a request still fails; a 5xx fails once.
        self.moods: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self.onceward.open())
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://app", timeout=30)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def send(self, request: Sent) -> Response:
        found = self._run(
            self._client.request(
                request.method,
                request.target,
                content=request.body,
                headers={**request.headers, "content-type": "application/json"},
            )
        )
        return Response(found.status_code, dict(found.headers), found.content)

    def execute(self, sql: str) -> None:
        self._run(self.onceward.store.write(sql))

    def last_number(self) -> int:
        rows = self._run(
            self.onceward.store.read(
                "SELECT coalesce(max(last_number), 0) AS n FROM onceward_sequences"
            )
        )
        return int(rows[0]["n"])

    def close(self) -> None:
        self._run(self._client.aclose())
        self._run(self.onceward.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    app = App(f"sqlite:///{tmp_path}/app.db")
    yield app
    app.close()


class Device:
    """A device whose sends pass ``through``: a function that may lose them."""

    def __init__(
        self, path: Path, app: App, *, batch: bool = False, profile: Profile = STRICT
    ) -> None:
        self.app = app
        self._profile = profile
        self._path, self._batch = path, batch
        self.sent: list[Sent] = []
        self.events: list[Event] = []
        self.through: Any = app.send
        self.open()
        self.queue.add_user(USER)

    def open(self) -> None:
        settings = QueueSettings(batch=self._batch)
        self.queue = OutboxQueue.open(self._path, settings=settings, profiles=[self._profile])
        self.queue.subscribe(self.events.append)
        if self._batch:
            self.queue.save_batch_offer("", BatchOffer("/batch", 200, 86_400))

    def add(self, name: str, do: int = 0) -> Entry:
        return self.queue.enqueue(
            NewEntry(
                user_id=USER,
                operation="create",
                entity_type=f"thing-{name}",
                endpoint="/numbered",
                payload={"name": name, "do": do},
                profile="strict",
            )
        )

    def drain(self) -> None:
        Drain(self.queue, self, None, retry=AT_ONCE).run(USER, max_seconds=20)

    def send(self, request: Sent) -> Response | NoResponse:
        self.sent.append(request)
        found: Response | NoResponse = self.through(request)
        return found

    def statuses(self) -> dict[str, str]:
        return {entry.decoded()["name"]: str(entry.status) for entry in self.queue.entries(USER)}

    @property
    def numbers(self) -> list[int]:
        return [int(each.headers["X-Sequence"]) for each in self.sent]


@pytest.fixture
def device(tmp_path: Path, app: App) -> Iterator[Device]:
    device = Device(tmp_path / "outbox.db", app)
    yield device
    device.queue.close()


def test_entries_are_numbered_in_order_and_retries_keep_their_number(device: Device) -> None:
    lost = iter([False, True, False])

    def lose_one(request: Sent) -> Response | NoResponse:
        found = device.app.send(request)
        return NoResponse("cut") if next(lost, False) else found

    device.through = lose_one
    for name in "abc":
        device.add(name)
    device.drain()
    assert device.numbers == [1, 2, 2, 3]
    assert device.app.done == ["a", "b", "c"]
    assert device.app.last_number() == 3
    clients = {request.headers["X-Client-ID"] for request in device.sent}
    # The stream goes on in another process.
    device.queue.close()
    device.open()
    device.add("d")
    device.drain()
    assert device.numbers[-1] == 4
    assert {request.headers["X-Client-ID"] for request in device.sent} == clients
    assert len(clients) == 1


def test_refusals_and_abandoned_entries_heal(device: Device) -> None:
    device.add("a", do=403)  # not stored: its number stays free
    device.add("b", do=404)  # stored: it has used its number
    device.add("c")
    device.drain()
    assert device.statuses() == {"a": "failed", "b": "failed", "c": "succeeded"}
    assert device.numbers == [1, 2, 1, 2]
    # One that was lost on the way, and then given up.
    device.through = lambda _: NoResponse("cut")
    lost = device.add("d")
    Drain(device.queue, device, None, retry=AT_ONCE).run(USER)
    device.queue.cancel(lost.id, force=True)
    device.through = device.app.send
    device.add("e")
    device.drain()
    assert device.statuses()["e"] == "succeeded"
    assert device.numbers[-2:] == [4, 3]
    assert device.app.done == ["c", "e"]
    # The stored refusal has its number, and so has what was abandoned: none runs a second time.
    assert device.app.last_number() == 3


def test_expired_record_is_never_sent_with_another_number(device: Device) -> None:
    def lose(request: Sent) -> NoResponse:
        device.app.send(request)
        return NoResponse("cut")

    entry = device.add("a")
    device.through = lose
    Drain(device.queue, device, None, retry=AT_ONCE).run(USER)
    device.app.execute("DELETE FROM onceward_idempotency_records")
    device.app.onceward.runtime.idempotency.memory.clear()
    device.through = device.app.send
    device.add("b")
    device.drain()
    found = device.queue.get(entry.id)
    assert (found.status, found.reason, found.last_error) == (
        "failed",
        "unknown",
        "outcome_unknown",
    )
    assert found.outcome_unknown
    # The stream goes on without it.
    assert device.statuses()["b"] == "succeeded"
    assert device.app.done == ["a", "b"]


def test_server_that_was_restored_is_reported_and_gets_what_it_expects(device: Device) -> None:
    for name in "abc":
        device.add(name)
    device.drain()
    device.app.execute("UPDATE onceward_sequences SET last_number = 1")
    device.app.execute("DELETE FROM onceward_sequence_numbers WHERE number > 1")
    for name in "de":
        device.add(name)
    device.drain()
    assert device.statuses() == dict.fromkeys("abcde", "succeeded")
    rewound = [event for event in device.events if event.kind is EventKind.SERVER_REWOUND]
    assert len(rewound) == 1
    assert device.numbers == [1, 2, 3, 4, 2, 3]


def test_profile_checks_its_strict_endpoints() -> None:
    for wrong in ("/orders", ("orders",), (1,)):
        with pytest.raises(ConfigurationError, match="strict_endpoints"):
            Profile(name="wrong", strict_endpoints=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="numbers_on_demand"):
        Profile(name="wrong", numbers_on_demand=True)


@pytest.mark.parametrize("batch", [False, True], ids=["singly", "batches"])
def test_numbers_on_demand_begin_with_the_first_refusal(
    tmp_path: Path, app: App, batch: bool
) -> None:
    path = tmp_path / "outbox.db"
    device = Device(path, app, batch=batch, profile=ON_DEMAND)
    for name in "abc":
        device.add(name)
    device.drain()
    assert device.statuses() == dict.fromkeys("abc", "succeeded")
    assert app.done == ["a", "b", "c"]
    assert app.last_number() == 3
    if not batch:
        numbers = [request.headers.get("X-Sequence") for request in device.sent]
        assert numbers == [None, "1", "2", "3"]
    # Another process knows that the server demands numbers.
    device.queue.close()
    device.open()
    device.sent.clear()
    device.add("d")
    device.drain()
    assert len(device.sent) == 1
    assert app.last_number() == 4
    device.queue.close()


def test_numbers_on_demand_are_not_sent_to_a_server_without_sequences(tmp_path: Path) -> None:
    """Until it demands them: then what may have happened without a number is not sent again."""
    plain = App(f"sqlite:///{tmp_path}/app.db", ordering="none")
    device = Device(tmp_path / "outbox.db", plain, profile=ON_DEMAND)
    device.add("a")
    device.drain()
    assert [set(request.headers) & {"X-Client-ID", "X-Sequence"} for request in device.sent] == [
        set()
    ]

    def lose(request: Sent) -> NoResponse:
        plain.send(request)
        return NoResponse("cut")

    device.through = lose
    device.add("b")
    Drain(device.queue, device, None, retry=AT_ONCE).run(USER)
    plain.close()
    strict = App(f"sqlite:///{tmp_path}/app.db")
    device.through = strict.send
    device.add("c")
    device.drain()
    assert device.statuses() == {"a": "succeeded", "b": "failed", "c": "succeeded"}
    (unknown,) = device.queue.entries(USER, status="failed")
    assert (unknown.last_error, unknown.outcome_unknown) == ("outcome_unknown", True)
    assert (plain.done, strict.done) == (["a", "b"], ["c"])
    device.queue.close()
    strict.close()


class Chaos:
    """Loses requests and responses, and ends the process in between."""

    def __init__(self, dice: random.Random, app: App) -> None:
        self._dice = dice
        self._app = app

    def __call__(self, request: Sent) -> Response | NoResponse:
        kind = self._dice.random()
        if kind < 0.15:
            return NoResponse("not connected", may_have_been_sent=self._dice.random() < 0.5)
        if kind < 0.2:
            raise KilledError
        found = self._app.send(request)
        if kind < 0.35:
            return NoResponse("cut")
        if kind < 0.4:
            raise KilledError
        return found


def decide_about_one(device: Device, dice: random.Random) -> None:
    """Give up an entry that waits, or retry one that has failed."""
    entry = dice.choice(device.queue.entries(USER))
    with suppress(OutboxError):
        if entry.status == "pending":
            device.queue.cancel(entry.id, force=True)
        elif entry.status == "failed":
            device.queue.retry(entry.id)


@pytest.mark.parametrize("batch", [False, True], ids=["singly", "batches"])
@pytest.mark.parametrize("seed", range(2))
def test_random_losses_refusals_abandonments_and_kills_leave_nothing_stuck(
    tmp_path: Path, app: App, seed: int, batch: bool
) -> None:
    dice = random.Random(seed)
    device = Device(tmp_path / "outbox.db", app, batch=batch)
    device.through = Chaos(dice, app)
    count = 0
    for _ in range(12):
        for _ in range(1 + dice.randrange(3)):
            count += 1
            device.add(f"{count:02}", dice.choice([0, 0, 0, 403, 404, 500]))
        try:
            Drain(device.queue, device, None, retry=AT_ONCE).run(USER, wait=False)
        except KilledError:
            device.queue.close()
            device.open()
        if dice.random() < 0.3:
            decide_about_one(device, dice)
    device.through = app.send
    for _ in range(count):
        device.drain()
        # A failed entry that may have happened waits for a person.
        unknown = [e for e in device.queue.entries(USER, status="failed") if e.outcome_unknown]
        if not unknown:
            break
        for entry in unknown:
            device.queue.discard(entry.id)
    open_now = {n: s for n, s in device.statuses().items() if s in {"pending", "in_flight"}}
    assert open_now == {}
    # What has happened has happened once, and what is reported as done has happened.
    assert len(app.done) == len(set(app.done))
    done = [name for name, status in device.statuses().items() if status == "succeeded"]
    assert set(done) <= set(app.done)
    assert len(done) > count // 4
    assert app.last_number() >= len(app.done)
    assert len(app.onceward.runtime.idempotency.sequences.turns) == 0
    device.queue.close()
