"""The metric ``onceward_reviews_open``: how many reviews wait for an admin."""

import asyncio
import logging
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from onceward.errors import StoreError
from onceward.ports import Store
from onceward.stores.sql_loader import load_queries

__all__ = ["OpenReviews"]

_KINDS: Final = ("quarantined_day", "anti_cheat")
_TIMEOUT_SECONDS: Final = 5.0

_log = logging.getLogger("onceward.ops")


class OpenReviews:
    """Sets the gauge from the table, however often it is scraped at most every few seconds."""

    def __init__(self, store: Store, registry: CollectorRegistry) -> None:
        self._store = store
        # All processes read the same table, so the latest value of any process is right.
        self._gauge = Gauge(
            "onceward_reviews_open",
            "Reviews of the walk service that wait for an admin.",
            ("kind",),
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._reported_at = -float("inf")

    async def report(self, *, max_age_seconds: float = 0.0) -> None:
        """Set the gauge, unless that was done within ``max_age_seconds``.

        If the store fails, the gauge keeps its value.
        """
        now = asyncio.get_running_loop().time()
        if now - self._reported_at < max_age_seconds:
            return
        sql = load_queries("onceward_services.walk", "admin.sql")["count_open_reviews"]
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                rows = await self._store.read(sql)
        except (StoreError, TimeoutError) as error:
            _log.warning("open reviews cannot be counted: %s", str(error) or type(error).__name__)
            return
        self._reported_at = now
        counts = {row["kind"]: row["reviews"] for row in rows}
        for kind in _KINDS:
            self._gauge.labels(kind).set(counts.get(kind, 0))
