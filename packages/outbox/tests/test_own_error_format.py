"""The outbox and the client against an app with its own error format, behind a proxy, over HTTP."""

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from onceward import GuardConfig, Onceward, Policy, Principal
from onceward.client import Client
from onceward.guard.error_formats import ErrorInfo
from onceward_outbox import OutboxQueue
from onceward_outbox.entry import Entry, NewEntry, Status
from onceward_outbox.transport import HttpTransport
from packages.onceward.tests.support.outbox_harness import drain

LOST = {
    "nothing": (),
    "the header": ("header",),
    "the body": ("body",),
    "both": ("header", "body"),
}


class LossyProxy:
    """Removes from error responses what the request's ``X-Lose`` names: header, body, or both."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        lost = dict(scope.get("headers", ())).get(b"x-lose", b"").decode()
        is_error = False

        async def changed(message: Any) -> None:
            nonlocal is_error
            if message["type"] == "http.response.start":
                is_error = message["status"] >= 400
                kept = dict(message["headers"])
                if is_error and "header" in lost:
                    kept.pop(b"onceward-error", None)
                if is_error and "body" in lost:
                    kept |= {b"content-length": b"5", b"content-type": b"text/plain"}
                message = {**message, "headers": list(kept.items())}
            elif is_error and "body" in lost:
                message = {**message, "body": b"Error", "more_body": False}
            await send(message)

        await self.app(scope, receive, changed)


class Shop:
    """A guarded app whose payments take as long as the test wants."""

    def __init__(self, database: Path) -> None:
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.payments = 0
        self.url = ""
        self.app = FastAPI()
        onceward = Onceward(
            f"sqlite:///{database}",
            principal=lambda: Principal("ada", "phone"),
            policy=Policy(wait=timedelta(0)),
            config=GuardConfig(error_format=own_format),
        )
        onceward.install(self.app)

        @self.app.post("/payments", status_code=201)
        @onceward.guard("payments")
        def pay(body: dict[str, int]) -> dict[str, int]:
            self.payments += 1
            self.started.set()
            self.go_on.wait(10)
            return {"id": body["amount"]}

    def begin(self, key: str) -> threading.Thread:
        """Send a payment whose response the device never gets."""
        self.started.clear()
        self.go_on.clear()
        headers = {"Idempotency-Key": key}
        sent = threading.Thread(
            target=lambda: httpx.post(f"{self.url}/payments", json={"amount": 3}, headers=headers)
        )
        sent.start()
        assert self.started.wait(5)
        return sent


def own_format(error: ErrorInfo) -> dict[str, Any]:
    return {"success": False, "error": {"code": error.code, "text": error.message}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("shop") / "shop.db")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(LossyProxy(made.app), port=port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    made.url = f"http://127.0.0.1:{port}"
    yield made
    server.should_exit = True
    thread.join()


def pay(shop: Shop, file: Path, key: str, amount: int, lose: str) -> Entry:
    """Queue a payment whose conflicts this device wins, drain once, and return the entry."""
    with OutboxQueue.open(file) as queue, HttpTransport(shop.url) as transport:
        queue.add_user("ada")
        entry = queue.enqueue(
            NewEntry(
                user_id="ada",
                operation="create",
                entity_type="payment",
                endpoint="/payments",
                payload={"amount": amount},
                headers={"X-Lose": lose},
                key=key,
                conflict_resolution="client_wins",
            )
        )
        drain(queue, "ada", transport)
        return queue.get(entry.id)


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_outbox_keeps_the_key_while_the_first_request_runs(
    shop: Shop, quick_path: Path, lose: tuple[str, ...]
) -> None:
    key, before = str(uuid4()), shop.payments
    first = shop.begin(key)
    try:
        entry = pay(shop, quick_path / "outbox.db", key, 3, ",".join(lose))
        assert (entry.status, entry.idempotency_key) == (Status.PENDING, key)
        assert entry.outcome_unknown
        assert shop.payments == before + 1
    finally:
        shop.go_on.set()
        first.join()


@pytest.mark.parametrize("lose", ["", "header", "body"])
def test_a_key_of_another_request_fails_the_entry(shop: Shop, quick_path: Path, lose: str) -> None:
    key = str(uuid4())
    first = shop.begin(key)
    shop.go_on.set()
    first.join()
    before = shop.payments
    entry = pay(shop, quick_path / "outbox.db", key, 4, lose)
    assert (entry.status, entry.idempotency_key) == (Status.FAILED, key)
    assert shop.payments == before


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_client_sends_again_while_the_first_request_runs(shop: Shop, lose: tuple[str, ...]) -> None:
    key, before = str(uuid4()), shop.payments
    first = shop.begin(key)

    def wait_for_the_first(_: float) -> None:
        shop.go_on.set()
        first.join()

    with Client(
        shop.url,
        headers={"X-Lose": ",".join(lose)},
        sleep=wait_for_the_first,
    ) as client:
        response = client.post("/payments", json={"amount": 3}, key=key)
    assert (response.status, response.replayed, response.attempts) == (201, True, 2)
    assert shop.payments == before + 1
