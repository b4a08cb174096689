"""Connections of a server process: too many, and heads that never end."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn

from onceward_services.cli.connection_limits import ConnectionLimits, raise_file_limit


async def respond(scope: Any, _receive: Any, send: Any) -> None:
    if scope["path"] == "/trailers":
        await _receive()
        await asyncio.sleep(0.1)
    if any(name == b"authorization" for name, _ in scope["headers"]):
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        return
    while scope["path"] == "/read" and (await _receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        await asyncio.sleep(0.3)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


class Served:
    """A server and the connections to it."""

    def __init__(self, limits: ConnectionLimits, port: int) -> None:
        self.limits = limits
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, sent: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        writer.write(sent)
        return reader

    async def get(self, path: str) -> tuple[asyncio.StreamReader, bytes]:
        reader = await self.connect(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return reader, await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)

    def write(self, more: bytes) -> None:
        self._writers[-1].write(more)

    async def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        self._writers.clear()


@asynccontextmanager
async def serving(*, most: int, head_seconds: float = 5.0, **options: Any) -> AsyncIterator[Served]:
    limits = ConnectionLimits(respond, max_connections=most, head_seconds=head_seconds, **options)
    config = uvicorn.Config(
        limits, port=0, http=limits.protocol(), ws="none", lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.005)
    served = Served(limits, server.servers[0].sockets[0].getsockname()[1])
    try:
        yield served
    finally:
        await served.hang_up()
        server.should_exit = True
        await asyncio.wait_for(task, 10)


async def test_above_the_limit_all_but_health_checks_get_503() -> None:
    async with serving(most=2) as served:
        for _ in range(2):
            await served.get("/x")
        reader, head = await served.get("/x")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"onceward-error: server.overloaded\r\n" in head.lower()
        assert b"retry-after: 1\r\n" in head
        assert await asyncio.wait_for(reader.read(), 5), "a body, then the end"
        for path in ("/healthz", "/readyz"):
            _, head = await served.get(path)
            assert head.startswith(b"HTTP/1.1 200")
        await served.hang_up()
        while served.limits.open:
            await asyncio.sleep(0.005)
        _, head = await served.get("/x")
        assert head.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_head_that_never_ends_closes_the_connection(*, is_first: bool) -> None:
    async with serving(most=9, head_seconds=0.1) as served:
        if is_first:
            reader = await served.connect(b"GET /x HTT")
        else:
            reader, _ = await served.get("/x")
            served.write(b"GET /x HTT")
        assert await asyncio.wait_for(reader.read(), 3) == b""
        assert served.limits.open == 0


async def test_a_connection_without_a_head_is_closed() -> None:
    async with serving(most=9, head_seconds=0.1) as served:
        reader = await served.connect(b"")
        assert await asyncio.wait_for(reader.read(), 3) == b""


async def test_the_deadline_of_the_head_does_not_end_a_running_request() -> None:
    async with serving(most=9, head_seconds=0.1) as served:
        _, head = await served.get("/slow")
        assert head.startswith(b"HTTP/1.1 200")


async def test_a_head_of_more_than_64_kib_is_431() -> None:
    async with serving(most=9) as served:
        reader = await served.connect(b"GET /x HTTP/1.1\r\n" + b"X-A: b\r\n" * 9000)
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 431")


async def test_a_body_that_never_ends_is_408_on_any_path() -> None:
    async with serving(most=9, body_seconds=0.1) as served:
        reader = await served.connect(
            b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n7 bytes"
        )
        for _ in range(3):  # what arrives later does not move the deadline
            await asyncio.sleep(0.04)
            served.write(b"x")
        assert (await asyncio.wait_for(reader.read(), 3)).startswith(b"HTTP/1.1 408")
        while served.limits.open:
            await asyncio.sleep(0.005)


async def test_a_body_above_the_limit_is_413_on_any_path() -> None:
    async with serving(most=9, max_body_bytes=1000) as served:
        reader = await served.connect(
            b"POST /read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n800\r\n"
        )
        await asyncio.sleep(0.05)
        served.write(b"x" * 1100)
        assert (await asyncio.wait_for(reader.read(), 3)).startswith(b"HTTP/1.1 413")


async def test_trailers_of_a_chunked_body_are_no_headers() -> None:
    async with serving(most=9) as served:
        reader = await served.connect(
            b"POST /trailers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
        )
        await asyncio.sleep(0.05)
        served.write(b"0\r\nAuthorization: Bearer x\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 200")


async def test_connections_of_one_address_are_bounded() -> None:
    async with serving(most=9, max_per_address=2) as served:
        for _ in range(2):
            _, head = await served.get("/x")
            assert head.startswith(b"HTTP/1.1 200")
        reader = await served.connect(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 3) == b""
        await served.hang_up()
        while served.limits.open:
            await asyncio.sleep(0.005)
        _, head = await served.get("/x")
        assert head.startswith(b"HTTP/1.1 200")


def test_file_limit_is_raised_for_the_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        raise_file_limit(600)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 920
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
