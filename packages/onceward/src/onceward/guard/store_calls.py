"""Calls of the store, behind its breaker."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from onceward.core.breaker import Breaker, BreakerState
from onceward.errors import StoreUnavailableError
from onceward.guard.reports import Reports
from onceward.observability.noop import NullMetrics
from onceward.ports import BreakerMetrics, Clock

__all__ = ["StoreCalls"]


class StoreCalls:
    """Awaits calls of the store, and reports them to the breaker."""

    def __init__(self, breaker: Breaker, clock: Clock, reports: Reports) -> None:
        metrics = reports.metrics
        self._breaker = breaker
        self._clock = clock
        self._reports = reports
        # Without metrics the clock is not read for them.
        self._times_store = type(metrics) is not NullMetrics
        self._breaker_metrics = metrics if isinstance(metrics, BreakerMetrics) else None
        # What was reported last.
        self._is_breaker_open = False

    async def __call__(self, operation: str, work: Awaitable[Any]) -> Any:
        """Await a call of the store. Raises ``StoreUnavailableError`` if the breaker is open."""
        breaker = self._breaker
        is_closed = breaker.state is BreakerState.CLOSED
        started = 0.0 if is_closed and not self._times_store else self._clock.monotonic()
        wait = None if is_closed else breaker.retry_after(started)
        if wait is not None:
            if asyncio.iscoroutine(work):
                work.close()
            raise StoreUnavailableError(
                "the store is not responding; try again shortly",
                retry_after_seconds=wait,
                is_for_callers=True,
                reason="breaker_open",
            )
        try:
            result = await work
        except StoreUnavailableError as error:
            if error.is_outage:
                breaker.failed(self._clock.monotonic())
            else:  # one statement failed: the store has responded
                breaker.succeeded()
            self._report_breaker()
            raise
        except Exception:
            breaker.abandoned()
            raise
        breaker.succeeded()
        if self._is_breaker_open:
            self._report_breaker()
        if self._times_store:
            self._reports.metrics.store_time(operation, self._clock.monotonic() - started)
        return result

    def _report_breaker(self) -> None:
        """Report that the breaker has opened or closed. While it probes, it counts as open."""
        is_open = self._breaker.state is not BreakerState.CLOSED
        if is_open is not self._is_breaker_open:
            self._is_breaker_open = is_open
            if self._breaker_metrics is not None:
                self._breaker_metrics.breaker_changed(is_open=is_open)
