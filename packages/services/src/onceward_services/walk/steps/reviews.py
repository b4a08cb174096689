"""Reviews by admins. Opened under the walker's lock, at most one per subject.

A quarantined day opens a review, and so does a walker whose reports were rejected too often. The
resolution of the former decides about the day; the latter is only information about a walker.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any, Final, Literal

from onceward import Transaction
from onceward.errors import NotFoundError, ServiceError
from onceward.ports import Row, Store
from onceward_protocol.ids import new_id
from onceward_services.walk.steps.model import Resolution, ReviewView, ReviewViews
from onceward_services.walk.steps.repository import sql
from onceward_services.walk.walkers import instant

__all__ = [
    "close_reread_review",
    "find_review",
    "list_reviews",
    "open_review",
    "read_review",
    "resolve_review",
    "review_rejections",
]

ANTI_CHEAT: Final = "anti_cheat"
QUARANTINED_DAY: Final = "quarantined_day"
_CONFLICT: Final = 409


async def review_rejections(
    tx: Transaction, tenant: str, *, limit: int, window: timedelta, now: datetime
) -> None:
    """Open a review once there are ``limit`` rejections in the window, the newest one included.

    The walker is locked, so concurrent requests open one review. Rejections before the last
    resolved review do not count again.
    """
    about = {"tenant": tenant, "kind": ANTI_CHEAT}
    if await tx.fetch_one(sql("find_open_review"), about | {"day": ""}) is not None:
        return
    since = now - window
    resolved = await tx.fetch_one(sql("last_resolved_at"), about)
    if resolved is not None and resolved["at"] is not None:
        since = max(since, instant(resolved["at"]))
    rows = await tx.fetch_all(sql("rejections_since"), {"tenant": tenant, "since": since})
    if len(rows) >= limit:
        reasons = [{"code": row["code"], "at": instant(row["at"]).isoformat()} for row in rows]
        await open_review(tx, tenant, ANTI_CHEAT, day=None, reasons=reasons, now=now)


async def open_review(
    tx: Transaction,
    tenant: str,
    kind: Literal["anti_cheat", "quarantined_day"],
    *,
    day: date | None,
    reasons: Sequence[Mapping[str, Any]],
    now: datetime,
) -> None:
    """Open a review, or update the reasons of the one that is open."""
    values = {
        "tenant": tenant,
        "id": new_id(now),
        "kind": kind,
        "day": "" if day is None else day.isoformat(),
        "reasons": json.dumps(reasons, separators=(",", ":")),
        "now": now,
    }
    await tx.fetch_one(sql("open_review"), values)


async def close_reread_review(tx: Transaction, tenant: str, day: date, now: datetime) -> None:
    """Resolve the open review of a day that was read again and is accepted."""
    values = {"tenant": tenant, "day": day.isoformat(), "now": now}
    await tx.execute(sql("close_reread_review"), values)


async def find_review(tx: Transaction, review_id: str) -> Row:
    """Return a review of any walker; raises ``NotFoundError``."""
    row = await tx.fetch_one(sql("find_review"), {"id": review_id})
    if row is None:
        raise NotFoundError("there is no such review")
    return row


async def read_review(store: Store, review_id: str) -> Row:
    """Return a review, read outside any transaction; raises ``NotFoundError``."""
    rows = await store.read(sql("find_review"), {"id": review_id})
    if not rows:
        raise NotFoundError("there is no such review")
    return rows[0]


async def resolve_review(
    tx: Transaction, review_id: str, resolution: Resolution, *, admin: str, now: datetime
) -> Row:
    """Resolve an open review and return it. Its walker is locked."""
    row = await find_review(tx, review_id)
    if row["status"] != "open":
        raise ServiceError(
            _CONFLICT,
            "REVIEW_ALREADY_RESOLVED",
            "this review is resolved already",
            details={
                "decision": "suspend" if row["suspended"] else row["decision"],
                "resolvedBy": row["resolved_by"],
                "resolvedAt": instant(row["resolved_at"]).isoformat(),
            },
        )
    values = {
        "tenant": row["tenant"],
        "id": review_id,
        "now": now,
        "resolved_by": admin,
        "decision": "accept" if resolution.decision == "accept" else "reject",
        "suspended": resolution.decision == "suspend",
        "note": resolution.note,
    }
    await tx.execute(sql("resolve_review"), values)
    return await find_review(tx, review_id)


async def list_reviews(
    store: Store,
    *,
    status: str,
    after: str,
    limit: int,
    kind: str | None = None,
    walker: str | None = None,
    day: str | None = None,
) -> ReviewViews:
    """Return a page of reviews of all walkers, oldest first."""
    values = {
        "status": status,
        "after": after,
        "limit": limit + 1,
        "kind": kind,
        "walker": walker,
        "day": day,
    }
    rows = await store.read(sql("list_reviews"), values)
    items = [as_view(row) for row in rows[:limit]]
    return ReviewViews(items=items, next=items[-1].id if len(rows) > limit else None)


def as_view(row: Row) -> ReviewView:
    """Return the response model of a review."""
    resolved_at = row["resolved_at"]
    return ReviewView(
        id=row["id"],
        kind=row["kind"],
        walker_id=row["tenant"],
        day=row["day"] or None,
        reasons=json.loads(row["reasons"]),
        status=row["status"],
        opened_at=instant(row["opened_at"]),
        resolved_at=None if resolved_at is None else instant(resolved_at),
        resolved_by=row["resolved_by"],
        decision="suspend" if row["suspended"] else row["decision"],
        note=row["note"],
    )
