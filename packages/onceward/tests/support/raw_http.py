"""Raw HTTP connections that send at the same time, for races."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Self

from packages.onceward.tests.support.serving import ShopProcess


@dataclass(frozen=True)
class RawResponse:
    status_code: int
    head: bytes
    content: bytes

    @property
    def is_replayed(self) -> bool:
        return b"\r\nidempotency-replayed: true\r\n" in self.head

    def json(self) -> Any:
        return json.loads(self.content)


class RawConnections:
    """Open connections, distributed over the servers."""

    def __init__(self, shops: list[ShopProcess], count: int) -> None:
        self._ports = [shops[n % len(shops)].port for n in range(count)]
        self._streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> Self:
        self._streams = [await asyncio.open_connection("127.0.0.1", p) for p in self._ports]
        return self

    async def __aexit__(self, *_ended: object) -> None:
        for _, writer in self._streams:
            writer.close()
            await writer.wait_closed()

    async def post(self, path: str, bodies: list[dict[str, Any]], key: str) -> list[RawResponse]:
        """Send one body by each connection, all before the first response is read."""
        for (_, writer), body in zip(self._streams, bodies, strict=True):
            text = json.dumps(body).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nhost: shop\r\ncontent-type: application/json\r\n"
                f"idempotency-key: {key}\r\ncontent-length: {len(text)}\r\n\r\n"
            )
            writer.write(head.encode() + text)
        async with asyncio.timeout(30):
            return await asyncio.gather(*(_read_response(reader) for reader, _ in self._streams))


async def _read_response(reader: asyncio.StreamReader) -> RawResponse:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    at = head.index(b"content-length: ") + 16
    body = await reader.readexactly(int(head[at : head.index(b"\r", at)]))
    return RawResponse(int(head[9:12]), head, body)
