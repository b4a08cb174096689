"""The load generator: 16 connections, each sending one request after another.

Runs as a subprocess. Each line of its input is one task: port, seconds, and ``unique`` or
``replay``, such as ``8000 0.15 unique``.
"""

import asyncio
import json
import sys
import time
import uuid

BODY = json.dumps({"item": "a pair of walking boots, size 42, brown", "quantity": 3}).encode()
CONNECTIONS = 16
# In replay mode each client repeats so many keys.
KEYS = 8

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _client(stream: Stream, until: float, keys: list[str] | None) -> int:
    reader, writer = stream
    done = 0
    while time.perf_counter() < until:
        key = keys[done % len(keys)] if keys else str(uuid.uuid4())
        writer.write(
            b"POST /orders HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"idempotency-key: %s\r\ncontent-length: %d\r\n\r\n%s" % (key.encode(), len(BODY), BODY)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 201"):
            raise RuntimeError(head.decode())
        if b"transfer-encoding: chunked" in head:
            await reader.readuntil(b"0\r\n\r\n")
        else:
            at = head.index(b"content-length: ") + 16
            await reader.readexactly(int(head[at : head.index(b"\r", at)]))
        done += 1
    return done


async def run(port: int, seconds: float, keys: list[list[str]] | None) -> tuple[int, float]:
    """Return requests and seconds, counted from when all connections are open."""
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS)]
    started = time.perf_counter()
    counts = await asyncio.gather(
        *(
            _client(stream, started + seconds, keys[number] if keys else None)
            for number, stream in enumerate(streams)
        )
    )
    took = time.perf_counter() - started
    for _, writer in streams:
        writer.close()
    return sum(counts), took


async def main() -> None:
    """Run tasks until the input ends. All replay tasks of a port use the same keys."""
    keys_of: dict[str, list[list[str]]] = {}
    for task in sys.stdin:
        port, seconds, kind = task.split()
        keys = None
        if kind == "replay":
            if port not in keys_of:
                keys_of[port] = [
                    [str(uuid.uuid4()) for _ in range(KEYS)] for _ in range(CONNECTIONS)
                ]
            keys = keys_of[port]
        print(*await run(int(port), float(seconds), keys), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
