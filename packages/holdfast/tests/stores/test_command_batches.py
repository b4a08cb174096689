"""Commands that come at the same time are sent as one."""

import asyncio

import pytest

from holdfast.stores.command_batches import CommandBatches


class Doubler:
    """Doubles numbers; each batch waits until it may end."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_end = asyncio.Event()

    async def __call__(self, numbers: list[int]) -> list[int] | None:
        self.batches.append(numbers)
        await self.may_end.wait()
        if 0 in numbers:
            raise ZeroDivisionError
        return None if -1 in numbers else [2 * number for number in numbers]


async def test_items_that_come_while_batches_are_under_way_are_one_batch() -> None:
    doubler = Doubler()
    batches = CommandBatches(doubler)
    calls = []
    for number in range(1, 6):
        calls.append(asyncio.create_task(batches.add(number)))
        for _ in range(5):
            await asyncio.sleep(0)
    assert doubler.batches == [[1], [2]]
    doubler.may_end.set()
    assert await asyncio.gather(*calls) == [2, 4, 6, 8, 10]
    assert doubler.batches == [[1], [2], [3, 4, 5]]


async def test_items_of_one_turn_are_one_batch_and_a_cancelled_caller_disturbs_no_other() -> None:
    doubler = Doubler()
    batches = CommandBatches(doubler)
    calls = [asyncio.create_task(batches.add(number)) for number in (1, 2, 3)]
    while not doubler.batches:
        await asyncio.sleep(0)
    calls[1].cancel()
    doubler.may_end.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert doubler.batches == [[1, 2, 3]]
    assert (found[0], found[2]) == (2, 6)
    assert isinstance(found[1], asyncio.CancelledError)


async def test_an_error_reaches_the_callers_of_its_batch_only() -> None:
    doubler = Doubler()
    doubler.may_end.set()
    batches = CommandBatches(doubler)
    found = await asyncio.gather(batches.add(0), batches.add(1), return_exceptions=True)
    assert [type(error) for error in found] == [ZeroDivisionError] * 2
    assert await batches.add(4) == 8
    assert await batches.add(-1) is None


def test_batches_of_a_loop_that_has_ended_do_not_hold_up_another_one() -> None:
    batches = CommandBatches(Doubler())

    async def leave() -> None:
        for number in (1, 2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(batches.add(number), 0.01)

    async def double() -> int | None:
        doubler = Doubler()
        doubler.may_end.set()
        batches._run = doubler
        return await batches.add(21)

    asyncio.run(leave())
    assert asyncio.run(double()) == 42
