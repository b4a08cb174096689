"""The SQLite file of a move: locked for all other processes, read table by table."""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from onceward.errors import ConfigurationError
from onceward.stores.parts import MigrationTable
from onceward.stores.sqlite.store import open_exclusively
from onceward.stores.table_names import TableNames
from onceward_protocol.storage.migrations import MOVED, Migration, run_steps

__all__ = ["CORE_TABLES", "Source", "SourceMark"]

CORE_TABLES: Final = (
    "secret",
    "idempotency_records",
    "sequences",
    "sequence_numbers",
    "audit_events",
    "audit_seals",
    "jobs",
    "job_completions",
    "dead_letters",
    "job_failures",
    "job_steps",
    "job_causes",
    "request_log",
    "request_counts",
    "paused_queues",
    "console_sessions",
)
"""The tables of the library, without the list of migrations, which the target has already."""

_CREATED: Final = re.compile(
    r"CREATE\s+TABLE\s+(?:IF\s+NOT\s+EXISTS\s+)?[\"`\[]?(\w+)", re.IGNORECASE
)
# Tables of migration tools. They describe the schema, which the target has in its own way.
_OF_TOOLS: Final = frozenset({"alembic_version", "django_migrations", "yoyo_lock"})


@dataclass(frozen=True, slots=True)
class SourceMark:
    """Record of a move in the source: its id, its target, and whether it is finished."""

    move_id: str
    target: str
    is_finished: bool

    @property
    def text(self) -> str:
        """The mark as the table of migrations stores it."""
        return f"{'moved' if self.is_finished else 'moving'} {self.move_id} to {self.target}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``text``."""
        state, move_id, _, target = text.split(" ", 3)
        return cls(move_id, target, state == "moved")


class Source:
    """A context manager. While it is open, no other process can open or read the file."""

    def __init__(self, path: str | Path, *, table_prefix: str) -> None:
        """Raise ``ConfigurationError`` if the file is missing, in use or not Onceward's."""
        self.path = str(path)
        if not Path(path).is_file():
            raise ConfigurationError(f"{path} does not exist: check --from")
        self._db = open_exclusively(self.path, purpose="so that nothing is written during the move")
        try:
            self.names = TableNames(table_prefix)
            self._ledger = MigrationTable(self.names, is_sqlite=True)
            self._table = self.names.table("migrations")
            self.applied = self._read_applied()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the file."""
        self._db.close()

    # -- the mark -------------------------------------------------------------------------------

    def mark(self) -> SourceMark | None:
        """Return the record of an earlier move."""
        row = self._db.execute(
            f"SELECT name FROM {self._table} WHERE namespace = ? AND number = ?",  # noqa: S608
            MOVED,
        ).fetchone()
        return None if row is None else SourceMark.parse(row[0])

    def set_mark(self, mark: SourceMark | None) -> None:
        """Record a move, durably; with None, remove the mark."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute(
            f"DELETE FROM {self._table} WHERE namespace = ? AND number = ?",  # noqa: S608
            MOVED,
        )
        if mark is not None:
            sql, values = self._ledger.record(Migration(*MOVED, mark.text, ""))
            self._db.execute(sql, values)
        self._db.execute("COMMIT")

    # -- tables ---------------------------------------------------------------------------------

    def core_tables(self) -> dict[str, str]:
        """Return the library's tables in this file, each with its name without the prefix."""
        present = set(self._tables())
        named = {self.names.table(name): name for name in CORE_TABLES}
        return {table: name for table, name in named.items() if table in present}

    def tables_of(self, migrations: Sequence[Migration]) -> list[str]:
        """Return the tables that these migrations have created, as far as they exist."""
        present = set(self._tables())
        created = [name for m in migrations for name in _CREATED.findall(m.sql)]
        return [name for name in dict.fromkeys(created) if name in present]

    def other_tables(self, known: Sequence[str]) -> list[str]:
        """Return the remaining tables: those of the app."""
        skipped = {*known, self._table, *_OF_TOOLS}
        return [name for name in self._tables() if name not in skipped]

    def columns(self, table: str) -> list[str]:
        """Return the columns of a table, without computed ones."""
        return self._columns_of(table)

    def count(self, table: str) -> int:
        """Return the number of rows."""
        (count,) = self._db.execute(f"SELECT count(*) FROM {_quoted(table)}").fetchone()  # noqa: S608
        return int(count)

    def last_number(self, table: str) -> int:
        """Return the highest AUTOINCREMENT number that a table has ever used, or 0."""
        with suppress(sqlite3.OperationalError):  # no table has AUTOINCREMENT
            row = self._db.execute(
                "SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)
            ).fetchone()
            return 0 if row is None else int(row[0])
        return 0

    def rows(self, table: str, columns: Sequence[str], *, skip: int = 0) -> Iterator[Any]:
        """Yield all rows in a stable order, without the first ``skip``."""
        selected = ", ".join(map(_quoted, columns))
        yield from self._db.execute(
            f"SELECT {selected} FROM {_quoted(table)}"  # noqa: S608
            f" ORDER BY {self._order(table)} LIMIT -1 OFFSET ?",
            (skip,),
        )

    def key_of(self, table: str, position: int) -> str:
        """Return the primary key of a row, or its rowid, for messages: ``id = 7``."""
        keys = self._keys(table)
        columns = ", ".join(map(_quoted, keys)) or self._order(table)
        row = self._db.execute(
            f"SELECT {columns} FROM {_quoted(table)}"  # noqa: S608
            f" ORDER BY {self._order(table)} LIMIT 1 OFFSET ?",
            (position,),
        ).fetchone()
        return ", ".join(
            f"{name} = {value!r}" for name, value in zip(keys or ["rowid"], row, strict=True)
        )

    def _order(self, table: str) -> str:
        declared = {name.lower() for name in self._columns_of(table)}
        for name in ("rowid", "_rowid_", "oid"):
            if name not in declared:
                with suppress(sqlite3.OperationalError):  # WITHOUT ROWID
                    self._db.execute(f"SELECT {name} FROM {_quoted(table)} LIMIT 0")  # noqa: S608
                    return name
        return ", ".join(map(_quoted, self._keys(table)))

    def _keys(self, table: str) -> list[str]:
        """Return the columns of the primary key, in its order."""
        rows = self._db.execute(f"PRAGMA table_info({_quoted(table)})").fetchall()
        return [name for _, name in sorted((row[5], row[1]) for row in rows if row[5])]

    def _columns_of(self, table: str) -> list[str]:
        rows = self._db.execute(f"PRAGMA table_xinfo({_quoted(table)})").fetchall()
        return [row[1] for row in rows if row[6] == 0]

    def _tables(self) -> list[str]:
        rows = self._db.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%'"
            " ESCAPE '\\' AND sql NOT LIKE 'CREATE VIRTUAL%' ORDER BY rowid"
        )
        return [row[0] for row in rows]

    # -- opening --------------------------------------------------------------------------------

    def _read_applied(self) -> set[tuple[str, int]]:
        """Return the applied migrations."""
        if not self._columns_of(self._table):
            raise ConfigurationError(
                f"{self.path} has no table {self._table}: it is not a database of Onceward, or its "
                "tables have another prefix"
            )
        applied = run_steps(
            self._ledger.read(), lambda sql, values: self._db.execute(sql, values).fetchall()
        )
        return applied - {MOVED}


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
