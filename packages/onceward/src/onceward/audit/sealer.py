"""Seals audit events in the background: adds them to the chain of their tenant."""

import asyncio
import contextvars
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from onceward.audit.chain import NO_KEYS, AuditKeys, Seal, instant_text, make_seal
from onceward.audit.seals import AuditSeals
from onceward.ports import Clock, FaultPoints, Row, Store

__all__ = ["AuditSealer", "Sealed"]

_BATCH: Final = 500
# One transaction holds the write lock of SQLite for a few milliseconds.
_SEALS_PER_TRANSACTION: Final = 50
# Between batches the sealer sleeps as long as the batch took: half of a connection's time.
_MIN_PAUSE_SECONDS: Final = 0.005
_DATE_LENGTH: Final = len("2026-01-31")

_log = logging.getLogger("onceward.audit")


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
        self._store = store
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
        """Cancel the background task. What it has not committed is sealed by the next one."""
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
        unit = await self._store.begin()
        try:
            is_added = True
            for seal in seals:
                is_added = is_added and await self._seals.add(unit.statements, seal)
            await self._reach("audit_seal.before_commit")
        except BaseException:
            await unit.rollback()
            raise
        if not is_added:
            await unit.rollback()
            return []
        await unit.commit(None, None)
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


def _transactions(rows: Sequence[Row]) -> Iterator[list[list[Row]]]:
    """Group rows by tenant and day: retention deletes whole seals."""

    def by_day(row: Row) -> tuple[str, str]:
        return row["tenant"], instant_text(row["created_at"])[:_DATE_LENGTH]

    groups = [list(group) for _, group in groupby(rows, by_day)]
    for start in range(0, len(groups), _SEALS_PER_TRANSACTION):
        yield groups[start : start + _SEALS_PER_TRANSACTION]
