"""The proxy loses what it is told to lose, at the moment it is told to lose it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from holdfast_lab.proxy import CuttingProxy, Exchange, Weather


class Counter:
    """A server that counts what reaches it."""

    def __init__(self) -> None:
        self.asked = 0

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                self.asked += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def served(weather: Weather) -> AsyncIterator[tuple[Counter, CuttingProxy, list[Exchange]]]:
    counter, seen = Counter(), list[Exchange]()

    async def note(exchange: Exchange) -> None:
        seen.append(exchange)

    server = await asyncio.start_server(counter.meet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, CuttingProxy(port, weather=weather, on_exchange=note) as proxy:
        yield counter, proxy, seen


async def ask(proxy: CuttingProxy) -> str | None:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.post(proxy.url, content=b"{}")).text
        except httpx.TransportError:
            return None


async def test_in_calm_weather_requests_and_answers_pass() -> None:
    async with served(Weather()) as (server, proxy, seen):
        async with httpx.AsyncClient() as client:
            texts = [(await client.post(proxy.url, content=b"{}")).text for _ in range(3)]
        assert texts == ["done"] * 3
        assert (server.asked, proxy.requests) == (3, 3)
        assert [(one.line, one.status, one.answer_body) for one in seen] == [
            ("POST /", 200, b"done")
        ] * 3


@pytest.mark.parametrize(
    ("weather", "reaches"),
    [
        (Weather(lose_answer=1), True),
        (Weather(cut_answer=1), True),
        (Weather(drop_midway=1), True),
        (Weather(cut_request=1), False),
    ],
    ids=["lose_answer", "cut_answer", "drop_midway", "cut_request"],
)
async def test_what_is_lost_is_not_heard_and_has_reached_the_server_or_not(
    weather: Weather, reaches: bool
) -> None:
    async with served(weather) as (server, proxy, _):
        assert await ask(proxy) is None
        async with asyncio.timeout(5):
            while reaches and not server.asked:
                await asyncio.sleep(0)
        assert server.asked == int(reaches)


async def test_without_a_server_there_is_no_answer() -> None:
    async with CuttingProxy(1) as proxy:
        assert await ask(proxy) is None
        assert proxy.fates == {"no_answer": 1}


async def test_before_it_is_opened_nobody_is_there() -> None:
    proxy = CuttingProxy(1)
    assert await ask(proxy) is None
    async with proxy:
        assert proxy.requests == 0
