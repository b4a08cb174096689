"""Sends commands that come at the same time as one: a command costs more than what it transfers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

__all__ = ["CommandBatches"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# What comes while so many batches are under way waits for one of them, and is the next batch.
_MAX_RUNNING: Final = 2
_MAX_ITEMS: Final = 500


class CommandBatches(Generic[ItemT, ResultT]):
    """Collects items and passes them to ``run`` in batches. For one event loop at a time.

    The items of one turn of the event loop are one batch. An idle connection is used at once: a
    single item waits for nothing but the end of the turn.
    """

    def __init__(self, run: Callable[[list[ItemT]], Awaitable[Sequence[ResultT] | None]]) -> None:
        """``run`` returns one result per item in their order, or None if there are none."""
        self._run = run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[tuple[ItemT, asyncio.Future[ResultT | None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, item: ItemT) -> ResultT | None:
        """Return the result for this item; None without one. Raises what ``run`` raises."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # those of another loop ended with it
            self._loop, self._waiting, self._tasks = loop, [], set()
        future: asyncio.Future[ResultT | None] = loop.create_future()
        self._waiting.append((item, future))
        if len(self._tasks) < _MAX_RUNNING:
            task = loop.create_task(self._run_batches())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _run_batches(self) -> None:
        await asyncio.sleep(0)  # until the other requests of this turn have added theirs
        while self._waiting:
            batch = self._waiting[:_MAX_ITEMS]
            del self._waiting[:_MAX_ITEMS]
            try:
                results = await self._run([item for item, _ in batch])
            except BaseException as error:
                for _, future in batch:
                    if not future.done():
                        if isinstance(error, Exception):
                            future.set_exception(error)
                        else:
                            future.cancel()
                if not isinstance(error, Exception):
                    raise
                continue
            for at, (_, future) in enumerate(batch):
                if not future.done():  # its caller was cancelled
                    future.set_result(None if results is None else results[at])
