"""The numbers of strict sequences in a store. Part of ``StoreContract``."""

import asyncio
from collections.abc import Callable
from typing import Final

from onceward.errors import OncewardError
from onceward.ports import Claimed, Store
from onceward.stores.sequences import SequenceNumbers
from onceward_protocol.sequence import KNOWN_NUMBERS, Position, Stream
from onceward_testing.lifecycle_contract import LifecycleContract
from onceward_testing.samples import NOW, a_record, claimed

__all__ = ["SequenceContract"]

_PHONE: Final = Stream("tenant-1", "phone")
_RACERS: Final = 6


class SequenceContract(LifecycleContract):
    """Tests of the tables of sequences, which each adapter inherits."""

    async def test_numbers_of_a_client_commit_with_the_record_and_are_forgotten_in_the_end(
        self, store: Store
    ) -> None:
        numbers = SequenceNumbers(store)
        undone = await claimed(store, a_record().id)
        assert await numbers.use(_PHONE, 0, ["a"], NOW, undone.statements)
        await undone.rollback()
        assert await numbers.find(_PHONE, 1) == Position(0, None)
        unit = await claimed(store, a_record().id)
        assert await numbers.use(_PHONE, 0, ["a", "b"], NOW, unit.statements)
        await unit.commit(a_record(), None)
        assert await numbers.find(_PHONE, 1) == Position(2, "a")
        assert await numbers.find(_PHONE, 3) == Position(2, None)
        assert await numbers.find(Stream("tenant-2", "phone"), 1) == Position(0, None)
        assert await numbers.find_number(_PHONE, "b") == 2  # noqa: PLR2004
        assert await numbers.find_number(_PHONE, "c") is None
        for before in (0, 1, 3):  # not where the stream is
            unit = await claimed(store, a_record("other").id)
            assert not await numbers.use(_PHONE, before, ["c"], NOW, unit.statements)
            await unit.rollback()
        many = [f"hash {number}" for number in range(KNOWN_NUMBERS - 1)]
        unit = await claimed(store, a_record("other").id)
        assert await numbers.use(_PHONE, 2, many, NOW, unit.statements)
        await unit.commit(a_record("other"), None)
        assert await numbers.find(_PHONE, 1) == Position(KNOWN_NUMBERS + 1, None)
        assert await numbers.find(_PHONE, 2) == Position(KNOWN_NUMBERS + 1, "b")
        assert len(await numbers.find_keys(_PHONE, 1)) == KNOWN_NUMBERS

    async def test_a_number_is_used_once(
        self, store: Store, new_store: Callable[[], Store]
    ) -> None:
        other = new_store()
        await other.open()

        async def race(number: int) -> bool:
            own = store if number % 2 else other
            numbers, record = SequenceNumbers(own), a_record(f"racer-{number}")
            claim = await own.claim(record.id, NOW)
            assert isinstance(claim, Claimed)
            try:
                is_used = await numbers.use(_PHONE, 0, ["a"], NOW, claim.unit.statements)
                if is_used:
                    await claim.unit.commit(record, None)
            except OncewardError:
                return False
            finally:
                await claim.unit.rollback()
            return is_used

        try:
            used = await asyncio.gather(*(race(number) for number in range(_RACERS)))
        finally:
            await other.close()
        assert sum(used) == 1
        assert await SequenceNumbers(store).find(_PHONE, 1) == Position(1, "a")
