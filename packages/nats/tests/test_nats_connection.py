"""The connection to NATS: malformed URLs, and connections that break or are closed."""

import asyncio
import gc
from typing import Any

import pytest
from nats.aio.client import Client

from onceward.errors import ConfigurationError
from onceward_nats.connection import Broker, StreamNames, close_client
from onceward_nats.url import servers_of
from onceward_testing.servers import RealNats


async def nothing() -> Any:
    return None


def make_broker(url: str = "nats://127.0.0.1:1") -> Broker:
    return Broker(
        url,
        ["default"],
        find_names=lambda: asyncio.sleep(0, StreamNames.of("JOBS", "jobs", b"secret")),
        client_name="test",
        ack_wait_seconds=30,
        replicas=None,
        options={},
        on_new_stream=nothing,
        silent_after_seconds=5,
        on_silence=lambda _: None,
    )


async def test_responses_of_a_broken_connection_are_dropped_silently() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    broker = make_broker()
    publishing = asyncio.gather(*(asyncio.Event().wait() for _ in range(3)), return_exceptions=True)
    asyncio.get_running_loop().call_later(0.01, broker._lost.set)
    with pytest.raises(ConnectionResetError):
        await broker._unless_lost(publishing)
    del publishing
    gc.collect()
    assert complaints == []


async def test_connection_to_a_frozen_server_is_closed_even_if_closing_is_cancelled(
    own_nats: RealNats,
) -> None:
    client = Client()
    await client.connect(own_nats.url(), allow_reconnect=False)
    connection = client._transport._io_writer.transport  # type: ignore[union-attr]
    with own_nats.frozen():
        # More than the sockets hold: the client waits until the server has read it.
        connection.write(b"PUB full 16000000\r\n" + bytes(16_000_000))
        closing = asyncio.create_task(close_client(client))
        while client.is_connected:
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert connection.is_closing()
        await asyncio.sleep(0)
        assert connection.get_extra_info("socket").fileno() == -1


@pytest.mark.parametrize(
    "url",
    [
        "",
        " , ",
        "nats://[bad",
        "nats://127.0.0.1:abc",
        "nats://127.0.0.1:99999",
        "nats://",
        "http://127.0.0.1:4222",
        "nats://good:4222,nats://[bad",
    ],
)
async def test_malformed_nats_url_is_refused_before_connecting(url: str) -> None:
    with pytest.raises(ConfigurationError, match="nats://host:4222"):
        make_broker(url)


def test_several_nats_urls_are_accepted() -> None:
    given = "nats://me:p%40ss@a:4222, tls://b,[::1]:4222,localhost:4222 ,wss://c:443"
    assert servers_of(given) == [server.strip() for server in given.split(",")]
