"""ASGI requests without a socket, so that the cost of the guard is not hidden."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from onceward_services.routing import service_router

CLIENTS = 16
SLICES = 6

Send = Callable[[], Awaitable[None]]


async def call(
    app: Any, method: str, path: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    """Send one request; returns status and body."""
    target, _, query = path.partition("?")
    status, chunks = 0, []
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": target,
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "server": ("bench", 80),
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(chunks)


@contextmanager
def routes_before(app: Any, path: str) -> Iterator[Any]:
    """Yield a router whose routes are inserted before ``path``: routes match in order."""
    router = service_router("bare")
    yield router
    paths = [getattr(route, "path", None) for route in app.router.routes]
    at = paths.index(path)
    app.router.routes[at:at] = router.routes


async def run(send: Send, seconds: float) -> tuple[int, float]:
    """Run 16 clients, each sending one request at a time; returns requests and seconds."""
    count = 0

    async def client() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await send()
            count += 1

    started = time.perf_counter()
    until = started + seconds
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return count, time.perf_counter() - started


async def compare(guarded: Send, bare: Send, rounds: int, seconds: float) -> dict[str, float]:
    """Run both in turns; returns guarded ÷ bare with its spread.

    A round consists of short alternating slices, so that other load on the machine hits both.
    """
    rates: dict[Send, list[float]] = {guarded: [], bare: []}
    for send in rates:
        await run(send, min(0.7, seconds))  # warms up connections, caches and prepared statements
    for _ in range(rounds):
        done = {guarded: (0, 0.0), bare: (0, 0.0)}
        for number in range(SLICES):
            for send in (guarded, bare) if number % 2 == 0 else (bare, guarded):
                count, took = await run(send, seconds / SLICES)
                done[send] = done[send][0] + count, done[send][1] + took
        for send, (count, took) in done.items():
            rates[send].append(count / took)
    return {
        **spread([g / b for g, b in zip(rates[guarded], rates[bare], strict=True)]),
        "guarded_per_second": round(statistics.median(rates[guarded]), 1),
        "bare_per_second": round(statistics.median(rates[bare]), 1),
    }


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median, smallest and largest ratio of the rounds."""
    return {
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }
