"""The load generator of batches: devices that send entries one by one, or 50 in a request.

Runs as a subprocess. Each line of its input is one task: port, seconds, ``single`` or ``batch``,
connections, and ``orders`` or ``activities``, such as ``8000 0.5 batch 4 orders``. Each line of its
output has the entries, the seconds, and the median milliseconds of a request. With ``beside``,
one device sends single requests beside others that send batches, and only it is counted.
"""

import asyncio
import json
import os
import statistics
import sys
import time
import uuid

ITEMS = 50
BODIES = {
    "orders": {"item": "a pair of walking boots, size 42, brown", "quantity": 3},
    "activities": {"title": "Visit", "notes": "Met the buyer; second sample", "minutes": 45},
}
PATHS = {"orders": "/orders", "activities": "/api/v1/activities"}

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _request(path: str, body: bytes, headers: bytes) -> bytes:
    token = os.environ.get("BENCH_TOKEN", "")
    if token:
        headers += b"authorization: Bearer %s\r\n" % token.encode()
    return (
        b"POST %s HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"%scontent-length: %d\r\n\r\n%s" % (path.encode(), headers, len(body), body)
    )


def _single(kind: str) -> bytes:
    key = b"idempotency-key: %s\r\n" % str(uuid.uuid4()).encode()
    return _request(PATHS[kind], json.dumps(BODIES[kind]).encode(), key)


def _batch(kind: str) -> bytes:
    item = {"method": "POST", "path": PATHS[kind], "body": BODIES[kind]}
    items = [item | {"key": str(uuid.uuid4())} for _ in range(ITEMS)]
    return _request("/batch", json.dumps({"items": items}).encode(), b"")


async def _send(stream: Stream, request: bytes, *, is_batch: bool) -> None:
    reader, writer = stream
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    at = head.index(b"content-length: ") + 16
    body = await reader.readexactly(int(head[at : head.index(b"\r", at)]))
    wanted, status = (ITEMS, b"http/1.1 200") if is_batch else (1, b"http/1.1 201")
    if not head.startswith(status) or (is_batch and body.count(b'"status":201') != wanted):
        raise RuntimeError((head + body[:500]).decode())


async def _device(stream: Stream, until: float, kind: str, mode: str, took: list[float]) -> None:
    while True:
        started = time.perf_counter()
        if started >= until:
            return
        is_batch = mode == "batch"
        await _send(stream, _batch(kind) if is_batch else _single(kind), is_batch=is_batch)
        took.append(time.perf_counter() - started)


async def run(port: int, seconds: float, mode: str, connections: int, kind: str) -> list[float]:
    """Return entries, seconds and the median milliseconds of a request."""
    beside = mode == "beside"
    streams = [
        await asyncio.open_connection("127.0.0.1", port) for _ in range(connections + beside)
    ]
    started, took, others = time.perf_counter(), list[float](), list[float]()
    until = started + seconds
    devices = [
        _device(stream, until, kind, "batch" if beside else mode, others if beside else took)
        for stream in streams[:connections]
    ]
    if beside:
        devices.append(_device(streams[-1], until, kind, "single", took))
    await asyncio.gather(*devices)
    entries = len(took) * (ITEMS if mode == "batch" else 1)
    result = [entries, time.perf_counter() - started, statistics.median(took) * 1000]
    for _, writer in streams:
        writer.close()
    return result


async def main() -> None:
    """Run tasks until the input ends."""
    for task in sys.stdin:
        port, seconds, mode, connections, kind = task.split()
        print(*await run(int(port), float(seconds), mode, int(connections), kind), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
