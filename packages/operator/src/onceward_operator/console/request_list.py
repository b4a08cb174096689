"""The page that lists requests without a record: replays, mismatches, refusals and failures."""

import re
from datetime import UTC, datetime
from typing import Any, Final

from onceward.ports import Row
from onceward.stores.sql_loader import load_queries
from onceward.tenants import tenant_or_none
from onceward_operator.console.page import ConsoleError, Page, PageRequest, Shown
from onceward_operator.request_counts import OUTCOMES

__all__ = ["request_list_page"]

_PAGE_ROWS: Final = 20
# How many rows of the log one page reads, however few of them match: it has no index of outcomes.
_SCANNED: Final = 500
# Where a page goes on: seconds since 1970 and the id of a row.
_PLACE: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ([0-9]{1,18})")
_NEWEST: Final = (1e12, 2**62)
# All but those that were executed, which have a record.
_LOGGED: Final = {name: title for name, title in OUTCOMES.items() if name != "fresh"}


def request_list_page() -> Page:
    """Return the page, which every operator may open."""
    return Page("requests", _show, title="Replays and refusals")


async def _show(request: PageRequest) -> Shown:
    """List the newest requests of the log by outcome."""
    outcome = request.query.get("outcome", "")
    if outcome and outcome not in _LOGGED:
        raise ConsoleError(f"outcome must be one of {', '.join(_LOGGED)}")
    before_at, before_id = _place(request.query.get("after"))
    tenant = tenant_or_none(request.tenant)
    scanned = _PAGE_ROWS + 1 if not outcome and tenant is None else _SCANNED
    values: dict[str, Any] = {
        "before_at": before_at,
        "before_id": before_id,
        "outcome": outcome,
        "tenant": tenant or "",
        "scanned": scanned,
        "most": _PAGE_ROWS + 1,
    }
    names = request.store.table_names
    sql = load_queries("onceward_operator.console", "request_list.sql", names=names)[
        "logged_requests"
    ]
    rows = await request.store.read(sql, values)
    found = [row for row in rows if row["matches"]]
    last = None
    if len(found) > _PAGE_ROWS:
        last = found[_PAGE_ROWS - 1]
    elif rows and rows[-1]["nth"] == scanned:
        last = rows[-1]
    following = None if last is None else f"{last['at']} {last['id']}"
    return Shown(
        "request_list.html",
        {
            "requests": [_shown(row) for row in found[:_PAGE_ROWS]],
            "outcome": outcome,
            "outcomes": _LOGGED,
            **request.pager("requests", following),
        },
    )


def _place(after: str | None) -> tuple[float, int]:
    """Return before which row a page begins."""
    if after is None:
        return _NEWEST
    found = _PLACE.fullmatch(after)
    if found is None:
        raise ConsoleError("after is not a place in this list")
    return float(found[1]), int(found[2])


def _shown(row: Row) -> dict[str, Any]:
    title = OUTCOMES.get(row["outcome"], row["outcome"])
    return {**row, "at": datetime.fromtimestamp(row["at"], UTC), "title": title}
