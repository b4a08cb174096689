"""The load: a fixed number of connections, each sending one request after another."""

import asyncio
import json
import sys
import time
import uuid

BODY = {"item": "a pair of walking boots, size 42, brown", "quantity": 3}


async def _client(port: int, until: float, keys: list[str] | None) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(BODY).encode()
    done = 0
    try:
        while time.perf_counter() < until:
            key = keys[done % len(keys)] if keys else str(uuid.uuid4())
            writer.write(
                b"POST /orders HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
                b"idempotency-key: %s\r\ncontent-length: %d\r\n\r\n%s"
                % (key.encode(), len(body), body)
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
    finally:
        writer.close()
    return done


async def run(port: int, seconds: float, connections: int, replay: bool) -> float:
    """Return requests per second. A replaying client sends its own few keys over and over."""
    keys = [[str(uuid.uuid4()) for _ in range(8)] if replay else None for _ in range(connections)]
    if replay:
        await asyncio.gather(*(_client(port, time.perf_counter() + 0.5, k) for k in keys))
    started = time.perf_counter()
    counts = await asyncio.gather(*(_client(port, started + seconds, k) for k in keys))
    return sum(counts) / (time.perf_counter() - started)


if __name__ == "__main__":
    import uvloop

    port, seconds, connections, replay = sys.argv[1:5]
    rate = uvloop.run(run(int(port), float(seconds), int(connections), replay == "replay"))
    print(rate)
