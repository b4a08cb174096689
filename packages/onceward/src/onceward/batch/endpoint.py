"""ASGI middleware with the batch endpoint: many guarded requests in one."""

import asyncio
import inspect
from base64 import b64encode
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, Final

import msgspec

from onceward.batch.options import BatchOptions
from onceward.batch.run import AloneEndpoints, BatchRun, ItemApp, ItemGuard, UndoneEndpoints
from onceward.core.error_formats import ErrorFormatter, render_error
from onceward.core.idempotency_record import Response
from onceward.core.policy import Policy
from onceward.errors import (
    BatchTooLargeError,
    BodyInvalidError,
    BodyTooLargeError,
    RequestError,
    StoreUnavailableError,
)
from onceward.frameworks.asgi import RouteTable, Scope, log_outage, send_and_close
from onceward.guard.batch_item import ITEM_KEY
from onceward.guard.idempotency import Idempotency
from onceward.guard.request_body import Disconnected, RequestBodies, RequestBody
from onceward.guard.request_head import Identify, RequestHead, path_in_app
from onceward.guard.response_buffer import Receive, Send, send_response
from onceward.ports import Clock
from onceward_protocol.batch import is_json, parse_batch
from onceward_protocol.error_codes import ErrorFormat

__all__ = ["BatchMiddleware"]

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
_REPLAYED: Final = b"idempotency-replayed"


class BatchMiddleware:
    """Serves ``POST`` of the batch path; passes everything else on to the guard."""

    def __init__(
        self,
        guard: ItemApp,
        *,
        options: BatchOptions,
        items_to: ItemApp | None,
        direct_to: ItemGuard | None = None,
        idempotency: Callable[[], Awaitable[Idempotency]],
        table: Callable[[], RouteTable],
        identify: Identify | None,
        clock: Clock,
        bodies: RequestBodies,
        error_format: ErrorFormat | ErrorFormatter,
    ) -> None:
        """``items_to`` gets the requests of items; None: the guard.

        With ``direct_to``, it gets only those that do not share a transaction.
        ``identify`` is None if only the app's own dependencies know the caller.
        """
        self._guard = guard
        self._options = options
        self._items_to = items_to or guard
        self._direct_to = direct_to
        self._idempotency = idempotency
        self._table = table
        self._identify = identify
        self._bodies = bodies
        self._error_format = error_format
        self._alone = AloneEndpoints(clock)
        self._undone = UndoneEndpoints(clock)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        # The body of a batch has the limits of a request's, with its own size.
        self._policy = Policy(name="batch", max_body_bytes=options.max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if (
            scope["type"] != "http"
            or ITEM_KEY in scope
            or scope["method"].upper() != "POST"
            or path_in_app(scope) != self._options.path
        ):
            await self._guard(scope, receive, send)
            return
        path = path_in_app(scope)
        head = RequestHead("POST", path, scope.get("query_string", b""), scope["headers"])
        scope["onceward.head"] = head
        error_format = scope.get("onceward.error_format", self._error_format)
        body = RequestBody(receive, head, self._policy, self._bodies)
        run: BatchRun | None = None
        try:
            texts = await self._read(head, body)
            idempotency = await self._idempotency()
            run = BatchRun(
                texts,
                scope=scope,
                app=self._items_to,
                direct_to=self._direct_to,
                find=self._table().find,
                identify=self._identify,
                idempotency=idempotency,
                options=self._options,
                alone=self._alone,
                undone=self._undone,
                slots=self._slots_for(idempotency),
                error_format=error_format,
            )
            responses = await run.run()
            if idempotency.faults:
                await idempotency.faults.reach("batch_before_response")
        except Disconnected:
            return
        except (RequestError, StoreUnavailableError) as error:
            if isinstance(error, StoreUnavailableError):
                log_outage(error, head)
            if not await body.is_there():
                send = send_and_close(send, body, scope)
            await send_response(send, render_error(error, error_format, head.request_id), head)
            return
        finally:
            body.release()
        content = _encode(responses, run.retry_after)
        await send_response(
            send, Response(200, ((b"content-type", b"application/json"),), content), head
        )
        if run.tasks:  # background tasks of the items, as after any response
            await asyncio.wait(run.tasks)

    async def _read(self, head: RequestHead, body: RequestBody) -> list[bytes]:
        """Sign the caller in, and return the texts of the items."""
        tenant: str | None = None
        try:
            body.check_declared_size()
            if self._identify is not None:
                found = self._identify(head)
                head.principal = await found if inspect.isawaitable(found) else found
                tenant = head.principal.tenant
            # A page of another origin can send everything but JSON with the user's cookies.
            if not is_json(head.content_type or ""):
                raise BodyInvalidError("a batch needs the header Content-Type: application/json")
            content = await body.read(tenant)
        except BodyTooLargeError:
            most = self._options.max_bytes
            raise BatchTooLargeError(
                f"a batch may have at most {most} bytes", details={"maxBytes": most}
            ) from None
        return await self._bodies.run(
            len(content), lambda: parse_batch(content, max_items=self._options.max_items)
        )

    def _slots_for(self, idempotency: Idempotency) -> asyncio.Semaphore:
        """Return what limits the chunks that run at once; a semaphore belongs to one loop."""
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
            is_replayed = is_replayed or raw == _REPLAYED
            text = value.decode("latin-1")
            headers[name] = f"{headers[name]}, {text}" if name in headers else text
        results.append(
            {
                "status": response.status,
                "headers": headers,
                "body": _body(headers.get("content-type", ""), response.body),
                "replayed": is_replayed,
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
