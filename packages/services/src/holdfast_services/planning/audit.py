"""The audit log of an organization, newest first. Written by the guard; here it is only read."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response

from holdfast.core.staleness import parse_instant
from holdfast.ports import Row, Store
from holdfast_services.auth import CurrentPrincipal
from holdfast_services.planning.aggregates import AggregateService, json_response
from holdfast_services.planning.model import AuditEventView, Page
from holdfast_services.planning.openapi import LISTED
from holdfast_services.planning.paging import After, Limit, page, read_cursor
from holdfast_services.planning.repository import sql

__all__ = ["add_routes"]

# Which condition each filter adds. A condition that is there for every page, such as "or is null",
# would keep the indexes from being used.
_CONDITIONS: Final = {
    "from": "AND created_at >= :from",
    "to": "AND created_at < :to",
    "actor": "AND actor = :actor",
    "resource": "AND resource = :resource",
    "endpoint": "AND endpoint = :endpoint",
}
# The index to walk, the most selective first. PostgreSQL finds it by itself. SQLite would rather
# walk the table, which is in the order of the ids too, past all that others did.
_INDEXES: Final = {
    "resource": "idx_audit_events_resource",
    "actor": "idx_audit_events_actor",
    "endpoint": "idx_audit_events_endpoint",
}
# An id holds the milliseconds of the clock that made it. Times of jobs are the database's own, so
# the two may differ; the times decide, the ids only say where to begin.
_SLACK: Final = timedelta(seconds=5)
_BEHIND_ALL: Final = "g"  # ids are hexadecimal

Text = Annotated[str | None, Query(max_length=1000)]


def add_routes(api: APIRouter, service: AggregateService) -> None:
    """Add the log's one route."""

    @api.get(
        "/audit",
        summary="See who did what",
        operation_id="list_audit_events",
        description="Newest first. One event for every write that was carried out and every job "
        "it caused; replays and refused writes have none.",
        response_model=Page[AuditEventView],
        responses=LISTED,
    )
    async def listing(
        caller: CurrentPrincipal,
        *,
        limit: Limit = 50,
        after: After = None,
        since: Annotated[
            str | None, Query(alias="from", description="From this instant on, ISO 8601 with zone.")
        ] = None,
        until: Annotated[
            str | None, Query(alias="to", description="Before this instant, ISO 8601 with zone.")
        ] = None,
        actor: Text = None,
        resource: Annotated[
            str | None,
            Query(max_length=1000, examples=["mission:0197a6d2-7c00-7000-8000-00000000"]),
        ] = None,
        endpoint: Annotated[
            str | None, Query(max_length=1000, examples=["PATCH /v1/missions/{mission_id}"])
        ] = None,
    ) -> Response:
        filters: dict[str, Any] = {
            "from": None if since is None else parse_instant(since, "from"),
            "to": None if until is None else parse_instant(until, "to"),
            "actor": actor,
            "resource": resource,
            "endpoint": endpoint,
        }
        given = {name: value for name, value in filters.items() if value is not None}
        before = read_cursor(after, "audit")
        rows = await _events(service.holdfast.store, caller.tenant, given, before, limit + 1)
        return json_response(page(rows, limit, "audit"))


async def _events(
    store: Store, tenant: str, given: dict[str, Any], before: str | None, limit: int
) -> Sequence[Row]:
    if any(isinstance(value, str) and "\x00" in value for value in given.values()):
        return []  # nobody and nothing is named so, and PostgreSQL would not even look
    least = _first_id(given["from"], -_SLACK) if "from" in given else ""
    bound = _first_id(given["to"], _SLACK) if "to" in given else _BEHIND_ALL
    values = given | {
        "tenant": tenant,
        "least": least,
        "before": bound if before is None else min(before, bound),
        "limit": limit,
    }
    return await store.read(_query(tuple(given), is_sqlite=store.name == "sqlite"), values)


@cache
def _query(given: tuple[str, ...], *, is_sqlite: bool) -> str:
    """Return the query of a page with these filters."""
    conditions = "\n   ".join(_CONDITIONS[name] for name in given)
    text = sql("audit_page").replace("/* more */", conditions)
    index = next((_INDEXES[name] for name in _INDEXES if name in given), None)
    return text.replace("/* by */", f"INDEXED BY {index}") if is_sqlite and index else text


def _first_id(at: datetime, slack: timedelta) -> str:
    """Return what no id of this instant, or of a later one, is less than."""
    millis = int((at.timestamp() + slack.total_seconds()) * 1000)
    digits = f"{max(0, millis):012x}"
    return f"{digits[:8]}-{digits[8:]}"
