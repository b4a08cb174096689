"""The first page: what needs attention, and the last hour in numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from onceward.app import Onceward
from onceward.ports import Store
from onceward.stores.breaker import BreakerState
from onceward_operator.console.charts import sparkline
from onceward_operator.console.page import Page, PageRequest, Shown
from onceward_operator.console.queues import QueueState, read_queues
from onceward_operator.console.rendering import capped, elapsed
from onceward_operator.request_counts import MINUTES, OUTCOMES, read_request_counts

__all__ = ["Attention", "overview_page"]

_LATE_SECONDS: Final = 60.0
# A sweep runs at least once an hour, unless the app sweeps by itself.
_UNSWEPT: Final = timedelta(hours=3)
_OLDEST_EXPIRED: Final = "SELECT min(expires_at) AS at FROM {records}"
# What an outcome means, for those who do not know the word.
_MEANINGS: Final = {
    "fresh": "They ran, and their responses are stored.",
    "replayed": "Repeats: they got the stored response.",
    "mismatched": "409: the key was used for another request.",
    "in_progress": "409: the first request was still running.",
    "refused": "4xx that is not stored: a retry may run.",
    "stale": "The action was too old, or from the future.",
    "limited": "429: more than the rate limit allows.",
    "rolled_back": "They failed, and what they wrote was undone.",
    "unavailable": "503: the database did not respond.",
}
_MAX_COLUMNS: Final = 5


@dataclass(frozen=True, slots=True)
class Attention:
    """Something that an operator should look at, and where."""

    text: str
    path: str


@dataclass(frozen=True, slots=True)
class _Tile:
    title: str
    number: str
    meaning: str
    chart: Any
    # The list of what is counted, if there is one.
    path: str | None = None


def overview_page(onceward: Onceward[Any]) -> Page:
    """Return the first page."""
    return Page("", _Overview(onceward).show, title="Overview", live=True)


class _Overview:
    def __init__(self, onceward: Onceward[Any]) -> None:
        self._onceward = onceward

    async def show(self, request: PageRequest) -> Shown:
        """Show the last hour. Numbers of the whole server are for operators of all tenants."""
        if not request.operator.sees_all:
            return Shown("overview_of_tenant.html", {"tenants": request.operator.tenants})
        minutes = await read_request_counts(request.store, request.now)
        queues, most = await read_queues(request.store)
        oldest = await _oldest_expiry(request.store)
        unswept = None if oldest is None or oldest > request.now else request.now - oldest
        tiles = [
            _tile(title, _MEANINGS[name], minutes[name], _list_of(name))
            for name, title in OUTCOMES.items()
            if name in minutes or name in {"fresh", "replayed", "mismatched"}
        ]
        if "waited" in minutes:
            meaning = "Repeats that came while the first request was running."
            tiles.append(_tile("Waited", meaning, minutes["waited"]))
        if "store calls" in minutes:  # apps without metrics do not time them
            tiles.append(_store_time(minutes))
        return Shown(
            "overview.html",
            {
                "attention": [
                    *self._attention(unswept, sum(minutes["not logged"])),
                    *_attention_of_queues(queues, most, request.now),
                ],
                "tiles": tiles,
                "columns": _columns(len(tiles)),
                "oldest_expiry": oldest,
                "durability": _durability(request.store),
                "queues": queues,
                "most": most,
                "breaker": self._onceward.runtime.idempotency.breaker.state.value,
            },
        )

    def _attention(self, unswept: timedelta | None, not_logged: float) -> list[Attention]:
        """Return the findings besides queues, the most urgent first."""
        found = []
        if self._onceward.runtime.idempotency.breaker.state is BreakerState.OPEN:
            found.append(Attention("The circuit breaker of the database is open.", "system"))
        durability = getattr(self._onceward.store, "durability", None)
        if durability is not None:
            found += [Attention(f"Database: {text}", "system") for text in durability.weaknesses()]
        if unswept is not None and unswept > _UNSWEPT:
            hours = unswept / timedelta(hours=1)
            text = f"No expired record was deleted for {hours:,.0f} hours"
            found.append(Attention(text, "periodic"))
        if not_logged:
            found.append(
                Attention(f"{not_logged:,.0f} requests of the last hour were not logged", "records")
            )
        return found


def _attention_of_queues(queues: Sequence[QueueState], most: int, now: datetime) -> list[Attention]:
    """Return the findings about queues: paused ones first, then dead letters and late jobs."""
    paused, others = [], []
    for queue in queues:
        depth, name = queue.depth, {"queue": queue.name}
        if queue.paused is not None:
            length = elapsed(queue.paused.paused_at, now)
            paused.append(
                Attention(
                    f"Queue {queue.name} has been paused for {length}, by {queue.paused.actor}: "
                    f"{queue.paused.reason}",
                    "queues",
                )
            )
        if depth.dead:
            number = capped(depth.dead, most)
            text = f"{number} dead letter{'' if depth.dead == 1 else 's'} in {queue.name}"
            others.append(Attention(text, f"dead-letters?{urlencode(name)}"))
        if depth.oldest_seconds > _LATE_SECONDS and queue.paused is None:
            length = elapsed(now - timedelta(seconds=depth.oldest_seconds), now)
            text = f"The oldest due job of {queue.name} has waited for {length}"
            others.append(Attention(text, f"jobs?{urlencode(name | {'state': 'waiting'})}"))
    return paused + others


def _list_of(outcome: str) -> str:
    """Return the page that lists the requests with an outcome."""
    return "records" if outcome == "fresh" else f"requests?{urlencode({'outcome': outcome})}"


def _columns(tiles: int) -> int:
    """Return how many tiles a row has, so that no row has a single one."""
    rows = -(-tiles // _MAX_COLUMNS)
    return -(-tiles // max(rows, 1))


def _tile(title: str, meaning: str, numbers: list[float], path: str | None = None) -> _Tile:
    shown, label = f"{int(sum(numbers)):,}", f"{title}, last hour by minute"
    return _Tile(title, shown, meaning, sparkline(numbers, label), path)


def _store_time(minutes: Mapping[str, list[float]]) -> _Tile:
    """Return the mean time of a call to the store."""
    nothing = [0.0] * MINUTES
    calls, seconds = minutes.get("store calls", nothing), minutes.get("store seconds", nothing)
    means = [1e3 * took / max(number, 1.0) for took, number in zip(seconds, calls, strict=True)]
    mean = 1e3 * sum(seconds) / max(sum(calls), 1.0)
    title = "Mean store call"
    meaning = f"Of {int(sum(calls)):,} calls to the database."
    chart = sparkline(means, f"{title}, last hour by minute")
    return _Tile(title, f"{mean:,.2f} ms", meaning, chart)


def _durability(store: Store) -> str:
    """Return the database's guarantee for commits, in one line."""
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
