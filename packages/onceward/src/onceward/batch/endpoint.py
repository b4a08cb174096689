"""The batch endpoint: many guarded requests in one."""

import asyncio
import inspect
from base64 import b64encode
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, Final

import msgspec

from onceward.batch.alone_endpoints import AloneEndpoints, UndoneEndpoints
from onceward.batch.options import BatchOptions
from onceward.batch.run import (
    BatchRun,
    BatchSettings,
    FindRoute,
    ItemServer,
)
from onceward.errors import (
    BatchTooLargeError,
    BodyInvalidError,
    BodyTooLargeError,
    RequestError,
    StoreUnavailableError,
)
from onceward.guard.execution import Exchange
from onceward.guard.idempotency import Idempotency
from onceward.guard.pipeline import REPLAYED_HEADER, Reply, complete, log_outage, render
from onceward.guard.policy import Policy
from onceward.guard.request import Identify, RequestHead
from onceward.guard.request_body import (
    Disconnected,
    Receive,
    RequestBodies,
    RequestBody,
    WholeBody,
)
from onceward.ports import Clock
from onceward.records import Response
from onceward_protocol.batch import is_json, parse_batch
from onceward_protocol.effect import EFFECT_HEADER

# About the exchange or for browsers: the response of the batch has its own.
_UNREPEATED: Final = frozenset(
    {
        *("cache-control", "connection", "content-length", "content-security-policy", "date"),
        *("cross-origin-opener-policy", "cross-origin-resource-policy", "onceward-batch"),
        *("keep-alive", "permissions-policy", "referrer-policy", "server", "set-cookie"),
        *("strict-transport-security", "transfer-encoding", "vary", "x-content-type-options"),
        "x-frame-options",
    }
)


class BatchEndpoint:
    """Runs the batches of an app. Sends nothing: it returns the reply."""

    def __init__(
        self,
        options: BatchOptions,
        *,
        ready: Callable[[], Awaitable[Idempotency]],
        find: FindRoute,
        identify: Identify | None,
        clock: Clock,
        bodies: RequestBodies,
    ) -> None:
        """``identify`` is None if only the app's own dependencies know the caller."""
        self.options = options
        self._ready = ready
        self._find = find
        self._identify = identify
        self._bodies = bodies
        self._alone = AloneEndpoints(clock)
        self._undone = UndoneEndpoints(clock)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        # The body of a batch has the limits of a request's, with its own size.
        self._policy = Policy(name="batch", max_body_bytes=options.max_bytes)

    def body_of(self, receive: Receive, head: RequestHead) -> RequestBody:
        return RequestBody(receive, head, self._policy, self._bodies)

    def whole_body_of(self, read: Callable[[], bytes], head: RequestHead) -> WholeBody:
        """Return the body of a batch that a function reads in the thread of the request."""
        return WholeBody(read, head, self._policy, self._bodies)

    async def serve(
        self,
        exchange: Exchange,
        body: RequestBody | WholeBody,
        *,
        root: str,
        has_prefix: bool,
        items: ItemServer,
        shared_items: ItemServer | None = None,
    ) -> tuple[Reply | None, set[asyncio.Task[None]]]:
        """Run one batch; return the reply, None if the client has left, and tasks that go on.

        ``root`` and ``has_prefix`` are those of ``BatchRun``. ``shared_items`` serves requests
        that share a transaction; None: ``items`` does.
        """
        try:
            texts = await self._read(exchange, body)
            idempotency = await self._ready()
            settings = BatchSettings(
                options=self.options,
                idempotency=idempotency,
                find=self._find,
                identify=self._identify,
                alone=self._alone,
                undone=self._undone,
                slots=self._slots_for(idempotency),
                error_format=exchange.error_format,
                items=items,
                shared_items=shared_items,
            )
            run = BatchRun(texts, exchange.head, settings, root=root, has_prefix=has_prefix)
            responses = await run.run()
            if idempotency.faults:
                await idempotency.faults.reach("batch_before_response")
        except Disconnected:
            return None, set()
        except (RequestError, StoreUnavailableError) as error:
            if isinstance(error, StoreUnavailableError):
                log_outage(error, exchange)
            return complete(render(error, exchange), exchange), set()
        content = _encode(responses, run.retry_after)
        response = Response(200, ((b"content-type", b"application/json"),), content)
        return complete(response, exchange), run.tasks

    async def _read(self, exchange: Exchange, body: RequestBody | WholeBody) -> list[bytes]:
        """Sign the caller in, and return the texts of the items."""
        tenant: str | None = None
        try:
            body.check_declared_size()
            if self._identify is not None:
                found = self._identify(exchange.head)
                exchange.principal = await found if inspect.isawaitable(found) else found
                tenant = exchange.principal.tenant
            # A page of another origin can send everything but JSON with the user's cookies.
            if not is_json(exchange.head.content_type or ""):
                raise BodyInvalidError("a batch needs the header Content-Type: application/json")
            content = await body.read(tenant)
        except BodyTooLargeError:
            most = self.options.max_bytes
            raise BatchTooLargeError(
                f"a batch may have at most {most} bytes", details={"maxBytes": most}
            ) from None
        return await self._bodies.run(
            len(content), lambda: parse_batch(content, max_items=self.options.max_items)
        )

    def _slots_for(self, idempotency: Idempotency) -> asyncio.Semaphore:
        """Return the limit of chunks that run at once; a semaphore belongs to one loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            store = idempotency.store
            self._slots = loop, asyncio.Semaphore(store.max_chunks)
        return self._slots[1]


def _encode(responses: list[Response], retry_after: float | None) -> bytes:
    results = []
    for response in responses:
        headers: dict[str, str] = {}
        is_replayed = False
        for raw, value in response.headers:
            name = _repeated_name(raw)
            if name is None:
                continue
            is_replayed = is_replayed or raw == REPLAYED_HEADER
            text = value.decode("latin-1")
            headers[name] = f"{headers[name]}, {text}" if name in headers else text
        results.append(
            {
                "status": response.status,
                "headers": headers,
                "body": _body(headers.get("content-type", ""), response.body),
                "replayed": is_replayed,
                "effect": headers.get(EFFECT_HEADER),
            }
        )
    return msgspec.json.encode({"results": results, "retry_after": retry_after})


@lru_cache(maxsize=256)
def _repeated_name(raw: bytes) -> str | None:
    """Return the name of a header; None for one that a result does not have."""
    name = raw.decode("latin-1")
    is_left_out = name in _UNREPEATED or name.startswith("access-control-")
    return None if is_left_out else name


def _body(content_type: str, body: bytes) -> Any:
    """Return a body as JSON, byte for byte if it is JSON."""
    if not body:
        return None
    if is_json(content_type):
        try:
            msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        else:
            return msgspec.Raw(body)
    return {"base64": b64encode(body).decode()}
