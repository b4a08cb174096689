"""The route of an organization's audit log, which the guard writes."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response

from onceward.ports import Row, Store
from onceward.stores.table_names import TableNames
from onceward_protocol.staleness import parse_instant
from onceward_services.auth import CurrentPrincipal
from onceward_services.planning.aggregates import AggregateService, json_response
from onceward_services.planning.model import AuditEventView, Page
from onceward_services.planning.openapi import LIST
from onceward_services.planning.paging import After, Limit, page, read_cursor
from onceward_services.planning.repository import sql

__all__ = ["add_routes"]

# The condition of each filter. Conditions for unused filters, such as "or is null", would prevent
# the use of indexes.
_CONDITIONS: Final = {
    "from": "AND created_at >= :from",
    "to": "AND created_at < :to",
    "actor": "AND actor = :actor",
    "resource": "AND resource = :resource",
    "endpoint": "AND endpoint = :endpoint",
}
# The index to use on SQLite, the most selective first. Without a hint SQLite scans the table, which
# is ordered by id too. PostgreSQL chooses the index without a hint.
_INDEXES: Final = {
    "resource": "idx_onceward_audit_events_resource",
    "actor": "idx_onceward_audit_events_actor",
    "endpoint": "idx_onceward_audit_events_endpoint",
}
# An id contains the milliseconds of the server's clock, but the times of jobs are the database's,
# so they may differ. The ids only limit the range; the conditions on times decide.
_SLACK: Final = timedelta(seconds=5)
# Enough to see that two events have the same body.
_SHORT_HASH: Final = 12
_AFTER_ALL_IDS: Final = "g"  # ids are hexadecimal

Text = Annotated[str | None, Query(max_length=1000)]


def add_routes(api: APIRouter, service: AggregateService) -> None:
    """Add the route of the audit log."""

    @api.get(
        "/audit",
        summary="List audit events",
        operation_id="list_audit_events",
        description="Newest first. One event for each executed write and each job it caused; "
        "replays and failed writes have none. `payload_hash` is whole for the roles auditor and "
        "admin, and has 12 digits for others.",
        response_model=Page[AuditEventView],
        responses=LIST,
    )
    async def list_page(
        caller: CurrentPrincipal,
        *,
        limit: Limit = 50,
        after: After = None,
        since: Annotated[
            str | None,
            Query(
                alias="from", description="Only events from this instant on, ISO 8601 with zone."
            ),
        ] = None,
        until: Annotated[
            str | None,
            Query(alias="to", description="Only events before this instant, ISO 8601 with zone."),
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
        service.roles.check_read(caller)
        filters: dict[str, Any] = {
            "from": None if since is None else parse_instant(since, "from"),
            "to": None if until is None else parse_instant(until, "to"),
            "actor": actor,
            "resource": resource,
            "endpoint": endpoint,
        }
        given = {name: value for name, value in filters.items() if value is not None}
        before = read_cursor(after, "audit")
        rows = await _events(service.onceward.store, caller.tenant, given, before, limit + 1)
        found = page(rows, limit, "audit")
        if not service.roles.sees_hashes(caller):
            # The whole hash of a short body could be guessed.
            for event in found["items"]:
                event["payload_hash"] = event["payload_hash"][:_SHORT_HASH]
        return json_response(found)


async def _events(
    store: Store, tenant: str, given: dict[str, Any], before: str | None, limit: int
) -> Sequence[Row]:
    if any(isinstance(value, str) and "\x00" in value for value in given.values()):
        return []  # no stored value contains it, and PostgreSQL rejects it
    least = _first_id(given["from"], -_SLACK) if "from" in given else ""
    bound = _first_id(given["to"], _SLACK) if "to" in given else _AFTER_ALL_IDS
    values = given | {
        "tenant": tenant,
        "least": least,
        "before": bound if before is None else min(before, bound),
        "limit": limit,
    }
    query = _query(tuple(given), store.table_names, is_sqlite=store.name == "sqlite")
    return await store.read(query, values)


@cache
def _query(given: tuple[str, ...], names: TableNames, *, is_sqlite: bool) -> str:
    """Return the SQL of a page with these filters."""
    conditions = "\n   ".join(_CONDITIONS[name] for name in given)
    text = sql("audit_page").replace("/* more */", conditions)
    index = next((_INDEXES[name] for name in _INDEXES if name in given), None)
    if is_sqlite and index:
        text = text.replace("/* by */", f"INDEXED BY {index}")
    return names.render(text)


def _first_id(at: datetime, slack: timedelta) -> str:
    """Return a lower bound of all ids since this instant."""
    millis = int((at.timestamp() + slack.total_seconds()) * 1000)
    digits = f"{max(0, millis):012x}"
    return f"{digits[:8]}-{digits[8:]}"
