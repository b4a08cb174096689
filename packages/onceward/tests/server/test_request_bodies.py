"""The thread in which large bodies are read."""

import asyncio
import gc
import time

from onceward.guard.request_body import LARGE_BODY_BYTES, RequestBodies


async def test_thread_pauses_for_as_long_as_it_has_worked() -> None:
    bodies = RequestBodies(None)
    spans: list[tuple[float, float]] = []

    def work() -> None:
        started, end = time.perf_counter(), time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        spans.append((started, time.perf_counter()))

    size = LARGE_BODY_BYTES + 1
    await asyncio.gather(bodies.run(size, work), bodies.run(size, work))
    bodies.close()
    (_, first_end), (second_start, _) = spans
    assert second_start - first_end >= 0.03


async def test_collector_is_off_only_while_a_large_body_is_read() -> None:
    bodies = RequestBodies(None)
    assert gc.isenabled()
    assert await bodies.run_and_forget(LARGE_BODY_BYTES, gc.isenabled)
    assert not await bodies.run_and_forget(LARGE_BODY_BYTES + 1, gc.isenabled)
    assert gc.isenabled()
    bodies.close()
