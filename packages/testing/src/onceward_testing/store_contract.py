"""The contract of ``ports.Store`` as a pytest suite, for Onceward's stores and for yours.

Inherit from it and provide a function that makes stores on a new database::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def new_store(self, tmp_path):
            return lambda: MyStore(tmp_path / "test.db")

``new_store`` is called several times in one test: each call makes another store, not opened, on the
same new database, as another process would. Adapters whose transaction is not a
``onceward.Transaction`` override ``execute``. Needs ``pytest-asyncio``.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import ClassVar, Final

import pytest
from msgspec.structs import replace

from onceward.errors import RequestError, SupersededError
from onceward.guard.caches import CacheEpoch
from onceward.maintenance.record_removal import RecordRemoval
from onceward.ports import Claimed, Found, Held, RecordQuery, Store
from onceward.records import Record, RecordId
from onceward_protocol.clock import SystemClock
from onceward_testing.samples import (
    AWKWARD_NAMES,
    BODIES,
    NOW,
    a_record,
    an_audit_event,
    claimed,
    claimed_soon,
    commit,
)
from onceward_testing.sequence_contract import SequenceContract

__all__ = ["NOW", "StoreContract", "a_record", "an_audit_event"]

_DAY: Final = timedelta(days=1)
_RACERS: Final = 30


class StoreContract(SequenceContract):
    """Tests that an adapter of ``ports.Store`` inherits."""

    rounds: ClassVar[int] = 50
    """How often races are repeated; fewer if statements are slow."""

    # -- find and claim --------------------------------------------------------------------

    async def test_unknown_key_is_not_found(self, store: Store) -> None:
        assert await store.find(a_record().id, NOW) is None

    async def test_unknown_key_can_be_claimed_and_released(self, store: Store) -> None:
        unit = await claimed(store, a_record().id)
        assert not unit.superseded
        await unit.rollback()
        assert await store.find(a_record().id, NOW) is None

    async def test_unit_knows_whether_it_has_written(self, store: Store) -> None:
        # Twice: what an earlier unit has written on the same connection does not count.
        for key in ("first", "second"):
            record = a_record(key=key)
            unit = await claimed(store, record.id)
            assert not await unit.has_written()
            await unit.statements.fetch_all("SELECT 1 AS one")
            assert not await unit.has_written()
            await self.write_business_row(unit, key)
            assert await unit.has_written()
            await unit.commit(record, None)

    async def test_committed_record_is_found_unchanged(self, store: Store) -> None:
        record = a_record(audit_id="audit-1")
        await commit(store, record, audit=True)
        found = await store.find(record.id, NOW)
        assert found == record
        assert found is not None
        assert isinstance(found.body, bytes)
        assert found.created_at.utcoffset() == timedelta(0)

    async def test_times_in_another_zone_are_stored_as_the_same_instant(self, store: Store) -> None:
        zone = datetime.now().astimezone(tz=None).tzinfo
        record = a_record(created_at=NOW.astimezone(zone))
        await commit(store, record)
        assert await store.find(record.id, NOW) == record

    async def test_time_of_the_device_is_stored_and_overwritten(self, store: Store) -> None:
        record = a_record(client_generated_at=NOW - 3 * _DAY)
        await commit(store, record)
        found = await store.find(record.id, NOW)
        assert found == record
        assert found is not None
        assert found.client_generated_at is not None
        assert found.client_generated_at.utcoffset() == timedelta(0)
        # The key is used again after the record has expired, without a time of the device, and
        # with a body that is not sent inline.
        later = NOW + 2 * _DAY
        again = a_record(created_at=later, client_generated_at=None, body=BODIES[-1])
        await commit(store, again, now=later)
        assert await store.find(record.id, later) == again
        (listed,) = await store.records(RecordQuery(tenant=record.id.tenant))
        assert listed == again

    async def test_claim_of_a_committed_key_returns_its_record(self, store: Store) -> None:
        record = a_record()
        await commit(store, record)
        claim = await store.claim(record.id, NOW)
        assert isinstance(claim, Found)
        assert claim.record == record

    async def test_second_claim_of_a_key_is_held_or_fails_at_its_commit(self, store: Store) -> None:
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

    async def test_superseded_unit_writes_nothing(self, store: Store) -> None:
        record = a_record()
        first = await claimed(store, record.id)
        second = await store.claim(record.id, NOW)
        await self.write_business_row(first, "first")
        await first.commit(record, None)
        if isinstance(second, Claimed):
            with suppress(SupersededError):  # some stores detect it here, all at the commit
                await self.write_business_row(second.unit, "second")
            with pytest.raises(SupersededError):
                await second.unit.commit(replace(record, body=b"second"), None)
            await second.unit.rollback()
        assert await self.count_business_rows(store, "first") == 1
        assert await self.count_business_rows(store, "second") == 0

    # -- one transaction -------------------------------------------------------------------

    async def test_business_rows_and_record_commit_together(self, store: Store) -> None:
        record = a_record()
        unit = await claimed(store, record.id)
        await self.write_business_row(unit, "row")
        assert await self.count_business_rows(store, "row") == 0
        await unit.commit(record, None)
        assert await self.count_business_rows(store, "row") == 1
        assert await store.find(record.id, NOW) == record

    async def test_rollback_undoes_everything_and_releases_the_key(self, store: Store) -> None:
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

    async def test_cancelled_handler_releases_the_key(self, store: Store) -> None:
        record = a_record()

        async def handler() -> None:
            unit = await claimed_soon(store, record.id)
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
        unit = await claimed_soon(store, record.id)
        await unit.commit(record, None)
        assert await self.count_business_rows(store, "row") == 0

    async def test_unit_without_a_key_commits_its_rows(self, store: Store) -> None:
        unit = await store.begin()
        await self.write_business_row(unit, "row")
        await unit.commit(None, None)
        undone = await store.begin()
        await self.write_business_row(undone, "undone")
        await undone.rollback()
        assert await self.count_business_rows(store, "row") == 1
        assert await self.count_business_rows(store, "undone") == 0

    async def test_record_is_committed_without_business_rows(self, store: Store) -> None:
        record = a_record()
        await commit(store, record)
        assert await store.find(record.id, NOW) == record

    async def test_audit_event_commits_with_the_transaction(self, store: Store) -> None:
        record = a_record(audit_id="audit-1")
        unit = await claimed(store, record.id)
        await unit.rollback()
        assert await self.count_audit_events(store) == 0
        await commit(store, record, audit=True)
        rows = await store.read(f"SELECT * FROM {store.table_names.table('audit_events')}")  # noqa: S608
        assert len(rows) == 1
        stored = dict(rows[0])
        assert stored.pop("seal") is None
        stored.pop("created_at")
        event = an_audit_event(record)
        assert stored == {name: getattr(event, name) for name in stored}
        without_key = await store.begin()
        await without_key.commit(None, replace(event, id="audit-2"))
        assert await self.count_audit_events(store) == 2  # noqa: PLR2004

    async def test_audit_event_that_cannot_be_written_rolls_back_the_rest(
        self, store: Store
    ) -> None:
        first = a_record("first", audit_id="audit-1")
        await commit(store, first, audit=True)
        second = a_record("second", audit_id="audit-1")
        unit = await claimed(store, second.id)
        await self.write_business_row(unit, "row")
        with pytest.raises(Exception):  # noqa: B017, PT011 - of the driver or the store
            await unit.commit(second, an_audit_event(second))
        assert await store.find(second.id, NOW) is None
        assert await self.count_business_rows(store, "row") == 0

    # -- expiry ----------------------------------------------------------------------------

    async def test_removed_record_is_gone_and_renews_the_cache_epoch(self, store: Store) -> None:
        record = a_record()
        await commit(store, record)
        epoch = CacheEpoch(store, SystemClock(), lambda: None)
        await epoch.check()
        before = epoch.current.value
        removal = RecordRemoval(store, SystemClock())
        removed = await removal.remove(record.id, actor="an operator", reason="a mistake")
        assert removed is not None
        assert removed.record == record
        assert await store.find(record.id, NOW) is None
        epoch = CacheEpoch(store, SystemClock(), lambda: None)
        await epoch.check()
        after = epoch.current.value
        assert None not in {before, after}
        assert before != after
        sql = "SELECT actor, reason FROM onceward_audit_events WHERE id = :id"
        (event,) = await store.read(store.table_names.render(sql), {"id": removed.audit_id})
        assert (event["actor"], event["reason"]) == ("an operator", "a mistake")
        assert await removal.remove(record.id, actor="an operator", reason="again") is None

    async def test_expired_record_is_treated_as_absent(self, store: Store) -> None:
        record = a_record()
        await commit(store, record)
        last = record.expires_at - timedelta(microseconds=1)
        assert await store.find(record.id, last) == record
        assert await store.find(record.id, record.expires_at) is None
        claim = await store.claim(record.id, record.expires_at)
        assert isinstance(claim, Claimed)
        await claim.unit.rollback()

    async def test_expired_record_is_overwritten(self, store: Store) -> None:
        old = a_record()
        await commit(store, old)
        new = a_record(created_at=old.expires_at, body=b"new", audit_id="audit-2")
        await commit(store, new, now=old.expires_at, audit=True)
        assert await store.find(new.id, new.created_at) == new

    async def test_live_record_is_never_overwritten(self, store: Store) -> None:
        record = a_record()
        await commit(store, record)
        late = await claimed(store, record.id, now=record.expires_at)
        await self.write_business_row(late, "row")
        with pytest.raises(SupersededError):
            await late.commit(replace(record, body=b"late"), None)
        assert await store.find(record.id, NOW) == record
        assert await self.count_business_rows(store, "row") == 0

    async def test_sweep_deletes_only_expired_records_in_batches(self, store: Store) -> None:
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
        count = 40
        for number in range(count):
            await commit(store, a_record(f"old-{number}", life=timedelta(hours=1)))
        other = new_store()
        await other.open()

        async def sweep_all(one: Store) -> int:
            deleted = 0
            for _ in range(count):
                deleted += await one.sweep(NOW + _DAY, 7)
            return deleted

        try:
            assert sum(await asyncio.gather(sweep_all(store), sweep_all(other))) == count
        finally:
            await other.close()
        assert await store.records(RecordQuery()) == []

    # -- names and bytes -------------------------------------------------------------------

    async def test_tenant_endpoint_and_key_identify_a_record_separately(self, store: Store) -> None:
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
    async def test_special_characters_in_names_are_stored_unchanged(
        self, store: Store, name: str
    ) -> None:
        record = replace(
            a_record(name, tenant=name, endpoint=name, audit_id=name),
            request_id=name,
            correlation_id=name,
        )
        await commit(store, record, audit=True)
        assert await store.find(record.id, NOW) == record
        assert isinstance(await store.claim(record.id, NOW), Found)
        assert await store.records(RecordQuery(tenant=name, endpoint=name, key=name)) == [record]

    async def test_name_that_no_database_can_store_is_an_error_of_the_caller(
        self, store: Store
    ) -> None:
        for name in ("NUL \x00", "lone surrogate \ud800"):
            with pytest.raises(RequestError, match="cannot store"):
                await store.claim(a_record(tenant=name).id, NOW)
            with pytest.raises(RequestError, match="cannot store"):
                await store.find(a_record(tenant=name).id, NOW)
        await commit(store, a_record())

    @pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
    async def test_empty_binary_and_large_bodies_are_stored_unchanged(
        self, store: Store, body: bytes
    ) -> None:
        record = a_record(body=body, audit_id="audit-1")
        await commit(store, record, audit=True)
        assert await store.find(record.id, NOW) == record
        assert await self.count_audit_events(store) == 1

    @pytest.mark.parametrize("body", BODIES[-2:], ids=("small", "large"))
    async def test_bodies_of_any_size_cannot_overwrite_a_live_record(
        self, store: Store, body: bytes
    ) -> None:
        record = a_record()
        await commit(store, record)
        late = await claimed(store, record.id, now=record.expires_at)
        await self.write_business_row(late, "row")
        with pytest.raises(SupersededError):
            await late.commit(replace(record, body=body), None)
        assert await self.count_business_rows(store, "row") == 0

    async def test_records_are_listed_newest_first_page_by_page(self, store: Store) -> None:
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

    # -- races -----------------------------------------------------------------------------

    async def test_exactly_one_of_many_concurrent_requests_commits(
        self, store: Store, new_store: Callable[[], Store]
    ) -> None:
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

    async def test_cancellation_during_a_commit_affects_no_other_request(
        self, store: Store
    ) -> None:
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
            for turn in range(_RACERS // 3):  # every third task
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

    async def test_concurrent_requests_with_different_keys_all_commit(self, store: Store) -> None:
        async def one(number: int) -> None:
            record = a_record(f"key-{number}")
            unit = await claimed(store, record.id)
            await self.write_business_row(unit, "row")
            await asyncio.sleep(0.002)
            await unit.commit(record, None)

        count = 60
        await asyncio.gather(*(one(number) for number in range(count)))
        assert await self.count_business_rows(store, "row") == count
