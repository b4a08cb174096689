"""What has happened, read from the server's own database, past all of Holdfast's code.

Neither the stores nor the services are asked: a proof that trusts what it proves is none.
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

from holdfast_lab.user_actions import WalkAct, marks_of

__all__ = ["Document", "Effects", "read_effects", "select"]

_WALK: Final = "SELECT tenant, type, data FROM walker_events ORDER BY tenant, seq"
_FIELD: Final = "SELECT tenant, kind, version, document FROM field_items ORDER BY tenant, seq"
# Follows from another act, and is not one itself.
_CONSEQUENCES: Final = frozenset({"quest.revealed"})


@dataclass(frozen=True, slots=True)
class Document:
    """One document of field: made once, changed so many times."""

    kind: str
    version: int
    marks: tuple[str, ...]


@dataclass(slots=True)
class Effects:
    """Everything that has happened, by user."""

    walk: dict[str, list[WalkAct]] = field(default_factory=dict)
    documents: dict[str, list[Document]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many effects there are: acts of walk, documents made, and changes to them."""
        acts = sum(len(acts) for acts in self.walk.values())
        return acts + sum(d.version for documents in self.documents.values() for d in documents)


async def read_effects(database_url: str) -> Effects:
    """Read the effects of walk and field."""
    effects = Effects()
    for row in await select(database_url, _WALK):
        if row["type"] not in _CONSEQUENCES:
            act = _act(row["type"], _decoded(row["data"]))
            effects.walk.setdefault(row["tenant"], []).append(act)
    for row in await select(database_url, _FIELD):
        marks = tuple(marks_of(_decoded(row["document"])))
        document = Document(row["kind"], row["version"], marks)
        effects.documents.setdefault(row["tenant"], []).append(document)
    return effects


async def select(database_url: str, sql: str) -> Sequence[Mapping[str, Any]]:
    """Run one query on a connection of its own."""
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
    address = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True, timeout=30)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(sql)]


def _act(kind: str, data: Mapping[str, Any]) -> WalkAct:
    if kind == "tree.allocated":
        return kind, " ".join(data["nodeIds"]), 0
    return kind, str(data.get("questId")), int(data.get("step") or 0)


def _decoded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str | bytes) else value
