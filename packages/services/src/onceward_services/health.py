"""Health checks and metrics for operators. No authentication."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from fastapi import APIRouter, Response

from onceward import Onceward
from onceward.errors import StoreError
from onceward.observability.metrics import PrometheusMetrics
from onceward.ports import Metrics
from onceward.stores.breaker import BreakerState

__all__ = ["Reporter", "router"]

# Load balancers poll every few seconds; a store that takes longer than this is not ready.
_STORE_TIMEOUT_SECONDS: Final = 2.0
# However often it is scraped, the job tables are read no more often than this.
_DEPTHS_SECONDS: Final = 5.0

_SILENT: Final = "the store does not respond"
_REASONS: Final = {
    "not_replicated": "the database is not replicated as required",
    "commits_waiting": "too many commits wait for a standby",
    "wrong_clock": "the clock of this machine is not that of the database",
}

_log = logging.getLogger("onceward.ops")


class Reporter(Protocol):
    """Sets gauges of a service before a scrape."""

    async def report(self, *, max_age_seconds: float = 0.0) -> None:
        """Set the gauges, unless that was done within ``max_age_seconds``."""


def router(
    onceward: Onceward, metrics: Metrics | None, reporters: Sequence[Reporter] = ()
) -> APIRouter:
    """Build ``/healthz``, ``/readyz`` and, with Prometheus metrics, ``/metrics``."""
    api = APIRouter(tags=["ops"])

    @api.head("/healthz", include_in_schema=False)
    @api.get("/healthz", summary="Check that the process runs")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @api.head("/readyz", include_in_schema=False)
    @api.get(
        "/readyz",
        summary="Check that the store responds",
        responses={503: {"description": "The store does not respond; `reason` says why."}},
    )
    async def readyz(response: Response) -> dict[str, Any]:
        try:
            await asyncio.wait_for(onceward.store.ping(), _STORE_TIMEOUT_SECONDS)
            await asyncio.wait_for(onceward.runtime.check_clock(), _STORE_TIMEOUT_SECONDS)
        except (StoreError, TimeoutError) as error:
            # The details name hosts and files, so they go to the log and not to the caller.
            _log.warning("not ready: %s", str(error) or type(error).__name__)
            response.status_code = 503
            reason = getattr(error, "reason", "")
            return {"status": "unavailable", "reason": _REASONS.get(reason, _SILENT)}
        ready: dict[str, Any] = {"status": "ok", "store": onceward.store.name}
        if onceward.store.knows_durability:
            ready["replicated"] = onceward.store.is_replicated
        return ready

    if isinstance(metrics, PrometheusMetrics):

        async def read_gauges() -> None:
            """Read what is in the store, at the same time: scrapers do not wait for long."""
            age = {"max_age_seconds": _DEPTHS_SECONDS}
            reads: list[Awaitable[Any]] = [onceward.runtime.depths.report(**age)]
            reads += [reporter.report(**age) for reporter in reporters]
            if onceward.store.knows_durability:
                reads.append(onceward.store.read_durability())
            await asyncio.gather(*reads)

        @api.get(
            "/metrics",
            summary="Prometheus metrics",
            response_class=Response,
            responses={200: {"content": {"text/plain": {}}}},
        )
        async def show_metrics() -> Response:
            if onceward.runtime.idempotency.breaker.state is BreakerState.CLOSED:
                with suppress(StoreError, TimeoutError):  # the gauges keep their values
                    await asyncio.wait_for(read_gauges(), _STORE_TIMEOUT_SECONDS)
            body, content_type = metrics.exposition()
            return Response(body, headers={"content-type": content_type})

    return api
