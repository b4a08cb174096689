"""The first page: what needs attention, and the last hour in numbers."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.console.charts import sparkline
from holdfast.console.page import Page, PageRequest, Shown
from holdfast.core.breaker import BreakerState
from holdfast.jobs.admin import JobAdmin, QueueDepth
from holdfast.jobs.depth_reporter import MAX_COUNTED
from holdfast.ports import Store
from holdfast.server.app import Holdfast
from holdfast.stores.sql_loader import load_queries

__all__ = ["Attention", "overview_page"]

_MINUTE: Final = 60
_MINUTES: Final = 60
_LATE_SECONDS: Final = 60.0
# How outcomes are named on the page, in this order.
_OUTCOMES: Final = {
    "fresh": "Executed",
    "replayed": "Replayed",
    "mismatched": "Mismatched",
    "in_progress": "Still running",
    "refused": "Refused",
    "stale": "Stale",
    "limited": "Rate limited",
    "rolled_back": "Rolled back",
    "unavailable": "Store unavailable",
}


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
        minutes = await self._minutes(request)
        depths = await JobAdmin(request.store).depths(most=MAX_COUNTED)
        return Shown(
            "overview.html",
            {
                "attention": self._attention(depths),
                "tiles": [
                    _tile(title, minutes[name])
                    for name, title in _OUTCOMES.items()
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

    async def _minutes(self, request: PageRequest) -> dict[str, list[float]]:
        """Return the numbers of the last hour by name, one for each minute."""
        last = int(request.now.timestamp()) // _MINUTE * _MINUTE
        since = last - (_MINUTES - 1) * _MINUTE
        found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * _MINUTES)
        for row in await request.store.read(_read_counts(request.store), {"since": since}):
            place = (row["minute"] - since) // _MINUTE
            if 0 <= place < _MINUTES:
                found[row["name"]][place] = float(row["number"])
        return found


def _tile(title: str, numbers: list[float]) -> _Tile:
    total = sum(numbers)
    return _Tile(title, total, sparkline(numbers, f"{title}, last hour by minute"))


def _read_counts(store: Store) -> str:
    file = "request_log.sqlite.sql" if store.name == "sqlite" else "request_log.postgres.sql"
    return load_queries("holdfast.server", file, names=store.table_names)["read_counts"]
