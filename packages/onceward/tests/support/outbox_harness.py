"""A proxy that loses responses, and draining processes that can be killed at any step."""

import http.client
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from onceward_outbox import OutboxQueue, QueueSettings
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import DrainReport
from onceward_outbox.entry import NewEntry
from onceward_outbox.responses import Token
from onceward_outbox.transport import HttpTransport, NoResponse, Request, Response, Transport
from onceward_protocol.retry import Jitter, RetryPolicy
from onceward_testing.fork_server import ForkServer

ROOT = Path(__file__).parents[4]
SECRET = "a secret of the outbox's tests, long enough"
SOON = RetryPolicy(
    first_seconds=0.01, ceiling_seconds=0.05, jitter=Jitter.PLUS_MINUS, jitter_fraction=0.25
)


SINGLY = QueueSettings(batch=False)
"""One request for each entry, for tests about requests."""


def token_of(user: str) -> str:
    from onceward.sign_in.jwt_auth import mint_token

    return mint_token(
        SECRET,
        sub=user,
        org=None,
        roles=[],
        lifetime=timedelta(hours=1),
        now=datetime.now(UTC),
    )


def reader(url: str, user: str) -> httpx.Client:
    """Return a client that looks at the server directly."""
    return httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {token_of(user)}"}, timeout=20
    )


def titles_of(url: str, user: str, kind: str = "activities") -> list[str]:
    """Return what there is, by its last change."""
    with reader(url, user) as client:
        items = client.get(f"/api/v1/{kind}", params={"limit": 500}).json()["items"]
    return [item["title"] for item in items]


def activity(user: str, title: str, **more: Any) -> NewEntry:
    return NewEntry(
        user_id=user,
        operation="create",
        entity_type="activity",
        endpoint="/api/v1/activities",
        payload={"title": title},
        **{"profile": "field", **more},
    )


def response(
    status: int, body: Any = None, headers: dict[str, str] | None = None, code: str | None = None
) -> Response:
    content = {"code": code} if code is not None else body
    raw = b"" if content is None else json.dumps(content).encode()
    return Response(status, headers or {}, raw)


def drain(
    queue: OutboxQueue,
    user_id: str,
    transport: Transport,
    token: Token = None,
    *,
    max_seconds: float | None = None,
    wait: bool | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> DrainReport:
    """Send what a user's queue holds. ``options`` are those of ``Drain``."""
    worker = Drain(queue, transport, token, **options)
    return worker.run(user_id, max_seconds=max_seconds, wait=wait, stop=stop)


class Scripted:
    """A transport with scripted responses; it records the requests."""

    def __init__(self, reply: Callable[[Request], Response | NoResponse] | Sequence[Any]) -> None:
        self._answers = None if callable(reply) else list(reply)
        self._reply = reply if callable(reply) else None
        self.requests: list[Request] = []

    def send(self, request: Request) -> Response | NoResponse:
        self.requests.append(request)
        if self._reply is not None:
            return self._reply(request)
        assert self._answers, f"unexpected {request.method} {request.target}"
        given: Response | NoResponse = self._answers.pop(0)
        return given

    @property
    def keys(self) -> list[str | None]:
        return [request.headers.get("Idempotency-Key") for request in self.requests]


class CuttingProxy:
    """Forwards every request, and loses every n-th answer after the server has given it.

    With ``swallows`` the connection stays open and nothing is delivered, otherwise it is closed.
    """

    def __init__(self, url: str, every: int = 3, *, swallows: bool = False) -> None:
        parts = urlsplit(url)
        self.swallows = swallows
        self._closing = threading.Event()
        self.every = every
        self.lost = 0
        # Of every request that the server has answered: method, path, key, status.
        self.seen: list[tuple[str, str, str | None, int]] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                upstream = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
                try:
                    upstream.request(self.command, self.path, body, dict(self.headers.items()))
                    response = upstream.getresponse()
                    content = response.read()
                finally:
                    upstream.close()
                key = self.headers.get("Idempotency-Key")
                if proxy._cuts((self.command, self.path, key, response.status)):
                    self.close_connection = True
                    if proxy.swallows:
                        proxy._closing.wait(300)
                    return
                self.send_response_only(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                if response.status != 204:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward  # noqa: N815

            def log_message(self, *_: Any) -> None:
                return

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """Killed clients break their connections."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _cuts(self, seen: tuple[str, str, str | None, int]) -> bool:
        with self._lock:
            self.seen.append(seen)
            cut = self.every > 0 and len(self.seen) % self.every == 0
            self.lost += cut
            return cut


class KillAt:
    """Kills this process when a fault point is reached for the n-th time."""

    def __init__(self, point: str | None, nth: int) -> None:
        self._point = point
        self._nth = nth
        self._reached: Counter[str] = Counter()

    def reach(self, point: str) -> None:
        self._reached[point] += 1
        if point == self._point and self._reached[point] == self._nth:
            os.kill(os.getpid(), signal.SIGKILL)


def fork_server() -> ForkServer:
    """Return a server that runs :func:`drain_once` in forked processes."""
    return ForkServer(__name__, cwd=ROOT)


def drain_once(
    *,
    server: str,
    path: str,
    user: str,
    token: str,
    point: str | None = None,
    nth: int = 1,
    lease_seconds: float = 0.15,
    max_seconds: float = 20,
    batch_items: int = 1,
) -> None:
    """Drain an outbox; the process kills itself when ``point`` is reached for the n-th time."""
    points = KillAt(point, nth)
    settings = QueueSettings(lease_seconds=lease_seconds, batch_items=batch_items)
    with (
        HttpTransport(server, timeout_seconds=10) as transport,
        OutboxQueue.open(path, settings=settings, fault_points=points) as queue,
    ):
        drain(
            queue,
            user,
            transport,
            token,
            max_seconds=max_seconds,
            retry=SOON,
            fault_points=points,
        )


def all_entries(queue: OutboxQueue, user: str) -> Iterator[Any]:
    after = None
    while page := queue.entries(user, limit=500, after=after):
        yield from page
        after = page[-1].id
