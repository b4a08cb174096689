"""The event stream of a real server, over sockets and during shutdown."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from onceward.sign_in.jwt_auth import mint_token
from packages.services.tests.cli.conftest import Server
from packages.services.tests.conftest import SECRET

# Long enough for a busy machine, much shorter than the half minute a server waits for responses.
SOON = 10.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path, ONCEWARD_JWT_SECRET=SECRET, ONCEWARD_LOG_JSON="true")
    yield running
    running.close()


def device(server: Server) -> httpx.Client:
    now = datetime.now(UTC)
    lifetime = timedelta(hours=1)
    return server.client(
        mint_token(SECRET, sub="ada", org=None, roles=[], lifetime=lifetime, now=now)
    )


@contextmanager
def listening(client: httpx.Client, **headers: str) -> Iterator[Iterator[str]]:
    headers = {"Accept": "text/event-stream"} | headers
    with client.stream("GET", "/walker/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield response.iter_lines()


def next_event(lines: Iterator[str]) -> dict[str, object]:
    for line in lines:
        if line.startswith("data: "):
            found: dict[str, object] = json.loads(line.removeprefix("data: "))
            return found
    pytest.fail("the stream ended")


def test_device_streams_events_of_another_device_and_may_reconnect(server: Server) -> None:
    with device(server) as phone, device(server) as watch:
        with listening(phone) as lines:
            watch.post("/quest/start", json={"questId": "quest.001"}).raise_for_status()
            assert (next_event(lines)["id"], next(lines)) == (1, "")
        body = {"clientGeneratedAt": datetime.now(UTC).isoformat()}
        key = {"Idempotency-Key": str(uuid4())}
        path = "/quest/quest.001/step/1/advance"
        watch.post(path, json=body, headers=key).raise_for_status()
        with listening(phone, **{"Last-Event-ID": "1"}) as lines:
            assert next_event(lines)["type"] == "quest.advanced"
    assert server.stop() == 0
    logged = [json.loads(line) for line in server.stderr().splitlines()]
    assert [line for line in logged if line["level"] in {"ERROR", "WARNING"}] == []


def test_a_server_with_streams_open_stops_at_once_and_ends_them(server: Server) -> None:
    ended = threading.Event()

    def listen() -> None:
        with device(server) as client, listening(client) as lines:
            for _ in lines:
                pass
        ended.set()  # by its end; an error would have been raised above

    thread = threading.Thread(target=listen)
    thread.start()
    time.sleep(1)
    started = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - started < SOON
    thread.join(SOON)
    assert ended.is_set()
