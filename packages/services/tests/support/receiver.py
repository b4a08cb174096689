"""A server that receives webhooks, and responds as a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h11


@dataclass
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiver:
    """Responds with the statuses of ``responses``, then with 204.

    A text instead of a status is sent as it is; None never responds. ``respond`` replaces all of
    it: it returns a status and a body.
    """

    url: str = ""
    received: list[Received] = field(default_factory=list)
    responses: list[int | bytes | None] = field(default_factory=list)
    headers: list[tuple[str, str]] = field(default_factory=list)
    respond: Callable[[Received], tuple[int, Any]] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        try:
            request = await _read(connection, reader)
            if request is None:
                return
            self.received.append(request)
            body = b""
            if self.respond is not None:
                status, found = self.respond(request)
                body = json.dumps(found).encode()
            else:
                response = self.responses.pop(0) if self.responses else 204
                if response is None:
                    await asyncio.Event().wait()
                if isinstance(response, bytes):
                    writer.write(response)
                    await writer.drain()
                    return
                status = int(response or 0)
            headers = [("content-length", str(len(body))), ("connection", "close"), *self.headers]
            writer.write(connection.send(h11.Response(status_code=status, headers=headers)) or b"")
            if body:
                writer.write(connection.send(h11.Data(body)) or b"")
            writer.write(connection.send(h11.EndOfMessage()) or b"")
            await writer.drain()
        finally:
            writer.close()


async def _read(connection: h11.Connection, reader: asyncio.StreamReader) -> Received | None:
    head, body = None, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(65_536))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            headers = {name.decode(): value.decode() for name, value in head.headers}
            return Received(head.target.decode(), headers, body)
        else:
            return None


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """Run a receiver on a free port of this machine."""
    receiver = Receiver()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await receiver.serve(reader, writer)
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    try:
        yield receiver
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
