"""The first page: what needs attention, and the last hour in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from holdfast.console.charts import sparkline
from holdfast.console.page import Page, PageRequest, Shown
from holdfast.console.queues import read_depths
from holdfast.console.rendering import capped
from holdfast.core.breaker import BreakerState
from holdfast.jobs.admin import QueueDepth
from holdfast.ports import Store
from holdfast.server.app import Holdfast
from holdfast.server.request_counts import MINUTES, OUTCOMES, read_request_counts

__all__ = ["Attention", "overview_page"]

_LATE_SECONDS: Final = 60.0
# A sweep runs at least once an hour, unless the app sweeps by itself.
_UNSWEPT: Final = timedelta(hours=3)
_OLDEST_EXPIRED: Final = "SELECT min(expires_at) AS at FROM {records}"


@dataclass(frozen=True, slots=True)
class Attention:
    """Something that an operator should look at, and where."""

    text: str
    path: str


@dataclass(frozen=True, slots=True)
class _Tile:
    title: str
    number: str
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
        depths, most = await read_depths(request.store)
        oldest = await _oldest_expiry(request.store)
        unswept = None if oldest is None or oldest > request.now else request.now - oldest
        tiles = [
            _tile(title, minutes[name])
            for name, title in OUTCOMES.items()
            if name in minutes or name in {"fresh", "replayed", "mismatched"}
        ]
        if "waited" in minutes:
            tiles.append(_tile("Waited for the first request", minutes["waited"]))
        if "store calls" in minutes:  # apps without metrics do not time them
            tiles.append(_store_time(minutes))
        return Shown(
            "overview.html",
            {
                "attention": self._attention(depths, most, unswept, sum(minutes["not logged"])),
                "tiles": tiles,
                "oldest_expiry": oldest,
                "durability": _durability(request.store),
                "depths": sorted(depths.items()),
                "most": most,
                "breaker": self._holdfast.idempotency.breaker.state.value,
            },
        )

    def _attention(
        self,
        depths: Mapping[str, QueueDepth],
        most: int,
        unswept: timedelta | None,
        not_logged: float,
    ) -> list[Attention]:
        """Return what to look at, the most urgent first."""
        found = []
        if self._holdfast.idempotency.breaker.state is BreakerState.OPEN:
            found.append(Attention("The circuit breaker of the database is open.", "system"))
        durability = getattr(self._holdfast.store, "durability", None)
        if durability is not None:
            found += [Attention(f"Database: {text}", "system") for text in durability.weaknesses()]
        if unswept is not None and unswept > _UNSWEPT:
            hours = unswept / timedelta(hours=1)
            found.append(Attention(f"No expired record was deleted for {hours:,.0f} hours", "jobs"))
        for queue, depth in sorted(depths.items()):
            if depth.dead:
                found.append(
                    Attention(
                        f"{capped(depth.dead, most)} dead letter{'' if depth.dead == 1 else 's'}"
                        f" in {queue}",
                        f"dead-letters?{urlencode({'queue': queue})}",
                    )
                )
            if depth.oldest_seconds > _LATE_SECONDS:
                seconds = depth.oldest_seconds
                found.append(
                    Attention(
                        f"The oldest due job of {queue} has waited {seconds:,.0f} seconds",
                        f"jobs?{urlencode({'queue': queue, 'state': 'waiting'})}",
                    )
                )
        if not_logged:
            found.append(
                Attention(f"{not_logged:,.0f} requests of the last hour were not logged", "records")
            )
        return found


def _tile(title: str, numbers: list[float]) -> _Tile:
    shown = f"{int(sum(numbers)):,}"
    return _Tile(title, shown, sparkline(numbers, f"{title}, last hour by minute"))


def _store_time(minutes: Mapping[str, list[float]]) -> _Tile:
    """Return the mean time of a call to the store."""
    nothing = [0.0] * MINUTES
    calls, seconds = minutes.get("store calls", nothing), minutes.get("store seconds", nothing)
    means = [1e3 * took / max(number, 1.0) for took, number in zip(seconds, calls, strict=True)]
    mean = 1e3 * sum(seconds) / max(sum(calls), 1.0)
    title = "Mean time of a store call"
    return _Tile(title, f"{mean:,.2f} ms", sparkline(means, f"{title}, last hour by minute"))


def _durability(store: Store) -> str:
    """Return what the database guarantees about commits, in one line."""
    durability = getattr(store, "durability", None)
    if durability is not None:
        described: str = durability.describe()
        return described
    return "every commit is on the disk" if store.name == "sqlite" else "see System"


async def _oldest_expiry(store: Store) -> datetime | None:
    """Return when the first record expires, by one look-up in an index."""
    sql = _OLDEST_EXPIRED.replace("{records}", store.table_names.table("idempotency_records"))
    value = (await store.read(sql))[0]["at"]
    return datetime.fromisoformat(value) if isinstance(value, str) else value
