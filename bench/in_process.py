"""Requests to an app without a socket between, so that nothing hides what the guard costs."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.services.routers import service_router

CLIENTS = 16

Send = Callable[[], Awaitable[None]]


async def call(
    app: Any, method: str, path: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    """Send one request; returns status and body."""
    target, _, query = path.partition("?")
    status, chunks = 0, []
    told = {"content-type": "application/json", "content-length": str(len(body)), **headers}
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
        "headers": [(name.encode(), value.encode()) for name, value in told.items()],
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
def beside(app: Any, path: str) -> Iterator[Any]:
    """Give a router whose routes go before this one: an app looks through its routes in order."""
    router = service_router("bare")
    yield router
    paths = [getattr(route, "path", None) for route in app.router.routes]
    at = paths.index(path)
    app.router.routes[at:at] = router.routes


async def rate(send: Send, seconds: float) -> float:
    """Return requests per second of 16 clients, each sending one after another."""
    count = 0

    async def client() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await send()
            count += 1

    started = time.perf_counter()
    until = started + seconds
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return count / (time.perf_counter() - started)


async def versus(guarded: Send, bare: Send, rounds: int, seconds: float) -> dict[str, float]:
    """Race the two in turns; returns guarded ÷ bare with its spread."""
    rates: dict[Send, list[float]] = {guarded: [], bare: []}
    for send in rates:
        await rate(send, min(0.7, seconds))  # connections, caches and prepared statements warm up
    for number in range(rounds):
        for send in (guarded, bare) if number % 2 == 0 else (bare, guarded):
            rates[send].append(await rate(send, seconds))
    return {
        **spread([g / b for g, b in zip(rates[guarded], rates[bare], strict=True)]),
        "guarded_per_second": round(statistics.median(rates[guarded]), 1),
        "bare_per_second": round(statistics.median(rates[bare]), 1),
    }


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median of the rounds' own ratios, with the smallest and the largest."""
    return {
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }
