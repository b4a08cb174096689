"""A line to NATS that breaks while answers are awaited: the wait ends, and nobody complains."""

import asyncio
import gc
from typing import Any

import pytest

from holdfast.jobs.engines.broker import Broker
from holdfast.jobs.engines.stream import Names


async def nothing() -> Any:
    return None


def make_broker() -> Broker:
    return Broker(
        "nats://127.0.0.1:1",
        ["default"],
        find_names=lambda: asyncio.sleep(0, Names.of("JOBS", "jobs", b"secret")),
        client_name="test",
        ack_wait_seconds=30,
        replicas=None,
        options={},
        on_new_stream=nothing,
    )


async def test_answers_that_will_never_come_are_forgotten_without_a_word() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    broker = make_broker()
    publishing = asyncio.gather(*(asyncio.Event().wait() for _ in range(3)), return_exceptions=True)
    asyncio.get_running_loop().call_later(0.01, broker._lost.set)
    with pytest.raises(ConnectionResetError):
        await broker._unless_lost(publishing)
    del publishing
    gc.collect()
    assert complaints == []
