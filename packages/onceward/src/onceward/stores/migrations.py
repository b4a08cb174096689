"""The table of migrations of a server's database, and the checks around it.

A store runs ``apply_migrations`` with a ``MigrationTable`` inside one transaction that excludes
other processes. Afterwards ``MigrationTable.names`` are the names of the database's tables.
"""

import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from onceward.core.table_names import DEFAULT_NAMES, DEFAULT_PREFIX, TableNames
from onceward.errors import ConfigurationError
from onceward.stores.citus import (
    IS_CITUS,
    SEQUENTIAL,
    distribute,
    is_distributed,
    refuse_other_nodes,
)
from onceward_protocol.storage.migrations import (
    Applied,
    Migration,
    Rows,
    Statement,
    split_statements,
)

__all__ = ["MIGRATION_LOCK", "MigrationTable"]

# The advisory lock of PostgreSQL that every store takes before it migrates: "once" in ASCII.
MIGRATION_LOCK: Final = 0x6F6E6365

# Recorded when the tables are created with a prefix. A database that has the first migration but
# not this one has the names of version 0.1; that version refuses a database that has it.
_PREFIXED: Final = ("core", 0)
_FIRST: Final = ("core", 1)


_SERVER: Final = f"SELECT current_setting('server_encoding'), ({IS_CITUS})"

# Only tables of the core are checked: an app may drop its own tables without a migration.
_CORE: Final = "core"
_CREATED_TABLE: Final = re.compile(rf"^CREATE TABLE {DEFAULT_PREFIX}(\w+)", re.MULTILINE)
_CREATED: Final = re.compile(r"^CREATE TABLE (?:IF NOT EXISTS )?(\S+) \(", re.MULTILINE)
_HAS_TENANT: Final = (
    "SELECT EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass($1::text)"
    " AND attname = 'tenant' AND NOT attisdropped)"
)


class MigrationTable:
    """The table ``onceward_migrations``, for SQLite and for PostgreSQL."""

    def __init__(self, names: TableNames = DEFAULT_NAMES, *, is_sqlite: bool) -> None:
        """Raise ``ConfigurationError`` for a schema on SQLite, which has none."""
        if is_sqlite and names.schema is not None:
            raise ConfigurationError("SQLite has no schemas: use table_prefix instead of schema")
        # The names that the tables have; ``read`` finds out if they are those of version 0.1.
        self.names = names
        self._is_sqlite = is_sqlite
        self._table = names.table("migrations")

    def read(self) -> Generator[Statement, Rows, Applied]:
        """Create the table if it is missing; return the applied (namespace, number) pairs.

        Raises ``ConfigurationError`` if the database cannot store every text.
        """
        is_citus = False
        if not self._is_sqlite:
            [(encoding, is_citus)] = yield _SERVER, ()
            _refuse_encoding(encoding)
            if is_citus:
                yield from refuse_other_nodes()
        columns = {row[0] for row in (yield self._columns(), ())}
        if not columns:  # looked up first: a role that may not create tables can use them
            yield from self._create()
        # In databases of version 0.1.0 the first column is called "room".
        elif "room" in columns:
            yield f"ALTER TABLE {self._table} RENAME COLUMN room TO namespace", ()
        rows = yield f"SELECT namespace, number FROM {self._table}", ()  # noqa: S608
        applied = {(row[0], row[1]) for row in rows}
        if _FIRST not in applied:
            self.names = replace(self.names, is_unprefixed=False)
            yield self.record(Migration(*_PREFIXED, "table_names", ""))
        elif _PREFIXED not in applied and self.names.prefix == DEFAULT_PREFIX:
            self.names = replace(self.names, is_unprefixed=True)
        if is_citus and (yield from is_distributed(self.names)):
            self.names = replace(self.names, is_distributed=True)
            yield SEQUENTIAL, ()
        return applied - {_PREFIXED}

    def check(
        self, applied: Applied, known: Sequence[Migration], /
    ) -> Generator[Statement, Rows, None]:
        """Raise ``ConfigurationError`` for a core table without its migration, or the reverse.

        An empty table in place of a lost one would forget keys and jobs without a sign.
        """
        is_recorded = {
            self.names.table(name): migration.id in applied
            for migration in known
            if migration.namespace == _CORE
            for name in _CREATED_TABLE.findall(migration.sql)
        }
        if not is_recorded:
            return
        present = {row[0] for row in (yield self._present(is_recorded), ())}
        if missing := [
            name for name, found in is_recorded.items() if found and name not in present
        ]:
            raise ConfigurationError(
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing although "
                f"{self._table} records the migration: restore a backup, or drop all tables of "
                "Onceward, which loses what they hold, and migrate again"
            )
        if extra := [name for name in is_recorded if not is_recorded[name] and name in present]:
            raise ConfigurationError(
                f"{', '.join(extra)} {'exists' if len(extra) == 1 else 'exist'} although "
                f"{self._table} does not record the migration: restore a backup, choose another "
                "table_prefix, or drop all tables of Onceward, which loses what they hold"
            )

    def split(self, script: str) -> Iterable[str]:
        """Return single statements on SQLite; PostgreSQL takes a whole script at once.

        Citus does not: it sends some statements to the nodes as it has received them, with the
        whole script.
        """
        sql = self.names.render(script)
        is_split = self._is_sqlite or self.names.is_distributed
        return split_statements(sql) if is_split else (sql,)

    def record(self, migration: Migration) -> Statement:
        """Return the statement that records a migration as applied now."""
        now = datetime.now(UTC)
        applied_at = f"{now:%Y-%m-%dT%H:%M:%S.%fZ}" if self._is_sqlite else now
        placeholders = "?, ?, ?, ?" if self._is_sqlite else "$1, $2, $3, $4"
        insert = (
            f"INSERT INTO {self._table} (namespace, number, name, applied_at)"  # noqa: S608
            f" VALUES ({placeholders})"
        )
        return insert, (migration.namespace, migration.number, migration.name, applied_at)

    def finish(self, new: Sequence[Migration]) -> Generator[Statement, Rows, None]:
        """Distribute new tables if those of the database are distributed by Citus."""
        if self._is_sqlite or not new or not (yield from is_distributed(self.names)):
            return
        tables: dict[str, str | None] = {}
        for migration in new:
            for table in _CREATED.findall(self.names.render(migration.sql)):
                has_tenant = (yield _HAS_TENANT, (table,))[0][0]
                tables[table] = "tenant" if has_tenant else None
        yield from distribute(self.names, tables.items())

    def _columns(self) -> str:
        if self._is_sqlite:
            return f"SELECT name FROM pragma_table_info('{self._table}')"  # noqa: S608
        return (
            "SELECT attname FROM pg_attribute"  # noqa: S608
            f" WHERE attrelid = to_regclass('{self._table}') AND attnum > 0 AND NOT attisdropped"
        )

    def _present(self, names: Iterable[str]) -> str:
        listed = ", ".join(f"'{name}'" for name in names)
        if self._is_sqlite:
            return f"SELECT name FROM sqlite_schema WHERE name IN ({listed})"  # noqa: S608
        return (
            f"SELECT name FROM unnest(ARRAY[{listed}]) AS name"  # noqa: S608
            " WHERE to_regclass(name) IS NOT NULL"
        )

    def _create(self) -> Generator[Statement, Rows, None]:
        schema = self.names.schema
        if schema is not None:
            found = yield f"SELECT 1 FROM pg_namespace WHERE nspname = '{schema}'", ()  # noqa: S608
            if not found:
                yield f'CREATE SCHEMA "{schema}"', ()
        timestamp = "TEXT" if self._is_sqlite else "timestamptz"
        create = (
            f"CREATE TABLE {self._table} (namespace TEXT NOT NULL,"
            f" number INTEGER NOT NULL, name TEXT NOT NULL, applied_at {timestamp} NOT NULL,"
            " PRIMARY KEY (namespace, number))"
        )
        yield create, ()


def _refuse_encoding(encoding: str) -> None:
    if encoding != "UTF8":
        raise ConfigurationError(
            f"the encoding of the database is {encoding}, which cannot store every text: create it "
            "with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )
