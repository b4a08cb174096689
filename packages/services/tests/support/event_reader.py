"""Reads a stream of server-sent events of an app incrementally."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class EventReader:
    """The blocks of one stream. httpx's ASGI transport would wait for its end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message.get("more_body"):
            await self._chunks.put(message["body"])
        else:
            await self._chunks.put(None)

    async def block(self) -> str | None:
        """Return the next block, or None at the end."""
        chunk = await asyncio.wait_for(self._chunks.get(), 30)
        return None if chunk is None else chunk.decode()

    async def event(self) -> tuple[str, str, Any]:
        """Return id, type and data of the next event; comments are skipped."""
        while True:
            block = await self.block()
            assert block is not None, "the stream has ended"
            if block.startswith(":"):
                continue
            fields = dict(line.split(": ", 1) for line in block.removesuffix("\n\n").split("\n"))
            return fields["id"], fields["event"], json.loads(fields["data"])


@asynccontextmanager
async def listening(
    app: Any, path: str, headers: dict[str, str], query: str = ""
) -> AsyncIterator[EventReader]:
    """Open a stream of the app, and disconnect at the end."""
    reader, gone = EventReader(), asyncio.Event()
    sent = {"accept": "text/event-stream"} | headers
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "headers": [(k.lower().encode(), v.encode()) for k, v in sent.items()],
        "server": ("onceward", 80),
        "client": ("device", 1),
    }

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.create_task(app(scope, receive, reader.send))
    try:
        assert await reader.block() == "retry: 2000\n\n"
        yield reader
    finally:
        gone.set()
        await asyncio.wait_for(task, 30)
