"""Audit events and the chain of seals over them: both tables, and what seals in the background."""

import asyncio
import contextvars
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from itertools import groupby
from typing import Any, Final

import msgspec

from onceward.audit.chain import NO_KEYS, AuditKeys, Seal, instant_of, instant_text, make_seal
from onceward.ports import Clock, FaultPoints, Row, Store, Transaction
from onceward.stores.sql_loader import load_queries
from onceward.stores.table_names import TableNames

# A list as a parameter; both databases find each id in the primary key.
_AMONG_IDS: Final = {
    "sqlite": "IN (SELECT value FROM json_each(:ids))",
    "postgresql": "= ANY (ARRAY(SELECT json_array_elements_text(CAST(:ids AS json))))",
}
# A seal lists up to 500 events.
_SEALS_PER_PAGE: Final = 20
# How much one transaction of the retention deletes.
_SWEPT_SEALS: Final = 100
_SWEPT_EVENTS: Final = 5000
_EVENTS_PER_PAGE: Final = 500
# How many events the sealer reads at once.
_BATCH: Final = 500
# One transaction holds the write lock of SQLite for a few milliseconds.
_SEALS_PER_TRANSACTION: Final = 50
# Between batches the sealer sleeps as long as the batch took: half of a connection's time.
_MIN_PAUSE_SECONDS: Final = 0.005
_DATE_LENGTH: Final = len("2026-01-31")

_log = logging.getLogger("onceward.audit")


@cache
def _sql(database: str, names: TableNames, name: str) -> str:
    text = load_queries("onceward.audit", "seals.sql", names=names)[name]
    return text.replace("AMONG_IDS", _AMONG_IDS[database])


class AuditSeals:
    """The audit events of a store and their seals."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # -- reading ------------------------------------------------------------------------------

    async def tenants(self) -> AsyncIterator[str]:
        """Yield the tenants that have audit events or seals, in order."""
        after = ""
        while True:
            found = (await self._read("next_tenant", tenant=after))[0]["tenant"]
            if found is None:
                return
            yield found
            after = found

    async def unsealed(self, after: tuple[str, str], *, limit: int) -> Sequence[Row]:
        """Return events that no seal covers, by tenant and id, after the given one."""
        return await self._read("unsealed_events", tenant=after[0], id=after[1], limit=limit)

    def unsealed_of(self, tenant: str) -> AsyncIterator[Row]:
        """Yield the events of a tenant that no seal covers."""
        return self._pages("unsealed_events_of_tenant", tenant, "id", "", _EVENTS_PER_PAGE)

    async def seals_named(self, tenant: str) -> AsyncIterator[tuple[str, int | None]]:
        """Yield the id of each event of a tenant, and the seal that it names."""
        async for row in self._pages("seals_of_events", tenant, "id", "", _EVENTS_PER_PAGE):
            yield row["id"], row["seal"]

    async def head(self, tenant: str) -> Seal | None:
        rows = await self._read("head", tenant=tenant)
        return _seal_of(rows[0]) if rows else None

    async def seals(self, tenant: str, *, after: int = 0) -> AsyncIterator[Seal]:
        """Yield the seals of a tenant in order."""
        async for row in self._pages("seals", tenant, "number", after, _SEALS_PER_PAGE):
            yield _seal_of(row)

    async def find(self, tenant: str, number: int) -> Seal | None:
        rows = await self._read("seals", tenant=tenant, number=number - 1, limit=1)
        return _seal_of(rows[0]) if rows and rows[0]["number"] == number else None

    async def events_of(self, seal: Seal) -> dict[str, Row]:
        """Return the events that a seal lists, by id."""
        if not seal.events:
            return {}
        rows = await self._read("events_by_id", tenant=seal.tenant, ids=_ids(seal))
        return {row["id"]: row for row in rows}

    # -- writing ------------------------------------------------------------------------------

    async def add(
        self,
        seals: Sequence[Seal],
        deletions: Sequence[tuple[str, dict[str, Any]]] = (),
        *,
        before_commit: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Commit seals, with the marks of their events, and deletions together.

        False if another process has sealed or deleted some of the events: then nothing is written.
        """
        unit = await self._store.begin()
        try:
            tx, is_added = unit.statements, True
            for seal in seals:
                is_added = is_added and await self._add(tx, seal)
            for name, values in deletions if is_added else ():
                await tx.fetch_all(self._text(name), values)
            if before_commit is not None:
                await before_commit()
        except BaseException:
            await unit.rollback()
            raise
        if not is_added:
            await unit.rollback()
            return False
        await unit.commit(None, None)
        return True

    async def _add(self, tx: Transaction, seal: Seal) -> bool:
        events = json.dumps(seal.events, separators=(",", ":"), ensure_ascii=False)
        values = msgspec.structs.asdict(seal) | {"events": events}
        if not await tx.fetch_all(self._text("add_seal"), values):
            return False
        if not seal.events:
            return True
        values = {"tenant": seal.tenant, "number": seal.number, "ids": _ids(seal)}
        marked = await tx.fetch_all(self._text("mark_sealed"), values)
        return len(marked) == len(seal.events)

    async def sweep(
        self, tenant: str, before: datetime, *, now: datetime, keys: AuditKeys = NO_KEYS
    ) -> int:
        """Delete the oldest seals of a tenant with their events, which are older than ``before``.

        A new seal says what was deleted; all of it commits together. Returns the number of events
        of up to 100 seals; 0 if there is nothing to delete.
        """
        head = await self.head(tenant)
        if head is None:
            return 0
        old: list[Seal] = []
        ids: list[str] = []
        async for seal in self.seals(tenant):
            is_full = len(old) == _SWEPT_SEALS or len(ids) >= _SWEPT_EVENTS
            if is_full or (seal.newest_at or seal.sealed_at) >= before:
                break
            old.append(seal)
            ids += [event_id for event_id, _ in seal.events]
        # Seals without events are deleted along with others: each deletion makes a new one.
        if not ids:
            return 0
        last = old[-1].number
        swept = make_seal(
            tenant,
            (),
            after=head,
            now=now,
            keys=keys,
            first_kept=last + 1,
            newly_swept=len(ids),
        )
        deletions = (
            ("delete_events", {"tenant": tenant, "ids": json.dumps(ids)}),
            ("delete_seals", {"tenant": tenant, "number": last}),
        )
        # If another process has sealed, the next sweep deletes them.
        return len(ids) if await self.add([swept], deletions) else 0

    async def delete_old_unsealed(self, tenant: str, before: datetime, *, limit: int) -> int:
        """Delete up to ``limit`` events that no seal covers and that are older than ``before``."""
        rows = await self._store.write(
            self._text("delete_old_unsealed"), {"tenant": tenant, "before": before, "limit": limit}
        )
        return len(rows)

    # -- statements ---------------------------------------------------------------------------

    async def _pages(
        self, name: str, tenant: str, key: str, after: Any, limit: int
    ) -> AsyncIterator[Row]:
        """Yield the rows of a tenant after a value of ``key``. Reads one page at a time."""
        while True:
            rows = await self._read(name, **{"tenant": tenant, key: after, "limit": limit})
            for row in rows:
                yield row
            if len(rows) < limit:
                return
            after = rows[-1][key]

    async def _read(self, name: str, **values: Any) -> Sequence[Row]:
        return await self._store.read(self._text(name), values)

    def _text(self, name: str) -> str:
        return _sql(self._store.name, self._store.table_names, name)


@dataclass(frozen=True, slots=True)
class Sealed:
    """How many events were sealed, by how many seals."""

    events: int = 0
    seals: int = 0


class AuditSealer:
    """Seals the events of all tenants periodically.

    Writers do not wait for it. It reads the events that no seal covers, in whatever order they were
    committed, and writes each seal in one transaction with the marks of its events. Several
    processes may seal at the same time: the primary key of the seals decides.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        every_seconds: float | None = None,
        keys: AuditKeys = NO_KEYS,
        faults: FaultPoints | None = None,
    ) -> None:
        """With ``every_seconds`` None, ``start`` does nothing."""
        self._seals = AuditSeals(store)
        self._clock = clock
        self._every_seconds = every_seconds
        self._keys = keys
        self._faults = faults
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Seal periodically in a background task."""
        if self._every_seconds is not None and self._task is None:
            # Not in the context of the request that has opened the store, as in the sweeper.
            self._task = asyncio.create_task(
                self._forever(self._every_seconds), context=contextvars.Context()
            )

    async def stop(self) -> None:
        """Stop sealing. What is not committed is sealed by the next process."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def seal(self) -> Sealed:
        """Seal all events that are committed now."""
        after = ("", "")
        events = seals = 0
        while True:
            started = self._clock.monotonic()
            rows = await self._seals.unsealed(after, limit=_BATCH)
            for groups in _transactions(rows):
                added = await self._add(groups)
                events += sum(len(seal.events) for seal in added)
                seals += len(added)
            if len(rows) < _BATCH:
                return Sealed(events, seals)
            after = (rows[-1]["tenant"], rows[-1]["id"])
            took = self._clock.monotonic() - started
            await asyncio.sleep(max(_MIN_PAUSE_SECONDS, took))

    async def _add(self, groups: Sequence[Sequence[Row]]) -> list[Seal]:
        """Commit one seal for each group; none if another process was faster."""
        heads: dict[str, Seal | None] = {}
        seals: list[Seal] = []
        for rows in groups:
            tenant = rows[0]["tenant"]
            if tenant not in heads:
                heads[tenant] = await self._seals.head(tenant)
            seal = make_seal(
                tenant, rows, after=heads[tenant], now=self._clock.now(), keys=self._keys
            )
            heads[tenant] = seal
            seals.append(seal)
        await self._reach("audit_seal.before_writes")
        before_commit = partial(self._reach, "audit_seal.before_commit")
        if not await self._seals.add(seals, before_commit=before_commit):
            return []
        await self._reach("audit_seal.after_commit")
        for seal in seals:
            _log.info(
                "audit.sealed",
                extra={
                    "tenant": seal.tenant,
                    "seal": seal.number,
                    "events": len(seal.events),
                    "seal_hash": seal.hash,
                },
            )
        return seals

    async def _reach(self, point: str) -> None:
        if self._faults is not None:
            await self._faults.reach(point)

    async def _forever(self, every_seconds: float) -> None:
        while True:
            await asyncio.sleep(every_seconds)
            try:
                await self.seal()
            except Exception as error:  # noqa: BLE001 - a deadlock, for example; it must go on
                _log.warning(
                    "audit events were not sealed, which will be repeated at the next interval: %s",
                    error,
                )


def _ids(seal: Seal) -> str:
    return json.dumps([event_id for event_id, _ in seal.events])


def _seal_of(row: Row) -> Seal:
    values = {name: row[name] for name in Seal.__struct_fields__}
    values["events"] = _events_of(row["events"])
    values["sealed_at"] = _instant(row["sealed_at"])
    if row["newest_at"] is not None:
        values["newest_at"] = _instant(row["newest_at"])
    return Seal(**values)


def _events_of(text: str) -> tuple[tuple[str, str], ...]:
    """Read the list of events. One that was damaged is empty, so its hash is wrong."""
    with suppress(ValueError, TypeError):
        pairs: Iterable[Any] = json.loads(text)
        return tuple((str(event_id), str(digest)) for event_id, digest in pairs)
    return ()


def _instant(value: datetime | str) -> datetime:
    """Read an instant; SQLite has text. One that was damaged is the earliest one."""
    return instant_of(value) or datetime.min.replace(tzinfo=UTC)


def _transactions(rows: Sequence[Row]) -> Iterator[list[list[Row]]]:
    """Group rows by tenant and day: retention deletes whole seals."""

    def by_day(row: Row) -> tuple[str, str]:
        return row["tenant"], instant_text(row["created_at"])[:_DATE_LENGTH]

    groups = [list(group) for _, group in groupby(rows, by_day)]
    for start in range(0, len(groups), _SEALS_PER_TRANSACTION):
        yield groups[start : start + _SEALS_PER_TRANSACTION]
