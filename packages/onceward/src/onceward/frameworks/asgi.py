"""ASGI middleware: the guard around an app, and its batch endpoint."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, Protocol

from onceward.batch.endpoint import BatchEndpoint
from onceward.batch.options import BatchOptions
from onceward.batch.run import ItemCall
from onceward.errors import (
    AbortedTransactionError,
    CommitUnknownError,
    OncewardError,
    StoreUnavailableError,
    StreamingResponseError,
    UsageError,
)
from onceward.guard.error_formats import INTERNAL, ErrorFormatter
from onceward.guard.execution import EXCHANGE_KEY, Exchange, Execution, ItemContext
from onceward.guard.pipeline import (
    Body,
    Pipeline,
    Reply,
    complete,
    id_headers,
    log_outage,
    log_unhandled,
    render,
    response_too_large,
)
from onceward.guard.request import Headers, RequestHead
from onceward.guard.request_body import Message, Receive, RequestBody, WholeBody
from onceward.guard.route_table import SAFE_METHODS, GuardTable, Match
from onceward.records import Response
from onceward.stores.errors import refusal_of
from onceward.stores.sessions.gate import end_visit
from onceward_protocol.error_codes import ErrorFormat

__all__ = [
    "ERROR_FORMAT_KEY",
    "SCOPE_KEY",
    "BatchMiddleware",
    "DirectCall",
    "GuardMiddleware",
    "LifespanMiddleware",
    "PreparedCall",
    "RequestIdMiddleware",
    "Send",
    "SendResponse",
    "server_is_stopping",
]


Scope = MutableMapping[str, Any]
# Sends one message.
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
# Sends a response as ASGI messages.
SendResponse = Callable[[Scope, Receive, Send], Awaitable[None]]

# The key under which handlers find their execution in the scope.
SCOPE_KEY: Final = "onceward"
# An app with several formats of errors sets this key, outside the guard or inside.
ERROR_FORMAT_KEY: Final = "onceward.error_format"

# Extensions of ASGI servers that add messages to a response: files sent by their path, trailers,
# pushed and early responses.
_RESPONSE_EXTENSIONS: Final = "http.response."
# Sends nothing to the client: test clients read the template and its context from it.
_DEBUG: Final = "http.response.debug"
_FIRST_ERROR: Final = 400
_SERVER_ERROR: Final = 500
# After one of these, the app serves no more requests.
_LAST_MESSAGES: Final = frozenset(
    {"lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed"}
)

_log = logging.getLogger("onceward.request")


# Calls a handler; returns its response, or what sends it. The latter raises what the app would
# raise, or sends the response of an exception handler.
PreparedCall = Callable[[Scope, Receive, Execution], Awaitable[Response | SendResponse]]


class DirectCall(Protocol):
    """Calls the handler of one route without the framework's own way to it."""

    def prepare(self, scope: Scope, path: str, body: bytes) -> PreparedCall | None:
        """Return the call; None if this request has to take the framework's way.

        Nothing of the app is called before. ``path`` is that in the app, without its prefix.
        """


class ResponseDiscarded(Exception):  # noqa: N818 - stops the app; not an error of it
    """Raised in the app by ``send`` when its response is not the one the client gets.

    Frameworks run background tasks after ``send`` of the last message returns; raising keeps
    them from running. An ordinary exception is enough: the response has started, so error
    handlers of a framework may run but send nothing (Starlette raises the exception again), and
    every message that an app sends after it is refused in the same way.
    """


class GuardedRoutes(Protocol):
    """The guarded routes of an app."""

    @property
    def known(self) -> GuardTable | None:
        """The table; None if it has to be made, because a route was added."""

    def table(self) -> GuardTable: ...


class GuardMiddleware:
    """Guards the routes of an app. Other requests pass through and get a request id."""

    def __init__(
        self,
        app: ASGIApp,
        pipeline: Pipeline,
        *,
        routes: GuardedRoutes,
        error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM,
        batch: BatchOptions | None = None,
        direct: Callable[[Any], DirectCall | None] | None = None,
    ) -> None:
        """Wrap an app. ``routes`` are first read when a request arrives.

        ``batch`` are the settings of the app's batch endpoint, which responses then name.
        ``direct`` finds what calls a route without the app around it, if there is such a thing.
        """
        # What is guarded.
        self.app = app
        # Serves guarded requests.
        self.pipeline = pipeline
        # Finds what calls a route directly; None: nothing does.
        self.direct = direct
        self._routes = routes
        self._error_format = error_format
        self._batch = batch
        # The prefix of the app that was last seen, and the header for it.
        self._known_batch_headers: tuple[str, Headers] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # In upper case by the standard, but not every server converts it, and many apps do.
        method: str = scope["method"].upper()
        path = path_in_app(scope)
        match = None
        if method not in SAFE_METHODS:
            match = (self._routes.known or self._routes.table()).find(method, path)
        if match is None and _is_guarded(scope):  # by the guard of an app that this one is part of
            await self.app(scope, receive, send)
            return
        exchange = self.begin(scope, method, path, match)
        if match is None:
            await self._serve_unguarded(exchange, scope, receive, send)
            return
        body = RequestBody(receive, exchange.head, match.policy, self.pipeline.bodies)
        try:
            call = GuardedCall(self, exchange, scope, match, body, receive, send)
            reply = await self.pipeline.serve(exchange, call)
            if reply is None:
                return
            if body.is_complete or await body.is_there():
                await send_reply(send, reply)
            else:
                await send_and_close(send, reply, body, scope)
        finally:
            body.release()
            if exchange.processor is not None and exchange.processor.is_gated:
                end_visit()

    def begin(self, scope: Scope, method: str, path: str, match: Match | None) -> Exchange:
        """Read the head of a request, and let dependencies and outer middleware find it."""
        found = scope.get(EXCHANGE_KEY)
        outer = found if isinstance(found, Exchange) else None
        item: ItemContext | None = found if outer is None else outer.item
        query, headers = scope.get("query_string", b""), scope["headers"]
        head = None if item is None else item.take_head(path, query, headers)
        if head is None:
            head = RequestHead(method, path, query, headers)
        # Set already in an app with several formats.
        error_format = scope.get(ERROR_FORMAT_KEY) or (
            self._error_format if outer is None else outer.error_format
        )
        added: Headers = ()
        if match is not None and self._batch is not None and item is None:
            added = self._batch_headers(scope.get("root_path", ""), self._batch)
        exchange = scope[EXCHANGE_KEY] = Exchange(
            head, match, self.pipeline, error_format=error_format, added_headers=added, item=item
        )
        return exchange

    def _batch_headers(self, root: str, batch: BatchOptions) -> Headers:
        """Return the header that names the batch endpoint; nearly always the same one."""
        known = self._known_batch_headers
        if known is None or known[0] != root:
            known = self._known_batch_headers = (root, (batch.header(root),))
        return known[1]

    async def _serve_unguarded(
        self, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response = _UnguardedResponse(exchange, send)
        try:
            await self.app(scope, receive, response.send)
        except ResponseDiscarded:  # the commit has failed, and the client knows
            pass
        except Exception as error:
            outage = refused = None
            if exchange.transaction is not None and not response.is_started:
                outage = exchange.transaction.outage_of(error)
                refused = outage or refusal_of(error)
            if refused is None:
                log_unhandled(error, exchange)
                raise
            if outage is not None:
                log_outage(outage, exchange)
            await send_reply(send, complete(render(refused, exchange), exchange))
        finally:
            if exchange.transaction is not None:
                await exchange.transaction.close()

    def serve_items(self, scope: Scope) -> "_ItemsOfGuard":
        """Return the server of items for the batch that has this scope, inside the guard."""
        return _ItemsOfGuard(self, scope)


class GuardedCall:
    """A guarded request to the app, and its response, which is held back until the commit."""

    __slots__ = (
        *("_deliver", "_exchange", "_guard", "_is_body_given", "_is_complete", "_is_discarded"),
        *("_match", "_parts", "_receive", "_scope", "_send", "_size", "_start", "_unclaimed"),
        *("body", "misuse"),
    )

    def __init__(  # noqa: PLR0917 - an ASGI call and what was read from it
        self,
        guard: GuardMiddleware,
        exchange: Exchange,
        scope: Scope,
        match: Match,
        body: Body,
        receive: Receive,
        send: Send,
        deliver: Callable[[Reply], None] | None = None,
    ) -> None:
        """``deliver`` takes the reply, in place of its messages."""
        # The body of the request.
        self.body = body
        # Why the response cannot be stored, if it cannot.
        self.misuse: UsageError | None = None
        self._guard = guard
        self._exchange = exchange
        self._match = match
        self._scope = scope
        self._receive = receive
        self._send = send
        self._deliver = deliver
        self._is_body_given = False
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._is_complete = False
        self._is_discarded = False
        self._unclaimed: _UnguardedResponse | None = None

    async def run(self, exchange: Exchange, content: bytes) -> Response | None:
        """Run the app. Its response is committed and sent when it is complete.

        A response is returned if nothing of the app is left to run after it.
        """
        scope, outcome = self._scope, exchange.outcome
        exchange.content = content
        if scope.get("extensions"):
            remove_response_extensions(scope)
        app: SendResponse = self._guard.app
        try:
            if isinstance(outcome, Execution):
                scope[SCOPE_KEY] = outcome
                direct = self._prepare_direct(exchange, content)
                if direct is not None:
                    given = await direct(scope, self.receive, outcome)
                    if isinstance(given, Response):
                        return given
                    app = given
            await app(scope, self.receive, self.send)
        except Exception:
            if not self._is_discarded:
                raise
        return None

    def _prepare_direct(self, exchange: Exchange, content: bytes) -> PreparedCall | None:
        """Return a call of the route's handler; None if the framework has to call it."""
        direct, source = self._guard.direct, self._match.source
        if direct is None or source is None:
            return None
        route = direct(source)
        return None if route is None else route.prepare(self._scope, exchange.head.path, content)

    async def receive(self) -> Message:
        """Give the app the body once, then the server's own messages."""
        if self._is_body_given:
            return await self._receive()
        self._is_body_given = True
        return {"type": "http.request", "body": self._exchange.content, "more_body": False}

    async def send(self, message: Message) -> None:  # noqa: C901 - one branch per kind
        """Take one ASGI message of the app; its last one waits for the commit."""
        exchange = self._exchange
        if exchange.outcome is None and self._match.is_claimed_late:
            await self._pass_on(message)
            return
        if self._is_discarded:
            raise ResponseDiscarded
        if self._is_complete:
            # Passed on: the ASGI server rejects what is invalid.
            await self._send(message)
            return
        kind = message["type"]
        if kind == "http.response.start":
            self._start = message
            if self._parts:
                self._parts, self._size = [], 0
        elif kind == "http.response.body":
            response = self._add_body(message)
            if response is None:
                return
            reply = await self._guard.pipeline.commit(exchange, response)
            if self._deliver is not None:
                self._deliver(reply)
            else:
                await send_reply(self._send, reply)
            self._is_complete = True
            self._is_discarded = not reply.may_go_on
            if self._is_discarded:
                raise ResponseDiscarded
        elif kind == _DEBUG:
            await self._send(message)
        else:
            self._refuse_streaming(kind)

    async def _pass_on(self, message: Message) -> None:
        """Send what the app responds without a claim, e.g. 401."""
        if self._unclaimed is None:
            self._unclaimed = _UnguardedResponse(self._exchange, self._send)
        if message["type"] == "http.response.start":
            head = Response(message["status"], tuple(message.get("headers", ())), b"")
            self._guard.pipeline.note_unclaimed(self._exchange, head)
        self._exchange.has_reply = True
        await self._unclaimed.send(message)

    def _add_body(self, message: Message) -> Response | None:
        chunk = message.get("body", b"")
        start = self._start
        assert start is not None  # noqa: S101 - ASGI: start comes first
        if message.get("more_body", False):
            if not any(name.lower() == b"content-length" for name, _ in start.get("headers", ())):
                self._refuse_streaming("no Content-Length")
            self._parts.append(chunk)
            self._count(len(chunk))
            return None
        self._count(len(chunk))
        body = b"".join((*self._parts, chunk)) if self._parts else bytes(chunk)
        headers = tuple([(name.lower(), value) for name, value in start.get("headers", ())])
        return Response(start["status"], headers, body)

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self._match.policy.max_response_bytes:
            self._discard(response_too_large(self._match))

    def _refuse_streaming(self, why: str) -> None:
        self._discard(
            StreamingResponseError(
                f"{self._match.endpoint} streams its response ({why}). The response of a "
                "guarded operation is stored with the transaction and must be complete: return a "
                "plain response."
            )
        )

    def _discard(self, misuse: UsageError) -> None:
        self.misuse = misuse
        self._is_discarded = True
        raise ResponseDiscarded


class _UnguardedResponse:
    """Adds the request's ids to a response that is not guarded.

    The transaction of its dependencies, if there is one, ends before the response is sent.
    """

    __slots__ = ("_exchange", "_is_discarded", "_send", "is_started")

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self._exchange = exchange
        self._send = send
        self._is_discarded = False
        self.is_started = False

    async def send(self, message: Message) -> None:
        """Send one message. Raises ``ResponseDiscarded`` if the client gets another response."""
        if self._is_discarded:
            raise ResponseDiscarded
        if message["type"] == "http.response.start":
            self.is_started = True
            exchange = self._exchange
            if exchange.transaction is not None:
                is_success = message["status"] < _FIRST_ERROR
                try:
                    await exchange.transaction.finish(is_success=is_success)
                except (StoreUnavailableError, CommitUnknownError) as error:
                    down = StoreUnavailableError(str(error))
                    log_outage(down, exchange)
                    await self._discard(down, error)
                except AbortedTransactionError as misuse:
                    _log.error("%s", misuse, extra=exchange.facts())
                    await self._discard(INTERNAL, misuse)
            message = _with_ids(message, exchange.head)
            message["headers"] += exchange.added_headers
        await self._send(message)

    async def _discard(self, error: StoreUnavailableError | str, cause: Exception) -> None:
        self._is_discarded = True
        exchange = self._exchange
        await send_reply(self._send, complete(render(error, exchange), exchange))
        raise ResponseDiscarded from cause


class RequestIdMiddleware:
    """Adds the request's ids to responses that are made outside the guard, such as a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_ids(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= _SERVER_ERROR:
                exchange = scope.get(EXCHANGE_KEY)
                if isinstance(exchange, Exchange):
                    message = _with_ids(message, exchange.head)
            await send(message)

        await self._app(scope, receive, send_with_ids if scope["type"] == "http" else send)


def _with_ids(message: Message, head: RequestHead) -> Message:
    headers = list(message.get("headers", ()))
    present = {name.lower() for name, _ in headers}
    headers += [pair for pair in id_headers(head) if pair[0] not in present]
    return {**message, "headers": headers}


class LifespanMiddleware:
    """Opens and closes the parts of ``Onceward`` with the ASGI lifespan of the app."""

    def __init__(
        self,
        app: ASGIApp,
        open_all: Callable[[], Awaitable[None]],
        close_all: Callable[[], Awaitable[None]],
    ) -> None:
        self._app = app
        self._open = open_all
        self._close = close_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        refusal: Exception | None = None

        async def receive_and_open() -> Message:
            nonlocal refusal
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self._open()
                except Exception as error:
                    refusal = error
                    raise
            return message

        async def close_and_send(message: Message) -> None:
            if message["type"] in _LAST_MESSAGES:
                await self._close()
            await send(message)

        try:
            await self._app(scope, receive_and_open, close_and_send)
        except Exception as error:
            # The message makes servers exit: without it they take the app for one without a
            # lifespan. The exception ends a test client, which waits for it.
            if error is refusal:
                await send({"type": "lifespan.startup.failed", "message": _one_line(error)})
            raise


def _one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, OncewardError) else f"{type(error).__name__}: {error}"
    return f"Onceward did not start: {' '.join(text.split())}"


# -- batches -----------------------------------------------------------------------------------


class BatchMiddleware:
    """Serves ``POST`` of the batch path; passes everything else on to the guard."""

    def __init__(
        self,
        guard: GuardMiddleware,
        endpoint: BatchEndpoint,
        *,
        items_to: ASGIApp | None,
        is_direct: bool = False,
    ) -> None:
        """``items_to`` gets the requests of items; None: the guard.

        With ``is_direct``, it gets only those that do not share a transaction.
        """
        self._guard = guard
        self._endpoint = endpoint
        self._items_to = items_to or guard
        self._is_direct = is_direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoint
        if (
            scope["type"] != "http"
            or _is_item(scope)
            or scope["method"].upper() != "POST"
            or path_in_app(scope) != endpoint.options.path
        ):
            await self._guard(scope, receive, send)
            return
        exchange = self._guard.begin(scope, "POST", endpoint.options.path, None)
        body = endpoint.body_of(receive, exchange.head)
        root: str = scope.get("root_path", "").rstrip("/")
        try:
            reply, tasks = await endpoint.serve(
                exchange,
                body,
                root=root,
                has_prefix=root != "" and scope["path"].startswith(f"{root}/"),
                items=_ItemsOfApp(self._items_to, scope),
                shared_items=self._guard.serve_items(scope) if self._is_direct else None,
            )
        finally:
            body.release()
        if reply is None:
            return
        if body.is_complete or await body.is_there():
            await send_reply(send, reply)
        else:
            await send_and_close(send, reply, body, scope)
        if tasks:  # background tasks of the items, as after any response
            await asyncio.wait(tasks)


class _ItemsOfApp:
    """Serves items of a batch by requests to a whole ASGI app."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        """``scope`` is that of the batch."""
        self._app = app
        self._scope = scope

    async def __call__(self, call: ItemCall) -> None:
        response = _ResponseOfItem(call)
        scope = self.scope_of(call)
        scope[EXCHANGE_KEY] = call.context
        await self._app(scope, response.receive, response.send)

    def scope_of(self, call: ItemCall) -> dict[str, Any]:
        """Return the scope of an item: that of the batch with another request in it."""
        request, state = call.request, self._scope.get("state")
        scope = {
            **self._scope,
            "method": request.method,
            "path": request.path,
            "raw_path": request.raw_path,
            "query_string": request.query,
            "headers": request.headers,
            "extensions": {},
        }
        scope.pop(EXCHANGE_KEY, None)
        scope.pop(ERROR_FORMAT_KEY, None)
        if isinstance(state, dict):
            scope["state"] = state.copy()
        return scope


class _ItemsOfGuard(_ItemsOfApp):
    """Serves items of a batch inside the guard: past the middleware around it."""

    def __init__(self, guard: GuardMiddleware, scope: Scope) -> None:
        super().__init__(guard, scope)
        self._guard = guard

    async def __call__(self, call: ItemCall) -> None:
        guard, match = self._guard, call.match
        scope = self.scope_of(call)
        scope[EXCHANGE_KEY] = call.context
        exchange = call.exchange = guard.begin(
            scope, call.request.method, path_in_app(scope), match
        )
        response = _ResponseOfItem(call, is_body_given=True)
        pipeline = guard.pipeline
        body = WholeBody(call.request.body, exchange.head, match.policy, pipeline.bodies)
        try:
            guarded = GuardedCall(
                guard, exchange, scope, match, body, response.receive, response.send, call.take
            )
            reply = await pipeline.serve(exchange, guarded)
            if reply is not None:
                call.take(reply)
        finally:
            body.release()
            if exchange.processor is not None and exchange.processor.is_gated:
                end_visit()


class _ResponseOfItem:
    """The messages of an app that serves an item."""

    __slots__ = ("_call", "_is_body_given", "_parts", "_start")

    def __init__(self, call: ItemCall, *, is_body_given: bool = False) -> None:
        self._call = call
        self._is_body_given = is_body_given
        self._start: Message | None = None
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        """Return the body once; then wait, as for a client that stays connected."""
        if not self._is_body_given:
            self._is_body_given = True
            return {"type": "http.request", "body": self._call.request.body, "more_body": False}
        await asyncio.get_running_loop().create_future()
        raise AssertionError  # never: the future has no result

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            self._parts.append(bytes(message.get("body", b"")))
            if not message.get("more_body", False):
                headers = tuple([(n.lower(), v) for n, v in self._start.get("headers", ())])
                self._call.complete(Response(self._start["status"], headers, b"".join(self._parts)))


def _is_guarded(scope: Scope) -> bool:
    found = scope.get(EXCHANGE_KEY)
    return isinstance(found, Exchange) and found.match is not None


def _is_item(scope: Scope) -> bool:
    found = scope.get(EXCHANGE_KEY)
    return isinstance(found, ItemContext) or (found is not None and found.item is not None)


# -- messages ----------------------------------------------------------------------------------


def path_in_app(scope: Mapping[str, Any]) -> str:
    """Return the path of a request without the prefix at which the app is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def remove_response_extensions(scope: Scope) -> None:
    """Remove what the server offers for responses and the guard cannot hold back or store.

    An app then uses plain messages: the bytes of a file in place of its path.
    """
    scope["extensions"] = {
        name: value
        for name, value in scope["extensions"].items()
        if name == _DEBUG or not name.startswith(_RESPONSE_EXTENSIONS)
    }


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a reply as messages."""
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    await send({"type": "http.response.body", "body": reply.body})


async def send_and_close(send: Send, reply: Reply, body: RequestBody, scope: Scope) -> None:
    """Send a reply at once, and close the connection some time later.

    The client is still sending its body. If the connection were closed now, the client would get
    an error of the network in place of the response.
    """
    headers = reply.headers
    if scope.get("http_version", "1.1").startswith("1"):
        headers = [*headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": True})
    await body.linger()
    await send({"type": "http.response.body", "body": b""})


def server_is_stopping() -> bool:
    """Return whether the server is shutting down.

    Uvicorn waits for open responses before it runs the lifespan shutdown, and a stream never ends
    without a reason. Only the signal handler's server object shows that a shutdown has begun.
    """
    server: Any = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(server, "should_exit", False))
