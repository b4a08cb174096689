"""The first page: what needs attention, and the last hour in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.console.charts import sparkline
from holdfast.console.page import Page, PageRequest, Shown
from holdfast.core.breaker import BreakerState
from holdfast.jobs.admin import JobAdmin, QueueDepth
from holdfast.jobs.depth_reporter import MAX_COUNTED
from holdfast.server.app import Holdfast
from holdfast.server.request_counts import OUTCOMES, read_request_counts

__all__ = ["Attention", "overview_page"]

_LATE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Something that an operator should look at, and where."""

    text: str
    path: str


@dataclass(frozen=True, slots=True)
class _Tile:
    title: str
    number: float
    chart: Any


def overview_page(holdfast: Holdfast[Any]) -> Page:
    """Return the first page."""
    return Page("", _Overview(holdfast).show, title="Overview", live=True)


class _Overview:
    def __init__(self, holdfast: Holdfast[Any]) -> None:
        self._holdfast = holdfast

    async def show(self, request: PageRequest) -> Shown:
        """Show the last hour. Numbers of the whole server are for operators of all tenants."""
        if not request.operator.sees_all:
            return Shown("overview_of_tenant.html", {"tenants": request.operator.tenants})
        minutes = await read_request_counts(request.store, request.now)
        depths = await JobAdmin(request.store).depths(most=MAX_COUNTED)
        return Shown(
            "overview.html",
            {
                "attention": self._attention(depths),
                "tiles": [
                    _tile(title, minutes[name])
                    for name, title in OUTCOMES.items()
                    if name in minutes or name in {"fresh", "replayed", "mismatched"}
                ],
                "depths": sorted(depths.items()),
                "most": MAX_COUNTED,
                "breaker": self._holdfast.idempotency.breaker.state.value,
            },
        )

    def _attention(self, depths: Mapping[str, QueueDepth]) -> list[Attention]:
        found = []
        if self._holdfast.idempotency.breaker.state is BreakerState.OPEN:
            found.append(Attention("The circuit breaker of the database is open.", "system"))
        for queue, depth in sorted(depths.items()):
            if depth.dead:
                found.append(
                    Attention(
                        f"{depth.dead:,} dead letters in {queue}", f"dead-letters?queue={queue}"
                    )
                )
            if depth.oldest_seconds > _LATE_SECONDS:
                seconds = depth.oldest_seconds
                found.append(
                    Attention(
                        f"The oldest due job of {queue} has waited {seconds:,.0f} seconds",
                        f"jobs?queue={queue}&state=waiting",
                    )
                )
        return found


def _tile(title: str, numbers: list[float]) -> _Tile:
    total = sum(numbers)
    return _Tile(title, total, sparkline(numbers, f"{title}, last hour by minute"))
