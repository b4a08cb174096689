"""Queries of route requests. The same SQL on SQLite and PostgreSQL, always by tenant."""

import json
import re
from datetime import datetime
from typing import Any, Final

from onceward import Transaction
from onceward.ports import Store
from onceward.stores.sql_loader import load_queries
from onceward_services.routes.model import RouteSubmission, RouteView

__all__ = ["add_request", "find_request", "read_submission", "save_route"]

# The server creates all ids. Other text is not looked up: PostgreSQL rejects some characters.
_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


async def add_request(
    tx: Transaction, *, tenant: str, request_id: str, submission: RouteSubmission, now: datetime
) -> None:
    """Insert a submission with the status queued."""
    await tx.execute(
        load_queries("onceward_services.routes")["add_request"],
        {
            "tenant": tenant,
            "request_id": request_id,
            "payload": json.dumps(submission.model_dump(mode="json"), separators=(",", ":")),
            "now": now,
        },
    )


async def find_request(store: Store, *, tenant: str, request_id: str) -> RouteView | None:
    """Return one of the tenant's submissions, or None."""
    if _ID.fullmatch(request_id) is None:
        return None
    rows = await store.read(
        load_queries("onceward_services.routes")["find_request"],
        {"tenant": tenant, "request_id": request_id},
    )
    if not rows:
        return None
    row = dict(rows[0])
    result = row.pop("result")
    return RouteView(**row, route=None if result is None else json.loads(result))


async def read_submission(store: Store, *, tenant: str, request_id: str) -> str | None:
    """Return a submission as JSON, or None."""
    rows = await store.read(
        load_queries("onceward_services.routes")["read_submission"],
        {"tenant": tenant, "request_id": request_id},
    )
    return str(rows[0]["payload"]) if rows else None


async def save_route(
    tx: Transaction, *, tenant: str, request_id: str, route: dict[str, Any], now: datetime
) -> None:
    """Save the planned route."""
    await tx.execute(
        load_queries("onceward_services.routes")["save_route"],
        {
            "tenant": tenant,
            "request_id": request_id,
            "result": json.dumps(route, separators=(",", ":"), ensure_ascii=False),
            "now": now,
        },
    )
