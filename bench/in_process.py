"""Requests to an app without a socket between, so that nothing hides what the guard costs."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

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


def router_of(app: Any, path: str) -> Any:
    """Return the router that serves this path.

    A bare route belongs where the guarded one is: to find a route in a router costs twice as much
    as to find one in the app itself.
    """
    routers = [app.router]
    for router in routers:  # it grows while it is walked
        if router is not app.router and any(_path(route) == path for route in router.routes):
            return router
        routers += [r.original_router for r in router.routes if hasattr(r, "original_router")]
    raise LookupError(path)


def _path(route: Any) -> str | None:
    return getattr(route, "path", None)


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
