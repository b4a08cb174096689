"""A TCP proxy that behaves as a distant server: a round trip, and a window that grows from ten.

Each direction of a connection sends at most its congestion window and then waits for
acknowledgements, one round trip after each segment. The window begins with ten segments of 1,460
bytes (RFC 6928) and grows by every acknowledged byte (slow start, without loss). After each idle
time-out (the round trip and 200 ms) it is halved, down to where it began: so does Linux, and with
it Android (RFC 2861). A new connection costs one round trip before its first byte.

``python -m onceward_lab.bench.slow_link --upstream 8000`` prints the port it listens on and serves
until it is terminated.
"""

import argparse
import asyncio
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

__all__ = ["SEGMENT_BYTES", "SlowLink", "slow_link"]

SEGMENT_BYTES: Final = 1460
_FIRST_SEGMENTS: Final = 10
_LEAST_DEVIATION_SECONDS: Final = 0.2
"""The least that Linux adds to the round trip for the retransmission time-out."""


class _Direction:
    """One direction of a connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        round_trip_seconds: float,
        opens_at: float,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._round_trip = round_trip_seconds
        self._opens_at = opens_at
        self._window = _FIRST_SEGMENTS * SEGMENT_BYTES
        # When each segment is acknowledged, and its size.
        self._unacknowledged: deque[tuple[float, int]] = deque()
        self._in_transit = 0
        self._last_sent = opens_at
        self._arriving: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def run(self) -> None:
        """Forward until the sender closes."""
        delivery = asyncio.ensure_future(self._deliver())
        try:
            await _sleep_until(self._opens_at)
            while data := await self._reader.read(65_536):
                for start in range(0, len(data), SEGMENT_BYTES):
                    await self._send(data[start : start + SEGMENT_BYTES])
            self._arriving.put_nowait((_now() + self._round_trip / 2, b""))
            await delivery
        finally:
            delivery.cancel()

    async def _send(self, segment: bytes) -> None:
        self._acknowledge()
        idle, timeout = _now() - self._last_sent, self._round_trip + _LEAST_DEVIATION_SECONDS
        halvings = int(idle / timeout)
        if halvings:
            first = _FIRST_SEGMENTS * SEGMENT_BYTES
            self._window = max(first, self._window >> min(halvings, 32))
        while self._in_transit + len(segment) > self._window:
            await _sleep_until(self._unacknowledged[0][0])
            self._acknowledge()
        now = self._last_sent = _now()
        self._unacknowledged.append((now + self._round_trip, len(segment)))
        self._in_transit += len(segment)
        self._arriving.put_nowait((now + self._round_trip / 2, segment))

    def _acknowledge(self) -> None:
        now = _now()
        while self._unacknowledged and self._unacknowledged[0][0] <= now:
            size = self._unacknowledged.popleft()[1]
            self._in_transit -= size
            self._window += size

    async def _deliver(self) -> None:
        while True:
            at, segment = await self._arriving.get()
            await _sleep_until(at)
            if not segment:
                self._writer.close()
                return
            self._writer.write(segment)


class SlowLink:
    """The proxy. ``run`` serves until it is cancelled."""

    def __init__(self, upstream_port: int, round_trip_seconds: float) -> None:
        self._upstream_port = upstream_port
        self._round_trip = round_trip_seconds

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        opens_at = _now() + self._round_trip
        upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        directions = (
            _Direction(reader, upstream[1], self._round_trip, opens_at),
            _Direction(upstream[0], writer, self._round_trip, opens_at),
        )
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(*(direction.run() for direction in directions))
        for each in (writer, upstream[1]):
            each.close()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _sleep_until(at: float) -> None:
    left = at - _now()
    if left > 0:
        await asyncio.sleep(left)


@contextmanager
def slow_link(upstream_port: int, round_trip_seconds: float) -> Iterator[str]:
    """Run a proxy in its own process; yields its URL."""
    command = [sys.executable, "-m", __name__, "--upstream", str(upstream_port)]
    command += ["--round-trip", str(round_trip_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


async def _main(options: argparse.Namespace) -> None:
    link = SlowLink(options.upstream, options.round_trip)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", type=int, required=True, help="port of the server")
    parser.add_argument("--round-trip", type=float, default=0.05, help="seconds")
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args()))
