"""Clients that call an ASGI or WSGI app in this process: no sockets, no server.

They send what clients and servers do in the worst case: bodies in pieces, bodies that break off or
stall, and responses that nobody reads.
"""

import asyncio
import io
import json
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import unquote_to_bytes

__all__ = ["AsgiClient", "Request", "Response", "WsgiClient"]

T = TypeVar("T")

_SECONDS: Final = 60.0
"""A response that takes longer is an error of the test."""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request."""

    # In upper case.
    method: str
    # With its query.
    path: str
    # Without those about the body's length.
    headers: tuple[tuple[str, str], ...] = ()
    # The body, in the pieces in which it arrives.
    chunks: tuple[bytes, ...] = (b"",)
    # The Content-Length; None sends the body chunked.
    declared: int | None = 0
    # The connection ends after these chunks, before the body is complete.
    breaks_off: bool = False
    # Nothing arrives after these chunks, but the connection stays open. ASGI only.
    stalls: bool = False
    # The client disconnects when it has sent its body: the response cannot be sent.
    goes_away: bool = False
    # Called when the response begins.
    on_response: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """A response, as the client received it."""

    # 0: nothing, because the client went away.
    status: int
    # With names in lower case.
    headers: tuple[tuple[str, str], ...] = ()
    # Complete.
    body: bytes = b""
    # What the app raised. A server sends 500 for it, unless the app has responded.
    error: BaseException | None = None

    def header(self, name: str) -> str | None:
        """Return the first header of this name."""
        return next((value for key, value in self.headers if key == name.lower()), None)

    @property
    def is_replay(self) -> bool:
        """Whether the guard has marked it as a replay."""
        return self.header("idempotency-replayed") == "true"

    def json(self) -> Any:
        """Decode the body."""
        return json.loads(self.body)


class WsgiClient:
    """Calls a WSGI app in the thread of the caller."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app

    def send(self, request: Request) -> Response:
        """Send a request and return the response."""
        started: list[tuple[str, list[tuple[str, str]]]] = []

        def start_response(status: str, headers: list[tuple[str, str]], _error: Any = None) -> Any:
            if request.on_response is not None:
                request.on_response()
            started[:] = [(status, headers)]
            return lambda _data: None

        try:
            chunks = self._app(_environ(request), start_response)
            try:
                body = b"" if request.goes_away else b"".join(chunks)
            finally:
                getattr(chunks, "close", lambda: None)()
        except Exception as error:  # noqa: BLE001 - as a server does
            return Response(500, error=error)
        if request.goes_away:
            return Response(0)
        status, headers = started[0]
        names = tuple((name.lower(), value.strip()) for name, value in headers)
        return Response(int(status.split(" ", 1)[0]), names, body)


def _environ(request: Request) -> dict[str, Any]:
    path, _, query = request.path.partition("?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query,
        "SERVER_NAME": "testserver",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(b"".join(request.chunks)),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "HTTP_HOST": "testserver",
    }
    for name, value in request.headers:
        field = name.upper().replace("-", "_")
        field = field if field == "CONTENT_TYPE" else f"HTTP_{field}"
        environ[field] = f"{environ[field]},{value}" if field in environ else value
    if request.declared is None:
        environ |= {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
    else:
        environ["CONTENT_LENGTH"] = str(request.declared)
    return environ


class AsgiClient:
    """Calls an ASGI app on an event loop in its own thread, for callers in any thread."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="asgi-client")
        self._thread.start()

    def send(self, request: Request) -> Response:
        """Send a request and return the response."""
        return self.wait(self._exchange(request))

    def wait(self, work: Awaitable[T]) -> T:
        """Run a coroutine on the loop of the app."""

        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_SECONDS)

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SECONDS)

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    async def _exchange(self, request: Request) -> Response:
        sent: list[Any] = []
        to_app = _messages(request)
        is_done = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if to_app:
                return to_app.pop(0)
            if not request.goes_away:
                await is_done.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if request.on_response is not None and message["type"] == "http.response.start":
                request.on_response()
            if request.goes_away:
                raise OSError("the client has gone away")
            sent.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                is_done.set()

        raised: Exception | None = None
        try:
            await self._app(_scope(request), receive, send)
        except Exception as error:  # noqa: BLE001 - as a server does
            raised = error
        if not sent:
            return Response(0 if raised is None or request.goes_away else 500, error=raised)
        headers = tuple(
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in sent[0].get("headers", ())
        )
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return Response(sent[0]["status"], headers, body, raised)


def _messages(request: Request) -> list[dict[str, Any]]:
    is_cut = request.breaks_off or request.stalls
    last = len(request.chunks) - 1
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": is_cut or number < last}
        for number, chunk in enumerate(request.chunks)
    ]
    if request.breaks_off:
        messages.append({"type": "http.disconnect"})
    return messages


def _scope(request: Request) -> dict[str, Any]:
    path, _, query = request.path.partition("?")
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in request.headers
    ]
    if request.declared is None:
        headers.append((b"transfer-encoding", b"chunked"))
    else:
        headers.append((b"content-length", str(request.declared).encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "server": ("testserver", 80),
        "client": ("testclient", 1),
        "method": request.method,
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(b"host", b"testserver"), *headers],
    }
