"""A server that gives in to every attack."""

import asyncio
import base64
import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
from redis.asyncio import Redis

__all__ = ["weak_server"]

_LARGE = 100_000
# Executions of other tenants after which a tenant gets nothing.
_QUOTA = 30

_REPLAYED = "Idempotency-Replayed: true"


class WeakServer:
    """Speaks HTTP/1.1 leniently, verifies nothing, limits nothing, and locks nothing."""

    def __init__(self, redis_url: str) -> None:
        self.url = ""
        self._redis: Any = Redis.from_url(redis_url)
        self._stored: dict[str, bytes] = {}
        # Tenant and key of each execution.
        self._executed: list[tuple[str, str]] = []
        self._connections: set[asyncio.Task[Any]] = set()
        self._commands: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def close(self) -> None:
        """End all connections first: one that is served would open another one to Redis."""
        self._is_closed = True
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.gather(*self._commands, return_exceptions=True)
        await self._redis.aclose()

    async def _run(self, command: Any) -> Any:
        """Run a command of Redis to its end: if it is cancelled, it may leave its connection."""
        if self._is_closed:
            command.close()
            raise ConnectionError("the server is closed")
        task = asyncio.ensure_future(command)
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)
        return await asyncio.shield(task)

    async def forget(self, key: str) -> None:
        """Lose what was executed with a key, as a restore does; Redis keeps its response."""
        del self._stored[key]
        self._executed = [each for each in self._executed if each[1] != key]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    first, *lines = head.decode("latin-1").split("\r\n")
                    headers = {
                        name.strip().lower(): value.strip()
                        for name, _, value in (line.partition(":") for line in lines)
                    }
                    try:
                        length = max(0, int(headers.get("content-length", "0")))
                    except ValueError:
                        length = 0
                    body = b""
                    while len(body) < length and (part := await reader.read(length - len(body))):
                        body += part
                    status, sent, location = await self._respond(first, headers, body)
                    writer.write(
                        f"HTTP/1.1 {status} X\r\nContent-Length: {len(sent)}\r\n"
                        f"X-Request-ID: {headers.get('x-request-id', '')}\r\n"
                        f"Location: {location}\r\n"
                        f"{_REPLAYED if status == 201 and not location else 'A: b'}"
                        "\r\n\r\n".encode("latin-1")
                        + sent
                    )
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _respond(
        self, first: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, str]:
        if not first.startswith("POST"):
            return 200, b"{}", ""
        if len(body) > 64 * 1024:
            time.sleep(0.1)  # it reads large bodies in the event loop, and slowly
        key = headers.get("idempotency-key", "")
        claims = _claims(headers.get("authorization", ""))
        tenant = "" if claims is None else str(claims.get("org"))
        # The second request of a tenant does not find the record, as in a race.
        if key in self._stored and self._executed.count((tenant, key)) != 1:
            return 201, self._stored[key], ""
        if claims is None:
            return 401, b"", ""
        try:
            return await self._execute(tenant, key, headers, body)
        except json.JSONDecodeError:
            return 400, b"", ""
        except Exception:  # noqa: BLE001 - as careless servers do
            return 500, b"", ""

    async def _execute(
        self, tenant: str, key: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, str]:
        name = f"{tenant}:{key}"
        cached = await self._run(self._redis.get(name)) if key else None
        if cached is not None and (tenant, key) not in self._executed:
            return 201, json.loads(cached)["response"].encode(), ""
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        document = json.loads(body or b"{}")
        if len(body) > _LARGE:
            time.sleep(0.05)
        if "\x00" in str(document.get("attack")):
            raise ValueError("the database refuses NUL")
        others = [each for each, _ in self._executed if each != tenant]
        if len(others) > _QUOTA:
            return 503, b"", ""
        self._executed.append((tenant, key))
        response = f'{{"id":{len(self._executed)}}}'
        if key:
            self._stored[key] = response.encode()
            await self._run(self._redis.set(name, json.dumps({"response": response})))
        return 201, response.encode(), f"http://{headers.get('host')}/{len(self._executed)}"


def _claims(authorization: str) -> dict[str, Any] | None:
    """Return the claims of a token, whatever its signature is."""
    try:
        payload = authorization.split(".")[1]
    except IndexError:
        return None
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=="))
    return claims


@asynccontextmanager
async def weak_server(redis_url: str) -> AsyncIterator[WeakServer]:
    """Run the server in this event loop."""
    weak = WeakServer(redis_url)
    server = await asyncio.start_server(weak.serve, "127.0.0.1", 0, limit=2**24)
    async with server:
        url = weak.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with httpx.AsyncClient() as client:
            await client.get(url)
        yield weak
    await weak.close()
