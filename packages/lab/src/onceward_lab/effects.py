"""Reads the effects from the server's database with plain SQL.

It uses none of Onceward's own code, so a bug there cannot hide a lost or doubled effect.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from onceward.stores.factory import parse_store_url
from onceward_lab.user_actions import WalkAction, marks_of

__all__ = ["Document", "Effects", "read_effects", "select"]

_WALK: Final = "SELECT tenant, type, data FROM walker_events ORDER BY tenant, seq"
_FIELD: Final = "SELECT tenant, kind, version, document FROM field_items ORDER BY tenant, seq"
# Written as a consequence of another action.
_CONSEQUENCES: Final = frozenset({"quest.revealed"})


@dataclass(frozen=True, slots=True)
class Document:
    """One document of the field service; ``version`` counts its creation and its changes."""

    kind: str
    version: int
    marks: tuple[str, ...]


@dataclass(slots=True)
class Effects:
    """All effects, by user."""

    walk: dict[str, list[WalkAction]] = field(default_factory=dict)
    documents: dict[str, list[Document]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of walk actions, created documents and changes to them."""
        actions = sum(len(actions) for actions in self.walk.values())
        return actions + sum(d.version for documents in self.documents.values() for d in documents)


async def read_effects(database_url: str) -> Effects:
    """Read the effects of the walk and field services."""
    effects = Effects()
    for row in await select(database_url, _WALK):
        if row["type"] not in _CONSEQUENCES:
            action = _walk_action(row["type"], _decoded(row["data"]))
            effects.walk.setdefault(row["tenant"], []).append(action)
    for row in await select(database_url, _FIELD):
        marks = tuple(marks_of(_decoded(row["document"])))
        document = Document(row["kind"], row["version"], marks)
        effects.documents.setdefault(row["tenant"], []).append(document)
    return effects


async def select(database_url: str, sql: str) -> Sequence[Mapping[str, Any]]:
    """Run one query on a new connection; tables of the library are named as on SQLite."""
    sql = parse_store_url(database_url).names().render(sql)
    if urlsplit(database_url).scheme != "sqlite":
        asyncpg = import_module("asyncpg")
        connection = await asyncpg.connect(database_url)
        try:
            rows: Sequence[Mapping[str, Any]] = await connection.fetch(sql)
        finally:
            await connection.close()
        return rows
    return _select_sqlite(Path(database_url.removeprefix("sqlite:///")), sql)


def _select_sqlite(path: Path, sql: str) -> list[Mapping[str, Any]]:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=30)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(sql)]


def _walk_action(kind: str, data: Mapping[str, Any]) -> WalkAction:
    if kind == "tree.allocated":
        return kind, " ".join(data["nodeIds"]), 0
    return kind, str(data.get("questId")), int(data.get("step") or 0)


def _decoded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str | bytes) else value
