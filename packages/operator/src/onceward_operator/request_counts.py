"""Counts of the last hour, minute by minute, in all processes of a database."""

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from onceward.ports import Store
from onceward.stores.sql_loader import load_queries

__all__ = ["MINUTES", "OUTCOMES", "read_request_counts"]

MINUTES: Final = 60
"""How many minutes ``read_request_counts`` returns."""

OUTCOMES: Final[Mapping[str, str]] = {
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
"""How outcomes of requests are shown, in this order."""

_SECONDS: Final = 60


async def read_request_counts(store: Store, now: datetime) -> Mapping[str, list[float]]:
    """Return numbers by name, one for each minute, the current one last."""
    last = int(now.timestamp()) // _SECONDS * _SECONDS
    since = last - (MINUTES - 1) * _SECONDS
    file = "request_log.sqlite.sql" if store.name == "sqlite" else "request_log.postgres.sql"
    sql = load_queries("onceward.guard", file, names=store.table_names)["read_counts"]
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * MINUTES)
    for row in await store.read(sql, {"since": since}):
        place = (row["minute"] - since) // _SECONDS
        if 0 <= place < MINUTES:
            found[row["name"]][place] = float(row["number"])
    return found
