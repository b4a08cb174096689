"""The batch endpoint of a sync app: items run one by one, in the thread of the batch.

::

    request thread  ──batch────▶  loop: BatchMiddleware ──▶ item
       WSGI app     ◀──run──────  loop
                    ──response─▶  loop ──▶ next item

Each item is a request to the whole app, with its own transaction and record.
"""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from onceward.batch.endpoint import BatchMiddleware
from onceward.batch.options import BatchOptions
from onceward.batch.run import FindRoute
from onceward.core.idempotency_record import Response
from onceward.errors import ConfigurationError
from onceward.frameworks.sync_bridge import Bridge, Served
from onceward.guard.request_head import Identify
from onceward.guard.request_thread import QueueThread, run_in_request_thread, serving_in
from onceward.guard.response_buffer import Receive, Send

__all__ = ["BATCH_HEADER_KEY", "SyncBatch", "batch_options"]

Environ = dict[str, Any]

# The key of the value of ``Onceward-Batch`` in the ASGI scope of a guarded request.
BATCH_HEADER_KEY: Final = "onceward.batch"
# Frameworks keep what they have read of the request of the batch under these names.
_OF_FRAMEWORKS: Final = ("werkzeug.", "flask.", "HTTP_", "CONTENT_")
_OF_SERVER: Final = ("REQUEST_URI", "RAW_URI", "wsgi.file_wrapper", "wsgi.input_terminated")


class SyncBatch:
    """Serves batches of one app."""

    def __init__(
        self, bridge: Bridge, options: BatchOptions, *, identify: Identify | None = None
    ) -> None:
        """``identify`` is None if only the app knows the caller, in the request of each item."""
        self._bridge = bridge
        self._identify = identify
        # The response of a sync request ends its thread's work: it cannot wait for a shared commit.
        self.options = replace(options, chunk_items=1)

    def header(self, script_name: str) -> bytes:
        """Return the value of ``Onceward-Batch``."""
        return f"{script_name}{self.options.path}; items={self.options.max_items}".encode("latin-1")

    def serve(
        self,
        scope: dict[str, Any],
        environ: Environ,
        *,
        read: Callable[[int], bytes],
        find: FindRoute,
        run: Callable[[Environ], Response],
    ) -> Served:
        """Run a batch, whose head is ``scope`` and ``environ``.

        ``read`` returns its body, up to a limit. ``run`` serves the request of an item. Both are
        called in this thread.
        """
        prefix = environ.get("SCRIPT_NAME", "").rstrip("/")
        options = replace(self.options, path=scope["path"])
        scope = {**scope, "path": f"{prefix}{scope['path']}", "root_path": prefix}
        messages: list[Any] = []

        async def receive() -> dict[str, Any]:
            body = await run_in_request_thread(lambda: read(options.max_bytes))
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        async def run_item(scope: Any, receive: Receive, send: Send) -> None:
            body = (await receive())["body"]
            item = _item_environ(environ, scope, prefix, body)
            response = await run_in_request_thread(lambda: run(item))
            start = {"status": response.status, "headers": response.headers}
            await send({"type": "http.response.start", **start})
            await send({"type": "http.response.body", "body": response.body})

        onceward = self._bridge.onceward
        middleware = BatchMiddleware(
            run_item,
            options=options,
            items_to=run_item,
            idempotency=self._bridge.ready,
            table=lambda: _Table(find),
            identify=self._identify,
            clock=onceward.clock,
            bodies=onceward.runtime.bodies,
            error_format=onceward.runtime.config.error_format,
        )
        thread = QueueThread(self._bridge.loop)
        with serving_in(thread):
            thread.wait(middleware(scope, receive, send))
        start = messages[0]
        content = b"".join(message.get("body", b"") for message in messages[1:])
        return Served(start["status"], list(start["headers"]), content, is_own=False)


class _Table:
    """Finds guarded routes by a function."""

    def __init__(self, find: FindRoute) -> None:
        self.find = find


def batch_options(batch: str | BatchOptions | None) -> BatchOptions | None:
    """Return the options of a batch endpoint; a text is its path."""
    if batch is None or isinstance(batch, BatchOptions):
        return batch
    if isinstance(batch, str):
        return BatchOptions(batch)
    raise ConfigurationError(f'batch must be a path such as "/batch", or BatchOptions, not {batch}')


def _item_environ(environ: Environ, scope: Any, prefix: str, body: bytes) -> Environ:
    """Return the environ of an item: that of the batch with another request in it."""
    item = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_FRAMEWORKS) and name not in _OF_SERVER
    }
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1").upper().replace("-", "_")
        if not name.startswith("CONTENT_"):
            name = f"HTTP_{name}"
        text = value.decode("latin-1")
        item[name] = f"{item[name]},{text}" if name in item else text
    path: str = scope["path"].removeprefix(prefix)
    return item | {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": environ.get("SCRIPT_NAME", ""),
        "PATH_INFO": path.encode().decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
    }
