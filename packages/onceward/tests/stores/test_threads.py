"""What a cancelled call in a store's thread leaves behind."""

import asyncio
import threading
import time

import pytest

from onceward.stores.threads import StoreThreads


async def test_cancelled_call_waits_for_its_cancel_request() -> None:
    """A request that arrived later would cancel the next statement on the same connection."""
    threads = StoreThreads(1, wait_seconds=1.0)
    threads.open()
    started, ended = threading.Event(), threading.Event()
    arrived: list[bool] = []

    def statement() -> None:
        started.set()
        ended.wait(10)

    def cancel() -> None:
        ended.set()
        time.sleep(0.05)
        arrived.append(True)

    running = asyncio.ensure_future(threads.run(statement, cancel=cancel))
    try:
        await asyncio.to_thread(started.wait, 10)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert arrived == [True]
    finally:
        await threads.close(1.0)
