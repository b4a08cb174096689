"""The proxy loses requests and responses as configured."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from onceward_lab.proxy import Exchange, FaultyProxy, NetworkFaults


class CountingServer:
    """A server that counts the requests it gets."""

    def __init__(self) -> None:
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                self.requests += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def served(
    faults: NetworkFaults,
) -> AsyncIterator[tuple[CountingServer, FaultyProxy, list[Exchange]]]:
    counter, seen = CountingServer(), list[Exchange]()

    async def record(exchange: Exchange) -> None:
        seen.append(exchange)

    server = await asyncio.start_server(counter.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, FaultyProxy(port, faults=faults, on_exchange=record) as proxy:
        yield counter, proxy, seen


async def post(proxy: FaultyProxy) -> str | None:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.post(proxy.url, content=b"{}")).text
        except httpx.TransportError:
            return None


async def test_without_faults_requests_and_responses_pass() -> None:
    async with served(NetworkFaults()) as (server, proxy, seen):
        async with httpx.AsyncClient() as client:
            texts = [(await client.post(proxy.url, content=b"{}")).text for _ in range(3)]
        assert texts == ["done"] * 3
        assert (server.requests, proxy.requests) == (3, 3)
        assert [(one.line, one.status, one.response_body) for one in seen] == [
            ("POST /", 200, b"done")
        ] * 3


@pytest.mark.parametrize(
    ("faults", "reaches"),
    [
        (NetworkFaults(response_lost=1), True),
        (NetworkFaults(response_truncated=1), True),
        (NetworkFaults(disconnected=1), True),
        (NetworkFaults(request_lost=1), False),
    ],
    ids=["response_lost", "response_truncated", "disconnected", "request_lost"],
)
async def test_each_fault_hides_the_response_and_only_a_lost_request_misses_the_server(
    faults: NetworkFaults, reaches: bool
) -> None:
    async with served(faults) as (server, proxy, _):
        assert await post(proxy) is None
        async with asyncio.timeout(5):
            while reaches and not server.requests:
                await asyncio.sleep(0)
        assert server.requests == int(reaches)


async def test_without_a_server_there_is_no_response() -> None:
    async with FaultyProxy(1) as proxy:
        assert await post(proxy) is None
        assert proxy.outcomes == {"no_response": 1}


async def test_connections_are_refused_until_the_proxy_is_entered() -> None:
    proxy = FaultyProxy(1)
    assert await post(proxy) is None
    async with proxy:
        assert proxy.requests == 0
