"""Pages of the console about walk: reviews, and devices that get pushes."""

import re
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from pydantic import ValidationError

from onceward import Onceward
from onceward.errors import NotFoundError
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward.tenants import tenant_or_none
from onceward_operator.console import (
    ConsoleError,
    NotShownError,
    Page,
    PageRequest,
    Redirected,
    Role,
    Shown,
    operator_action,
    read_tenant_rows,
)
from onceward_protocol.storage.sql_files import Queries
from onceward_services.settings import Settings
from onceward_services.walk.admin import read_review
from onceward_services.walk.push.delivery import PUSH
from onceward_services.walk.steps import reviews
from onceward_services.walk.steps.model import Resolution, ReviewView
from onceward_services.walk.steps.resolution import resolve_review
from onceward_services.walk.walkers import instant

__all__ = ["pages"]

_GROUP: Final = "Walk"
_TEMPLATES: Final = "onceward_services.walk"
_PAGE_ROWS: Final = 50
_STATES: Final = ("open", "resolved")
_DECISIONS: Final = ("accept", "reject", "suspend")
_MAX_DIGITS: Final = 9
# The server creates all ids. Other text is not looked up: PostgreSQL rejects some characters.
_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def pages(onceward: Onceward, settings: Settings) -> list[Page]:
    """Return the pages of walk."""
    found = _WalkPages(onceward, settings)
    return [
        Page("reviews", found.reviews, title="Reviews", group=_GROUP, templates=_TEMPLATES),
        Page("reviews/{id}", found.review, templates=_TEMPLATES),
        Page("reviews/{id}/resolve", found.resolve, method="POST", role=Role.ADMIN),
        Page("devices", found.devices, title="Push", group=_GROUP, templates=_TEMPLATES),
    ]


class _WalkPages:
    def __init__(self, onceward: Onceward, settings: Settings) -> None:
        self._onceward = onceward
        self._settings = settings

    async def reviews(self, request: PageRequest) -> Shown:
        """List reviews, oldest first."""
        status, after = request.query.get("status", "open"), request.query.get("after", "")
        if status not in _STATES:
            raise ConsoleError(f"status must be one of {', '.join(_STATES)}")
        if after and _ID.fullmatch(after) is None:
            raise ConsoleError("after is not a place in this list")
        found = await _list_reviews(request, status, after)
        shown = found[:_PAGE_ROWS]
        following = shown[-1].id if len(found) > _PAGE_ROWS else None
        return Shown(
            "reviews.html",
            {
                "reviews": shown,
                "status": status,
                "states": _STATES,
                **request.pager("reviews", following),
            },
        )

    async def review(self, request: PageRequest) -> Shown:
        """Show one review with its evidence."""
        await _check_shown(request)
        try:
            review = await read_review(request.store, request.path["id"])
        except NotFoundError as error:
            raise NotShownError(str(error)) from error
        sees = request.operator.sees_payloads
        return Shown(
            "review.html",
            {
                "review": review,
                "decisions": _DECISIONS,
                "summaries": [
                    _pretty(each.summary) if sees else None for each in review.attestations
                ],
            },
        )

    async def resolve(self, request: PageRequest) -> Redirected:
        """Resolve a review; the reason is its note and is kept in the audit log."""
        row = await _check_shown(request)
        review_id, resolution = request.path["id"], _resolution(request)
        async with operator_action(
            self._onceward,
            request,
            tenant=row["tenant"],
            name="admin.review.resolve",
            resource=f"review:{review_id}",
        ) as action:
            await resolve_review(
                action.transaction,
                action.enqueue,
                review_id,
                resolution,
                admin=request.actor,
                settings=self._settings,
                now=request.now,
            )
        query = urlencode({"tenant": row["tenant"]})
        return Redirected(
            f"reviews/{review_id}?{query}", f"The review is resolved: {resolution.decision}."
        )

    async def devices(self, request: PageRequest) -> Shown:
        """List devices, and what was not pushed to them yet."""
        sql = _sql(request.store)
        rows, following = await read_tenant_rows(
            request, of_all=sql["devices"], of_one=sql["devices_of_walker"], limit=_PAGE_ROWS
        )
        return Shown(
            "devices.html",
            {
                "devices": [await _device(request.store, row) for row in rows],
                "push": self._settings.walk_push,
                "job_type": PUSH,
                **request.pager("devices", following),
            },
        )


async def _list_reviews(request: PageRequest, status: str, after: str) -> list[ReviewView]:
    """Return one review more than a page has, if there is one."""
    tenant, limit = tenant_or_none(request.tenant), _PAGE_ROWS + 1
    if tenant is None:
        found = await reviews.list_reviews(request.store, status=status, after=after, limit=limit)
        return list(found.items)
    values = {"tenant": tenant, "status": status, "after": after, "limit": limit}
    rows = await request.store.read(_sql(request.store)["reviews_of_walker"], values)
    return [reviews.as_view(row) for row in rows]


async def _check_shown(request: PageRequest) -> Row:
    """Return the review of the path. Raises ``NotShownError`` for one of a hidden tenant."""
    try:
        if _ID.fullmatch(request.path["id"]) is None:
            raise NotFoundError("there is no such review")  # noqa: TRY301 - the same as without a row
        row = await reviews.read_review(request.store, request.path["id"])
    except NotFoundError as error:
        raise NotShownError(str(error)) from error
    if not request.operator.sees(row["tenant"]):
        raise NotShownError("there is no such review")
    return row


def _resolution(request: PageRequest) -> Resolution:
    fields: dict[str, Any] = {"decision": request.form.get("decision"), "note": request.reason()}
    count = request.form.get("accepted_count", "").strip()
    if count:
        if not (count.isascii() and count.isdigit() and len(count) <= _MAX_DIGITS):
            raise ConsoleError("the accepted count must be a whole number")
        fields["acceptedCount"] = int(count)
    try:
        return Resolution.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "resolution"
        raise ConsoleError(f"nothing was changed: {name}: {first['msg']}") from error


async def _device(store: Store, row: Row) -> dict[str, Any]:
    about = {"tenant": row["tenant"], "after": row["pushed_seq"]}
    waiting = await store.read(_sql(store)["pushes_waiting"], about)
    return {
        **row,
        "registered_at": instant(row["registered_at"]),
        "waiting": waiting[0]["type"] if waiting else None,
        "waiting_since": instant(waiting[0]["created_at"]) if waiting else None,
    }


def _pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _sql(store: Store) -> Queries:
    return load_queries("onceward_services.walk", "console.sql", names=store.table_names)
