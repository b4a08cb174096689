"""Limits that keep one caller or one tenant from using up a process, and what counts requests."""

import asyncio
import contextvars
import logging
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from onceward.errors import ConfigurationError, QuotaExceededError, StoreError
from onceward.guard.request_thread import is_in_request_thread
from onceward.ports import Clock, Store
from onceward.stores.sql_loader import load_queries

__all__ = ["CountedRequest", "Limits", "QuotaReporter", "RateLimiter"]

_RECOUNT_SECONDS: Final = 60.0
_MAX_STEP: Final = 1000
# Tenants with a few new records are forgotten when there are so many of them.
_MAX_TENANTS: Final = 100_000

_log = logging.getLogger("onceward.request")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process, whatever its endpoints. None switches one off.

    ``Policy`` has the limits of an endpoint: the size of a body, its deadline, a rate limit.
    """

    # Bytes of all bodies that are held at once; one tenant may hold half of them. Above it, a body
    # is 503. Not counted: up to 8 KiB, and up to 64 KiB that arrive in one piece.
    body_memory_bytes: int | None = 64 * 1024 * 1024
    # Duplicates of one tenant that wait for a first request. Above it, a duplicate is 409 at once.
    waiting_per_tenant: int | None = 200
    # Records that a tenant may have. Above it, a new key is 429 until some expire. Counted now and
    # then, so a tenant can exceed it by a tenth for each process.
    records_per_tenant: int | None = None

    def __post_init__(self) -> None:
        for name in ("body_memory_bytes", "waiting_per_tenant", "records_per_tenant"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(
                    f"Limits.{name} must be at least 1, or None for no limit, not {value!r}"
                )


class RateLimiter(Protocol):
    """Counts requests per tenant and endpoint."""

    def check(self, limit: str) -> None:
        """Raise ``ConfigurationError`` if this is not a limit it understands."""

    async def seconds_to_wait(self, limit: str, tenant: str, endpoint: str) -> float | None:
        """Count one request; return None if it may pass, else the seconds until it may."""


@runtime_checkable
class QuotaReporter(Protocol):
    """A rate limiter that also reports what is left, for the headers of the response.

    Optional: a limiter that has this method gets this call in place of ``seconds_to_wait``.
    """

    async def count(self, limit: str, tenant: str, endpoint: str) -> "CountedRequest":
        """Count one request."""


class CountedRequest(Protocol):
    """Result of a ``QuotaReporter``."""

    @property
    def wait_seconds(self) -> float | None:
        """None if the request may pass, else the seconds until it may."""

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The headers to send, with names in lower case."""


class RecordQuota:
    """How many records a tenant may have, without a count per request.

    Each process counts the records that it adds. When a tenant has added a tenth of its quota (at
    most 1000), the database counts that tenant's records, up to the quota, in the background. While
    a tenant is above its quota, it is counted again every minute.
    """

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
