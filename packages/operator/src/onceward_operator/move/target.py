"""The PostgreSQL database of a move: its tables, the progress of the move, the sequences."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from onceward.errors import ConfigurationError
from onceward.stores.errors import unavailable
from onceward.stores.parts import MigrationTable
from onceward.stores.postgres.asyncpg_driver import AsyncpgDriver
from onceward.stores.postgres.hosts import check_dsn
from onceward.stores.postgres.session import STARTUP_PARAMETERS
from onceward.stores.table_names import TableNames
from onceward_protocol.storage.migrations import MOVED, Migration

__all__ = ["Column", "MoveState", "Target", "TargetTable", "connect"]

# The advisory lock of a running move: "move" in ASCII.
_LOCK: Final = 0x6D6F7665
_LOCK_SECONDS: Final = 10
_COLUMNS: Final = """
SELECT attname AS name,
       CASE WHEN own.typtype = 'd' THEN base.typname
            WHEN own.typtype = 'e' THEN 'text' ELSE own.typname END AS type,
       format_type(atttypid, atttypmod) AS shown_type,
       CASE WHEN own.typtype = 'd' THEN format_type(own.typbasetype, own.typtypmod)
            ELSE format_type(atttypid, atttypmod) END AS stored_type,
       attgenerated <> '' AS is_computed,
       attnotnull AND NOT atthasdef AND attidentity = '' AS is_required,
       pg_get_serial_sequence(quote_ident(space.nspname) || '.' || quote_ident(relname), attname)
         AS sequence
  FROM pg_attribute
  JOIN pg_class ON pg_class.oid = attrelid
  JOIN pg_namespace AS space ON space.oid = relnamespace
  JOIN pg_type AS own ON own.oid = atttypid
  LEFT JOIN pg_type AS base ON base.oid = own.typbasetype
 WHERE attrelid = $1::oid AND attnum > 0 AND NOT attisdropped
 ORDER BY attnum
"""
_FOREIGN_KEYS: Final = """
SELECT conrelid::bigint AS child, confrelid::bigint AS parent
  FROM pg_constraint WHERE contype = 'f' AND conrelid = ANY($1::oid[])
"""
_REFERRING: Final = """
SELECT DISTINCT conrelid::regclass::text AS name
  FROM pg_constraint
 WHERE contype = 'f' AND confrelid = ANY($1::oid[]) AND conrelid <> ALL($2::oid[])
 ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column in PostgreSQL; ``type`` is the name of its base type."""

    name: str
    type: str
    shown_type: str
    # The same, of a domain that of its base type: with length, precision and scale.
    stored_type: str
    is_computed: bool
    is_required: bool
    sequence: str | None


@dataclass(frozen=True, slots=True)
class TargetTable:
    """A table in PostgreSQL."""

    oid: int
    schema: str
    name: str
    columns: Mapping[str, Column]

    @property
    def sql(self) -> str:
        """The name as statements write it."""
        return f"{_quoted(self.schema)}.{_quoted(self.name)}"


@dataclass(frozen=True, slots=True)
class MoveState:
    """The progress of a move, as the target records it."""

    move_id: str
    source: str
    is_finished: bool
    # By table of the source: how many rows were copied, and the result of the verification.
    copied: dict[str, int]
    results: dict[str, dict[str, Any]]


class Target:
    """A connection to the target. ``names`` must be those of an up-to-date database."""

    def __init__(self, connection: Any, names: TableNames) -> None:
        self.connection = connection
        self._names = names
        self._move = names.table("move")
        self._migrations = names.table("migrations")

    async def lock(self) -> None:
        """Exclude other moves into this database until the connection ends.

        The server may take a moment to notice that a killed move is gone, so this waits for it.
        """
        try:
            await self.connection.execute(f"SET lock_timeout = '{_LOCK_SECONDS}s'")
            await self.connection.fetchval("SELECT pg_advisory_lock($1)", _LOCK)
            await self.connection.execute("RESET lock_timeout")
        except asyncpg.LockNotAvailableError:
            raise ConfigurationError(
                "another move into this database is running: wait for it"
            ) from None

    async def refuse_connected_servers(self) -> None:
        """Raise ``ConfigurationError`` if a process of Onceward is connected."""
        others = await self.connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'onceward'"
            " AND datname = current_database() AND pid <> pg_backend_pid()"
        )
        if others:
            raise ConfigurationError(
                f"Onceward is connected to the target ({others} connections): stop its servers "
                "and workers until the move is finished"
            )

    def table_name(self, name: str) -> str:
        """Return the name of one of the library's tables in this database."""
        return self._names.table(name)

    # -- tables ---------------------------------------------------------------------------------

    async def find(self, name: str) -> TargetTable | None:
        """Return a table by its name in the source, or in lower case, as PostgreSQL folds it."""
        row = await self.connection.fetchrow(
            "SELECT pg_class.oid::bigint, nspname, relname FROM pg_class"
            " JOIN pg_namespace ON pg_namespace.oid = relnamespace"
            " WHERE pg_class.oid = coalesce(to_regclass($1), to_regclass($2))"
            " AND relkind IN ('r', 'p')",
            name if name.startswith('"') else _quoted(name),
            name if name.startswith('"') else _quoted(name.lower()),
        )
        if row is None:
            return None
        columns = [Column(**found) for found in await self.connection.fetch(_COLUMNS, row["oid"])]
        by_name = {column.name: column for column in columns}
        return TargetTable(row["oid"], row["nspname"], row["relname"], by_name)

    async def has_rows(self, table: TargetTable, *, beyond: int = 0) -> bool:
        """Return whether a table has more rows than ``beyond``."""
        sql = f"SELECT EXISTS (SELECT 1 FROM {table.sql} OFFSET $1)"  # noqa: S608
        return bool(await self.connection.fetchval(sql, beyond))

    async def lock_table(self, table: TargetTable) -> None:
        """Keep others from writing to a table until the transaction ends."""
        await self.connection.execute(f"LOCK TABLE {table.sql} IN EXCLUSIVE MODE")

    async def filled_references(
        self, tables: Sequence[TargetTable], moved: Sequence[TargetTable]
    ) -> list[str]:
        """Return the tables with rows that refer to ``tables``, without those that are moved."""
        referring = await self.connection.fetch(
            _REFERRING, [table.oid for table in tables], [table.oid for table in moved]
        )
        return [
            row["name"]
            for row in referring
            if await self.connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {row['name']})")  # noqa: S608
        ]

    async def foreign_keys(self, tables: Sequence[TargetTable]) -> set[tuple[int, int]]:
        """Return pairs of oids: a table and one that it refers to."""
        rows = await self.connection.fetch(_FOREIGN_KEYS, [table.oid for table in tables])
        return {(row["child"], row["parent"]) for row in rows}

    async def delete_rows(self, tables: Sequence[TargetTable]) -> None:
        """Delete all rows of these tables, in this order."""
        # Not TRUNCATE, which refuses a table to which even an empty one refers.
        for table in tables:
            await self.connection.execute(f"DELETE FROM {table.sql}")  # noqa: S608

    async def copy(
        self, table: TargetTable, columns: Sequence[str], rows: Iterable[Sequence[Any]]
    ) -> None:
        """Insert rows with COPY, which also writes the numbers of identity columns."""
        await self.connection.copy_records_to_table(
            table.name, schema_name=table.schema, columns=list(columns), records=rows
        )

    async def set_sequence(self, table: TargetTable, column: Column, at_least: int) -> None:
        """Continue the numbers of a column after the highest one that was used."""
        highest = await self.connection.fetchval(
            f"SELECT max({_quoted(column.name)}) FROM {table.sql}"  # noqa: S608
        )
        used = max(highest or 0, at_least)
        if used:
            await self.connection.execute("SELECT setval($1, $2)", column.sequence, used)

    # -- progress -------------------------------------------------------------------------------

    async def state(self) -> MoveState | None:
        """Return the progress of the move into this database, if there is one."""
        exists = await self.connection.fetchval("SELECT to_regclass($1) IS NOT NULL", self._move)
        rows = (
            await self.connection.fetch(f"SELECT * FROM {self._move}") if exists else []  # noqa: S608
        )
        if not rows:
            return None
        first = rows[0]
        tables = sorted(rows, key=lambda row: row["position"])
        return MoveState(
            move_id=first["move_id"],
            source=first["source"],
            is_finished=first["is_finished"],
            copied={row["source_table"]: row["copied"] for row in tables},
            results={
                row["source_table"]: json.loads(row["result"]) for row in tables if row["result"]
            },
        )

    async def begin(self, move_id: str, source: str, tables: Sequence[str]) -> None:
        """Record a new move, and keep servers from starting. Runs in a transaction."""
        await self.connection.execute(f"DROP TABLE IF EXISTS {self._move}")
        await self.connection.execute(
            f"CREATE TABLE {self._move} (move_id text NOT NULL, source text NOT NULL,"
            " is_finished boolean NOT NULL, source_table text PRIMARY KEY, copied bigint NOT NULL,"
            " result text, position integer NOT NULL)"
        )
        await self.connection.executemany(
            f"INSERT INTO {self._move} VALUES ($1, $2, false, $3, 0, NULL, $4)",  # noqa: S608
            [(move_id, source, table, position) for position, table in enumerate(tables)],
        )
        await self.allow_servers()
        mark = Migration(*MOVED, f"moving {move_id} from {source}", "")
        sql, values = MigrationTable(self._names, is_sqlite=False).record(mark)
        await self.connection.execute(sql, *values)

    async def allow_servers(self) -> None:
        """Remove what keeps servers from starting."""
        await self.connection.execute(
            f"DELETE FROM {self._migrations} WHERE namespace = $1 AND number = $2",  # noqa: S608
            *MOVED,
        )

    async def set_copied(self, table: str, rows: int) -> None:
        """Record how many rows of a table were copied."""
        await self.connection.execute(
            f"UPDATE {self._move} SET copied = $2 WHERE source_table = $1",  # noqa: S608
            table,
            rows,
        )

    async def finish(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the results and allow servers to start. Runs in a transaction."""
        await self.connection.executemany(
            f"UPDATE {self._move} SET is_finished = true, result = $2"  # noqa: S608
            " WHERE source_table = $1",
            [(table, json.dumps(result)) for table, result in results.items()],
        )
        await self.allow_servers()


async def connect(url: str) -> Any:
    """Connect to PostgreSQL. Raises ``ConfigurationError`` or ``StoreUnavailableError``."""
    check_dsn(url)
    try:
        return await asyncpg.connect(
            url,
            timeout=10,
            server_settings={"application_name": "onceward move", **STARTUP_PARAMETERS},
        )
    except AsyncpgDriver.outages as error:
        if isinstance(error, ValueError):  # asyncpg: the URL, not the server
            raise ConfigurationError(f"cannot connect to PostgreSQL: {error}") from error
        raise unavailable(error) from error
    except (asyncpg.PostgresError, ValueError) as error:
        raise ConfigurationError(f"cannot connect to PostgreSQL: {error}") from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
