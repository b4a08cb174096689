"""The audit trail for operators: verified against its chain of seals, and exported."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Mapping
from datetime import datetime
from typing import Any, Final

from onceward.audit.chain import (
    NO_KEYS,
    AuditKeys,
    ChainCheck,
    Seal,
    event_document,
)
from onceward.audit.seals import AuditSeals
from onceward.ports import Row, Store

__all__ = ["EXPORT_FORMAT", "AuditTrail", "event_line", "seal_line"]

EXPORT_FORMAT: Final = 1
"""The version of the lines of an export."""

# Retention may delete seals while they are verified.
_TRIES: Final = 3
# Events follow the time, and so do seals: few are needed at once.
_CACHED_SEALS: Final = 64


class AuditTrail:
    """The audit events of a database. Reads one page at a time, whatever their number."""

    def __init__(self, store: Store, *, keys: AuditKeys = NO_KEYS) -> None:
        self._seals = AuditSeals(store)
        self._keys = keys

    def tenants(self) -> AsyncIterator[str]:
        """Yield the tenants that have audit events or seals."""
        return self._seals.tenants()

    async def verify(
        self,
        tenant: str,
        *,
        known_heads: Mapping[int, str] | None = None,
        allow_unsigned: bool = False,
    ) -> ChainCheck:
        """Check every seal of a tenant and every event.

        ``known_heads`` are hashes of seals by number that were noted earlier. ``allow_unsigned``
        accepts seals without a signature although there are keys.
        """
        for _ in range(_TRIES):
            before = await self._seals.head(tenant)
            check = ChainCheck(
                tenant, keys=self._keys, known_heads=known_heads, allow_unsigned=allow_unsigned
            )
            await self._verify(check, None if before is None else before.number)
            after = await self._seals.head(tenant)
            if not check.findings or _is_same_range(before, after):
                break
        return check

    async def _verify(self, check: ChainCheck, last: int | None) -> None:
        async for seal in self._seals.seals(check.tenant):
            if last is not None and seal.number > last:
                break  # made since
            check.add_seal(seal, await self._seals.events_of(seal))
        check.finish()
        listed = _ListedEvents(self._seals, check.tenant)
        async for event_id, number in self._seals.seals_named(check.tenant):
            if number is None:
                continue
            ids = await listed.of(number)
            if ids is None:
                check.report_without_seal(event_id, number)
            elif event_id not in ids:
                check.report_not_listed(event_id, number)
        async for row in self._seals.unsealed_of(check.tenant):
            check.add_unsealed(row)

    async def export(
        self, tenant: str, *, after: int = 0, since: datetime | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the lines of a tenant: the events of each seal, the seal, then unsealed events.

        ``after`` is the number of a seal, ``since`` the time after which seals were made.
        """
        async for seal in self._seals.seals(tenant, after=after):
            if since is not None and seal.sealed_at <= since:
                continue
            events = await self._seals.events_of(seal)
            for event_id, _ in seal.events:
                if event_id in events:
                    yield event_line(events[event_id])
            yield seal_line(seal)
        async for row in self._seals.unsealed_of(tenant):
            yield event_line(row)


class _ListedEvents:
    """The ids that seals list, of the seals that were needed last."""

    def __init__(self, seals: AuditSeals, tenant: str) -> None:
        self._seals = seals
        self._tenant = tenant
        self._by_number: OrderedDict[int, Collection[str] | None] = OrderedDict()

    async def of(self, number: int) -> Collection[str] | None:
        """Return the ids that a seal lists; None if there is no such seal."""
        if number not in self._by_number:
            seal = await self._seals.find(self._tenant, number)
            self._by_number[number] = None if seal is None else {pair[0] for pair in seal.events}
            if len(self._by_number) > _CACHED_SEALS:
                self._by_number.popitem(last=False)
        self._by_number.move_to_end(number)
        return self._by_number[number]


def event_line(row: Row) -> dict[str, Any]:
    """Return an event as an export has it. The digest covers all but ``kind`` and ``seal``."""
    return {"kind": "event", "seal": row["seal"]} | event_document(row)


def seal_line(seal: Seal) -> dict[str, Any]:
    """Return a seal as an export has it."""
    signed = {"hash": seal.hash, "key_id": seal.key_id, "mac": seal.mac}
    return {"kind": "seal"} | seal.document() | signed


def _is_same_range(before: Seal | None, after: Seal | None) -> bool:
    """Return whether retention or an erasure has deleted nothing in between."""
    if before is None or after is None:
        return before is after
    return before.first_kept == after.first_kept and after.number >= before.number
