"""What every store must do, as a pytest suite: for Holdfast's own adapters and for yours.

Inherit, and say how to make a store on a database of its own::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def new_store(self, tmp_path):
            return lambda: MyStore(tmp_path / "test.db")

``new_store`` is called several times in one test: each call gives another store, not yet open, on
the same, new database, as another process would have. Adapters whose transaction is not a
``holdfast.Transaction`` override ``execute``. Needs ``pytest-asyncio``.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import ClassVar, Final

import pytest
from msgspec.structs import replace

from holdfast.core.decision import Held
from holdfast.core.idempotency_record import Record, RecordId
from holdfast.errors import SupersededError
from holdfast.ports import Claimed, Found, RecordQuery, Store
from holdfast.testing.lifecycle_contract import OpeningContract
from holdfast.testing.samples import (
    AWKWARD_NAMES,
    BODIES,
    NOW,
    a_record,
    an_audit_event,
    claimed,
    commit,
)

__all__ = ["NOW", "StoreContract", "a_record", "an_audit_event"]

_DAY: Final = timedelta(days=1)
_RACERS: Final = 30


class StoreContract(OpeningContract):
    """Tests that an adapter of ``ports.Store`` inherits."""

    rounds: ClassVar[int] = 50
    """How often the races are run; fewer where every statement is slow."""

    # -- looking up and claiming -----------------------------------------------------------

    async def test_an_unknown_key_is_not_found(self, store: Store) -> None:
        """Nothing is made up."""
        assert await store.find(a_record().id, NOW) is None

    async def test_an_unknown_key_can_be_claimed(self, store: Store) -> None:
        """And a claim given back leaves nothing."""
        unit = await claimed(store, a_record().id)
        assert not unit.superseded
        await unit.rollback()
        assert await store.find(a_record().id, NOW) is None

    async def test_a_committed_record_comes_back_to_the_last_bit(self, store: Store) -> None:
        """Body, headers, times, ids: what was put is what is found."""
        record = a_record(audit_id="audit-1")
        await commit(store, record, audit=True)
        found = await store.find(record.id, NOW)
        assert found == record
        assert found is not None
        assert isinstance(found.body, bytes)
        assert found.created_at.utcoffset() == timedelta(0)

    async def test_times_in_another_zone_are_the_same_instant(self, store: Store) -> None:
        """An offset is a way of writing, not another time."""
        zone = datetime.now().astimezone(tz=None).tzinfo
        record = a_record(created_at=NOW.astimezone(zone))
        await commit(store, record)
        assert await store.find(record.id, NOW) == record

    async def test_a_committed_key_is_found_when_claimed(self, store: Store) -> None:
        """The claim gives the record, and no unit that could leak."""
        record = a_record()
        await commit(store, record)
        claim = await store.claim(record.id, NOW)
        assert isinstance(claim, Found)
        assert claim.record == record

    async def test_a_key_in_use_is_held_or_judged_at_the_commit(self, store: Store) -> None:
        """A second claim never leads to a second commit."""
        record = a_record()
        first = await claimed(store, record.id)
        await self.write_business_row(first, "first")
        second = await store.claim(record.id, NOW)
        await first.commit(record, None)
        if not isinstance(second, Held):
            assert isinstance(second, Claimed)
            with pytest.raises(SupersededError):
                await second.unit.commit(replace(record, body=b"second"), None)
        assert await store.find(record.id, NOW) == record

    async def test_a_superseded_unit_writes_nothing(self, store: Store) -> None:
        """Its business rows go with it, whether the handler or the commit finds out."""
        record = a_record()
        first = await claimed(store, record.id)
        second = await store.claim(record.id, NOW)
        await self.write_business_row(first, "first")
        await first.commit(record, None)
        if isinstance(second, Claimed):
            with suppress(SupersededError):  # some find out here, all at the commit
                await self.write_business_row(second.unit, "second")
            with pytest.raises(SupersededError):
                await second.unit.commit(replace(record, body=b"second"), None)
            await second.unit.rollback()
        assert await self.count_business_rows(store, "first") == 1
        assert await self.count_business_rows(store, "second") == 0

    # -- one transaction -------------------------------------------------------------------

    async def test_business_rows_and_record_commit_together(self, store: Store) -> None:
        """Both are there afterwards."""
        record = a_record()
        unit = await claimed(store, record.id)
        await self.write_business_row(unit, "row")
        assert await self.count_business_rows(store, "row") == 0
        await unit.commit(record, None)
        assert await self.count_business_rows(store, "row") == 1
        assert await store.find(record.id, NOW) == record

    async def test_a_rollback_undoes_everything_and_frees_the_key(self, store: Store) -> None:
        """The same key may try again, at once."""
        record = a_record()
        unit = await claimed(store, record.id)
        await self.write_business_row(unit, "row")
        await unit.rollback()
        await unit.rollback()
        assert await self.count_business_rows(store, "row") == 0
        again = await claimed(store, record.id)
        await self.write_business_row(again, "row")
        await again.commit(record, None)
        assert await self.count_business_rows(store, "row") == 1

    async def test_a_cancelled_handler_frees_the_key(self, store: Store) -> None:
        """Wherever the cancellation strikes, the key and the store stay usable."""
        record = a_record()

        async def handler() -> None:
            unit = await claimed(store, record.id)
            try:
                while True:
                    await self.write_business_row(unit, "row")
            finally:
                await unit.rollback()

        for pause in (0.0, 0.001, 0.005, 0.02):
            task = asyncio.create_task(handler())
            await asyncio.sleep(pause)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await commit(store, record)
        assert await self.count_business_rows(store, "row") == 0

    async def test_a_unit_without_a_key_commits_its_rows(self, store: Store) -> None:
        """Where the key is optional and none was sent."""
        unit = await store.begin()
        await self.write_business_row(unit, "row")
        await unit.commit(None, None)
        undone = await store.begin()
        await self.write_business_row(undone, "undone")
        await undone.rollback()
        assert await self.count_business_rows(store, "row") == 1
        assert await self.count_business_rows(store, "undone") == 0

    async def test_a_handler_that_writes_nothing_still_leaves_its_record(
        self, store: Store
    ) -> None:
        """The answer is what is remembered."""
        record = a_record()
        await commit(store, record)
        assert await store.find(record.id, NOW) == record

    async def test_the_audit_event_shares_the_transaction(self, store: Store) -> None:
        """Committed and rolled back with the rest, with and without a record."""
        record = a_record(audit_id="audit-1")
        unit = await claimed(store, record.id)
        await unit.rollback()
        assert await self.count_audit_events(store) == 0
        await commit(store, record, audit=True)
        rows = await store.read("SELECT * FROM audit_events")
        assert len(rows) == 1
        told = dict(rows[0])
        told.pop("created_at")
        event = an_audit_event(record)
        assert told == {name: getattr(event, name) for name in told}
        without_key = await store.begin()
        await without_key.commit(None, replace(event, id="audit-2"))
        assert await self.count_audit_events(store) == 2  # noqa: PLR2004

    async def test_an_audit_event_that_cannot_be_written_undoes_the_rest(
        self, store: Store
    ) -> None:
        """No effect without its trace."""
        first = a_record("first", audit_id="audit-1")
        await commit(store, first, audit=True)
        second = a_record("second", audit_id="audit-1")
        unit = await claimed(store, second.id)
        await self.write_business_row(unit, "row")
        with pytest.raises(Exception):  # noqa: B017, PT011 - the driver's own, or the store's
            await unit.commit(second, an_audit_event(second))
        assert await store.find(second.id, NOW) is None
        assert await self.count_business_rows(store, "row") == 0

    # -- expiry ----------------------------------------------------------------------------

    async def test_an_expired_record_does_not_count(self, store: Store) -> None:
        """At its last instant it is gone, a microsecond earlier it is there."""
        record = a_record()
        await commit(store, record)
        last = record.expires_at - timedelta(microseconds=1)
        assert await store.find(record.id, last) == record
        assert await store.find(record.id, record.expires_at) is None
        claim = await store.claim(record.id, record.expires_at)
        assert isinstance(claim, Claimed)
        await claim.unit.rollback()

    async def test_an_expired_record_is_written_over(self, store: Store) -> None:
        """Swept or not."""
        old = a_record()
        await commit(store, old)
        new = a_record(created_at=old.expires_at, body=b"new", audit_id="audit-2")
        await commit(store, new, now=old.expires_at, audit=True)
        assert await store.find(new.id, new.created_at) == new

    async def test_a_live_record_is_never_written_over(self, store: Store) -> None:
        """Even when the claim was made on a clock that runs ahead."""
        record = a_record()
        await commit(store, record)
        late = await claimed(store, record.id, now=record.expires_at)
        await self.write_business_row(late, "row")
        with pytest.raises(SupersededError):
            await late.commit(replace(record, body=b"late"), None)
        assert await store.find(record.id, NOW) == record
        assert await self.count_business_rows(store, "row") == 0

    async def test_the_sweep_takes_only_what_has_expired_in_batches(self, store: Store) -> None:
        """And sweeping again finds nothing."""
        for number in range(7):
            await commit(store, a_record(f"old-{number}", life=timedelta(hours=1)))
        live = a_record("live")
        await commit(store, live)
        later = NOW + timedelta(hours=1)
        assert await store.sweep(NOW, 3) == 0
        assert [await store.sweep(later, 3) for _ in range(4)] == [3, 3, 1, 0]
        assert await store.records(RecordQuery()) == [live]

    async def test_two_sweeps_at_once_delete_each_record_once(
        self, store: Store, new_store: Callable[[], Store]
    ) -> None:
        """Several processes may sweep the same database."""
        count = 40
        for number in range(count):
            await commit(store, a_record(f"old-{number}", life=timedelta(hours=1)))
        other = new_store()
        await other.open()

        async def sweep_all(one: Store) -> int:
            gone = 0
            for _ in range(count):
                gone += await one.sweep(NOW + _DAY, 7)
            return gone

        try:
            assert sum(await asyncio.gather(sweep_all(store), sweep_all(other))) == count
        finally:
            await other.close()
        assert await store.records(RecordQuery()) == []

    # -- names and bytes -------------------------------------------------------------------

    async def test_tenants_endpoints_and_keys_are_kept_apart(self, store: Store) -> None:
        """Each of the three makes another record."""
        records = [
            a_record("k", tenant=tenant, endpoint=endpoint, body=f"{tenant} {endpoint}".encode())
            for tenant in ("a", "b", "a:b")
            for endpoint in ("x", "y", "b:x")
        ]
        for record in records:
            await commit(store, record)
        for record in records:
            assert await store.find(record.id, NOW) == record
        assert await store.find(RecordId("c", "x", "k"), NOW) is None
        assert len(await store.records(RecordQuery(tenant="a"))) == 3  # noqa: PLR2004

    @pytest.mark.parametrize("name", AWKWARD_NAMES, ids=range(len(AWKWARD_NAMES)))
    async def test_names_are_data_and_nothing_else(self, store: Store, name: str) -> None:
        """Quotes, backslashes, placeholders and emoji come back as they went in."""
        record = replace(
            a_record(name, tenant=name, endpoint=name, audit_id=name),
            request_id=name,
            correlation_id=name,
        )
        await commit(store, record, audit=True)
        assert await store.find(record.id, NOW) == record
        assert isinstance(await store.claim(record.id, NOW), Found)
        assert await store.records(RecordQuery(tenant=name, endpoint=name, key=name)) == [record]

    @pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
    async def test_bodies_are_bytes(self, store: Store, body: bytes) -> None:
        """Empty, binary or large."""
        record = a_record(body=body, audit_id="audit-1")
        await commit(store, record, audit=True)
        assert await store.find(record.id, NOW) == record
        assert await self.count_audit_events(store) == 1

    @pytest.mark.parametrize("body", BODIES[-2:], ids=("small", "large"))
    async def test_a_body_of_any_size_is_judged(self, store: Store, body: bytes) -> None:
        """Large bodies may travel another way; the primary key judges them too."""
        record = a_record()
        await commit(store, record)
        late = await claimed(store, record.id, now=record.expires_at)
        await self.write_business_row(late, "row")
        with pytest.raises(SupersededError):
            await late.commit(replace(record, body=body), None)
        assert await self.count_business_rows(store, "row") == 0

    async def test_records_are_listed_newest_first_page_by_page(self, store: Store) -> None:
        """Keyset paging: no record twice, none left out, equal times included."""
        records = [
            a_record(f"key-{number}", created_at=NOW - timedelta(seconds=number // 3))
            for number in range(10)
        ]
        for record in records:
            await commit(store, record, now=record.created_at)
        listed: list[Record] = []
        after = None
        while page := await store.records(RecordQuery(limit=4, after=after)):
            listed += page
            after = (page[-1].created_at, *page[-1].id)
        expected = sorted(records, key=lambda r: (r.created_at, r.id), reverse=True)
        assert listed == expected
        by_key = await store.records(RecordQuery(key="key-3"))
        assert [record.id.key for record in by_key] == ["key-3"]
        assert await store.records(RecordQuery(endpoint="other")) == []

    # -- racing ----------------------------------------------------------------------------

    async def test_of_many_racers_exactly_one_commits(
        self, store: Store, new_store: Callable[[], Store]
    ) -> None:
        """Two stores, many tasks, one key: one business row, one record, in every round."""
        other = new_store()
        await other.open()
        try:
            for number in range(self.rounds):
                key = f"round-{number}"
                racers = [
                    self._race(store if lane % 2 else other, key, lane) for lane in range(_RACERS)
                ]
                winners = [lane for lane in await asyncio.gather(*racers) if lane is not None]
                assert len(winners) == 1
                assert await self.count_business_rows(store, key) == 1
                found = await other.find(a_record(key).id, NOW)
                assert found is not None
                assert found.body == str(winners[0]).encode()
        finally:
            await other.close()

    async def _race(self, store: Store, key: str, lane: int) -> int | None:
        record = a_record(key, body=str(lane).encode(), audit_id=f"{key} {lane}")
        claim = await store.claim(record.id, NOW)
        if not isinstance(claim, Claimed):
            return None
        try:
            await self.write_business_row(claim.unit, key)
            await claim.unit.commit(record, an_audit_event(record))
        except SupersededError:
            await claim.unit.rollback()
            return None
        return lane

    async def test_who_is_cancelled_while_committing_harms_nobody_else(self, store: Store) -> None:
        """A client hangs up at any instant: its own is all or nothing, the others' is all."""

        async def one(key: str) -> None:
            record = a_record(key, audit_id=key)
            unit = await claimed(store, record.id)
            try:
                await self.write_business_row(unit, key)
                await unit.commit(record, an_audit_event(record))
            finally:
                await unit.rollback()

        for number in range(self.rounds // 10):
            keys = [f"{number}-{lane}" for lane in range(_RACERS)]
            tasks = [asyncio.create_task(one(key)) for key in keys]
            for turn in range(_RACERS // 3):  # every third, one after the other
                await asyncio.sleep(0.001 * number)
                tasks[turn * 3].cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for lane, (key, end) in enumerate(zip(keys, ends, strict=True)):
                rows = await self.count_business_rows(store, key)
                kept = await store.find(a_record(key).id, NOW)
                assert rows == (0 if kept is None else 1)
                if lane % 3:
                    assert end is None, end
                    assert rows == 1

    async def test_requests_with_other_keys_all_go_through(self, store: Store) -> None:
        """Whoever has to wait for a turn or a connection waits, and does not fail."""

        async def one(number: int) -> None:
            record = a_record(f"key-{number}")
            unit = await claimed(store, record.id)
            await self.write_business_row(unit, "row")
            await asyncio.sleep(0.002)
            await unit.commit(record, None)

        count = 60
        await asyncio.gather(*(one(number) for number in range(count)))
        assert await self.count_business_rows(store, "row") == count
