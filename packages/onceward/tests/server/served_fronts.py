"""The fronts of ``GuardContract`` behind a real server, called over sockets."""

import abc
import asyncio
import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any
from uuid import uuid4

import uvicorn
from werkzeug.serving import make_server
from werkzeug.wsgi import ClosingIterator

from onceward import Onceward
from onceward_testing.guard_shop import Shop
from onceward_testing.in_process_client import Request, Response
from packages.onceward.tests.server import guard_fronts
from packages.onceward.tests.server.guard_fronts import AsgiFront, DjangoFront, WsgiFront

HANG_SECONDS = 20


class SocketFront(abc.ABC):
    """Sends requests to a port, and returns when the app has ended, not when it has responded."""

    def __init__(self, onceward: Callable[[], Onceward[Any]]) -> None:
        self._onceward = onceward
        # By exchange: whether the app was called, and has ended.
        self._called: set[str] = set()
        self._ended: dict[str, threading.Event] = {}
        self.port = 0

    @property
    def onceward(self) -> Onceward[Any]:
        return self._onceward()

    def begin(self, exchange: str) -> None:
        """Note that the app is called."""
        self._called.add(exchange)

    def end(self, exchange: str) -> None:
        """Note that the app has ended a request."""
        self._ended[exchange].set()

    def send(self, request: Request) -> Response:
        exchange = uuid4().hex
        ended = self._ended[exchange] = threading.Event()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=HANG_SECONDS)
        try:
            connection.putrequest(request.method, request.path, skip_accept_encoding=True)
            for name, value in (*request.headers, ("X-Exchange", exchange)):
                connection.putheader(name, value)
            if request.declared is None:
                connection.putheader("Transfer-Encoding", "chunked")
            else:
                connection.putheader("Content-Length", str(request.declared))
            connection.endheaders()
            for chunk in request.chunks:
                connection.send(_framed(chunk) if request.declared is None else chunk)
            if request.declared is None and not (request.breaks_off or request.stalls):
                connection.send(b"0\r\n\r\n")
            if request.breaks_off or request.goes_away:
                return Response(0)
            response = _received(connection, request)
        except (HTTPException, ConnectionError) as error:
            return Response(0, error=error)
        else:
            if exchange not in self._called:  # the server has refused it
                ended.set()
            return response
        finally:
            connection.close()
            assert ended.wait(HANG_SECONDS)

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the server, and close its Onceward."""


def _framed(chunk: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(chunk), chunk) if chunk else b""


def _received(connection: HTTPConnection, request: Request) -> Response:
    response = connection.getresponse()
    if request.on_response is not None:
        request.on_response()
    headers = tuple((name.lower(), value) for name, value in response.getheaders())
    return Response(response.status, headers, response.read())


class UvicornFront(SocketFront):
    """An ASGI app on uvicorn."""

    def __init__(self, front: AsgiFront) -> None:
        super().__init__(lambda: front.onceward)
        front.stop_client()
        self._app = front.app
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._serve, "127.0.0.1", 0, interface="asgi3", log_config=None, lifespan="off"
            )
        )
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._started.wait(HANG_SECONDS)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def _run(self) -> None:
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._started.set()
        await serving
        await self.onceward.close()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = dict(scope["headers"])[b"x-exchange"].decode()
        self.begin(exchange)
        try:
            await self._app(scope, receive, send)
        finally:
            self.end(exchange)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(HANG_SECONDS)


class WerkzeugFront(SocketFront):
    """A WSGI app on Werkzeug's server, a thread for each request."""

    def __init__(self, front: WsgiFront | DjangoFront) -> None:
        super().__init__(lambda: front.onceward)
        self._front = front
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Any:
        exchange = environ["HTTP_X_EXCHANGE"]
        self.begin(exchange)
        try:
            body = self._front.app(environ, start_response)
        except BaseException:
            self.end(exchange)
            raise
        return ClosingIterator(body, lambda: self.end(exchange))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(HANG_SECONDS)
        self._server.server_close()
        self._front.close()


def fastapi_on_uvicorn(shop: Shop) -> UvicornFront:
    return UvicornFront(guard_fronts.fastapi_late(shop))


def flask_on_werkzeug(shop: Shop) -> WerkzeugFront:
    return WerkzeugFront(guard_fronts.flask_front(shop))


def django_on_werkzeug(shop: Shop) -> WerkzeugFront:
    return WerkzeugFront(guard_fronts.DjangoFront(shop))
