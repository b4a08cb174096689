"""Queries of planning. The same SQL on SQLite and PostgreSQL, always by tenant."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from onceward import Transaction
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_services.planning.read_cache import Kind

if TYPE_CHECKING:
    from onceward_protocol.storage.sql_files import Queries

__all__ = [
    "add",
    "change_assignment",
    "change_mission",
    "change_project",
    "end_assignment",
    "find",
    "find_in",
    "is_id",
    "list_in",
    "move_assignment",
    "remove_mission",
    "sql",
    "version_in",
]

# The server creates all ids. Other text is not looked up: PostgreSQL rejects some characters.
_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CHANGEABLE: Final[dict[Kind, tuple[str, ...]]] = {
    "project": ("name", "description", "archived"),
    "mission": ("title", "description", "status", "starts_at", "ends_at"),
    "assignment": ("assignee", "role"),
}


def sql(name: str) -> str:
    """Return one of planning's queries."""
    queries: Queries = load_queries("onceward_services.planning")
    return queries[name]


def is_id(text: str) -> bool:
    """Return whether a text may be an id of planning."""
    return _ID.fullmatch(text) is not None


async def find(tx: Transaction, kind: Kind, tenant: str, item_id: str) -> Row | None:
    """Return an aggregate inside a transaction, or None."""
    if not is_id(item_id):
        return None
    return await tx.fetch_one(sql(f"find_{kind}"), {"tenant": tenant, "id": item_id})


async def find_in(store: Store, kind: Kind, tenant: str, item_id: str) -> Row | None:
    """Return an aggregate outside any transaction, or None."""
    if not is_id(item_id):
        return None
    rows = await store.read(sql(f"find_{kind}"), {"tenant": tenant, "id": item_id})
    return rows[0] if rows else None


async def version_in(store: Store, kind: Kind, tenant: str, item_id: str) -> int | None:
    """Return the current version of an aggregate, or None."""
    if not is_id(item_id):
        return None
    rows = await store.read(sql(f"version_of_{kind}"), {"tenant": tenant, "id": item_id})
    return rows[0]["version"] if rows else None


async def list_in(
    store: Store,
    query: str,
    tenant: str,
    *,
    after: str | None,
    limit: int,
    **filters: str,
) -> Sequence[Row]:
    """Return up to ``limit`` rows after the id ``after``."""
    values = {"tenant": tenant, "after": after or "", "limit": limit, **filters}
    return await store.read(sql(query), values)


async def add(
    tx: Transaction,
    kind: Kind,
    tenant: str,
    item_id: str,
    *,
    fields: Mapping[str, Any],
    now: datetime,
) -> Row:
    """Insert an aggregate and return its row."""
    values = {"tenant": tenant, "id": item_id, **fields, "now": now}
    await tx.execute(sql(f"add_{kind}"), values)
    return {"id": item_id, **fields, "version": 1, "created_at": now, "updated_at": now}


async def change_mission(
    tx: Transaction,
    tenant: str,
    mission_id: str,
    fields: Mapping[str, Any],
    *,
    version: int,
    now: datetime,
) -> Row | None:
    """Set these fields if the mission has this version; returns None if not."""
    return await _change(tx, "mission", tenant, mission_id, fields, version, now)


async def change_project(
    tx: Transaction,
    tenant: str,
    project_id: str,
    fields: Mapping[str, Any],
    *,
    version: int,
    now: datetime,
) -> Row | None:
    """Set name, description, archived if the project has this version; returns None if not."""
    return await _change(tx, "project", tenant, project_id, fields, version, now)


async def change_assignment(
    tx: Transaction,
    tenant: str,
    assignment_id: str,
    fields: Mapping[str, Any],
    *,
    version: int,
    now: datetime,
) -> Row | None:
    """Set assignee and role if the assignment has this version; returns None if not."""
    return await _change(tx, "assignment", tenant, assignment_id, fields, version, now)


async def end_assignment(
    tx: Transaction, tenant: str, assignment_id: str, *, version: int, now: datetime
) -> Row | None:
    """Mark the assignment as ended if it has this version; returns None if not."""
    values = {"tenant": tenant, "id": assignment_id, "version": version, "now": now}
    return await tx.fetch_one(sql("end_assignment"), values)


async def _change(  # noqa: PLR0917 - what the three functions above have
    tx: Transaction,
    kind: Kind,
    tenant: str,
    item_id: str,
    fields: Mapping[str, Any],
    version: int,
    now: datetime,
) -> Row | None:
    values: dict[str, Any] = {"tenant": tenant, "id": item_id, "version": version, "now": now}
    for name in _CHANGEABLE[kind]:
        values[name] = fields.get(name)
        values[f"sets_{name}"] = name in fields
    return await tx.fetch_one(sql(f"change_{kind}"), values)


async def remove_mission(
    tx: Transaction, tenant: str, mission_id: str, *, version: int, now: datetime
) -> Row | None:
    """Mark the mission as deleted if it has this version; returns None if not."""
    values = {"tenant": tenant, "id": mission_id, "version": version, "now": now}
    return await tx.fetch_one(sql("remove_mission"), values)


async def move_assignment(
    tx: Transaction, tenant: str, assignment_id: str, target: Row, *, version: int, now: datetime
) -> Row | None:
    """Move the assignment to another mission if it has this version; returns None if not."""
    values = {
        "tenant": tenant,
        "id": assignment_id,
        "version": version,
        "mission_id": target["id"],
        "project_id": target["project_id"],
        "now": now,
    }
    return await tx.fetch_one(sql("move_assignment"), values)
