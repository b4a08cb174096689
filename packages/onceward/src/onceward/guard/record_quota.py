"""How many records a tenant may have, without a count per request.

Each process counts the records that it adds. When a tenant has added a tenth of its quota (at most
1000), the database counts that tenant's records, up to the quota, in the background. While a tenant
is above its quota, it is counted again every minute.
"""

import asyncio
import contextvars
import logging
from typing import Final

from onceward.errors import QuotaExceededError, StoreError
from onceward.guard.request_thread import is_in_request_thread
from onceward.ports import Clock, Store
from onceward.stores.sql_loader import load_queries

__all__ = ["RecordQuota"]

_RECOUNT_SECONDS: Final = 60.0
_MAX_STEP: Final = 1000
# Tenants with a few new records are forgotten when there are so many of them.
_MAX_TENANTS: Final = 100_000

_log = logging.getLogger("onceward.request")


class RecordQuota:
    """The tenants of this process that add many records, and those that have too many."""

    def __init__(self, store: Store, clock: Clock, limit: int) -> None:
        self._store = store
        self._clock = clock
        self._limit = limit
        self._step = max(1, min(_MAX_STEP, limit // 10))
        self._added: dict[str, int] = {}
        # When to count a tenant that is above its quota again.
        self._over: dict[str, float] = {}
        self._counting: dict[str, asyncio.Task[None]] = {}
        # Tenants that have added records since their running count began.
        self._changed: set[str] = set()

    async def check(self, tenant: str) -> None:
        """Raise ``QuotaExceededError`` if the tenant had too many records when last counted."""
        due = self._over.get(tenant)
        if due is None:
            return
        if self._clock.monotonic() >= due:
            self._over[tenant] = self._clock.monotonic() + _RECOUNT_SECONDS
            await self._count_soon(tenant)
        if tenant in self._over:
            raise QuotaExceededError(
                f"this tenant has {self._limit} stored responses, which is the maximum; new keys "
                "are accepted when some have expired",
                details={"resource": "records", "limit": self._limit},
                retry_after_seconds=_RECOUNT_SECONDS,
            )

    async def added(self, tenant: str) -> None:
        added = self._added.get(tenant, 0) + 1
        if added < self._step:
            if len(self._added) >= _MAX_TENANTS:
                self._added.clear()
            self._added[tenant] = added
            return
        self._added.pop(tenant, None)
        await self._count_soon(tenant)

    async def close(self) -> None:
        if self._counting:
            await asyncio.wait(self._counting.values(), timeout=2)

    async def _count_soon(self, tenant: str) -> None:
        if is_in_request_thread():  # without an event loop
            await self._count(tenant)
        elif tenant in self._counting:
            self._changed.add(tenant)
        else:
            # Not in the context of this request: stores with sync connections would use its thread.
            self._counting[tenant] = asyncio.create_task(
                self._count_until_unchanged(tenant), context=contextvars.Context()
            )

    async def _count_until_unchanged(self, tenant: str) -> None:
        try:
            while True:
                self._changed.discard(tenant)
                await self._count(tenant)
                if tenant not in self._changed:
                    return
        finally:
            self._counting.pop(tenant, None)

    async def _count(self, tenant: str) -> None:
        sql = load_queries("onceward.stores", "records.sql", names=self._store.table_names)
        params = {"tenant": tenant, "most": self._limit}
        try:
            rows = await self._store.read(sql["count_of_tenant"], params)
        except StoreError as error:
            _log.warning("the records of a tenant cannot be counted: %s", error)
            return
        if int(rows[0]["records"]) >= self._limit:
            if tenant not in self._over:
                _log.warning("a tenant has reached its quota of records", extra={"tenant": tenant})
            self._over[tenant] = self._clock.monotonic() + _RECOUNT_SECONDS
        else:
            self._over.pop(tenant, None)
