"""Tables with rows of tenants: which there are, and statements that are the same for each of them.

Onceward knows its own tables. An app names its tables with ``Onceward.add_tenant_table``, an
installed package with a function ``tenant_tables``, see ``onceward_protocol.cli.plugins``.
"""

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from onceward.errors import ConfigurationError
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward.stores.table_names import TableNames

__all__ = [
    "Columns",
    "TenantTable",
    "columns_of",
    "covered_tables",
    "delete_batch",
    "own_table",
    "plain_name",
    "read_rows",
    "uncovered_tables",
]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")
_TENANT: Final = "tenant"
_PAGE: Final = 500

# In the order of deletion. Without its row a running job cannot commit, so jobs are first.
_BEFORE_OTHERS: Final = (
    "jobs",
    "job_steps",
    "job_failures",
    "job_causes",
    "dead_letters",
    "job_completions",
)
_AFTER_OTHERS: Final = (
    "request_log",
    "idempotency_records",
    "sequence_numbers",
    "sequences",
    "audit_events",
    "audit_seals",
)


@dataclass(frozen=True, slots=True)
class TenantTable:
    """A table whose rows each belong to one tenant. Raises ``ConfigurationError``."""

    # The name of the table, on PostgreSQL with its schema if it is not in the search path.
    name: str
    # The column with the tenant.
    column: str = _TENANT

    def __post_init__(self) -> None:
        for what, text in (("table", self.name), ("column", self.column)):
            if _NAME.fullmatch(text) is None:
                raise ConfigurationError(
                    f"{text!r} is not the name of a {what}: use letters, digits and _"
                )


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table: their types by name, and the primary key."""

    # The type of each column, by its name.
    types: dict[str, str]
    # The columns of the primary key.
    key: tuple[str, ...]


async def covered_tables(
    store: Store, others: Sequence[TenantTable] = ()
) -> dict[TenantTable, Columns]:
    """Return the library's tables and ``others`` with their columns, in the order of deletion.

    Tables of parts that the database does not have are left out. Raises ``ConfigurationError`` for
    another table that does not exist, or has no primary key.
    """
    own = [own_table(store.table_names, name) for name in _BEFORE_OTHERS]
    last = [own_table(store.table_names, name) for name in _AFTER_OTHERS]
    found: dict[TenantTable, Columns] = {}
    for table in [*own, *others, *last]:
        columns = await columns_of(store, table.name)
        if not columns.types and table not in others:
            continue
        if not columns.types:
            raise ConfigurationError(f"there is no table {plain_name(table.name)} in the database")
        if table.column not in columns.types:
            raise ConfigurationError(f"table {table.name} has no column {table.column}")
        if not columns.key:
            raise ConfigurationError(f"table {table.name} needs a primary key")
        found[table] = columns
    return found


async def uncovered_tables(store: Store, covered: Sequence[TenantTable]) -> list[str]:
    """Return tables of the database that have a column ``tenant`` and are not ``covered``."""
    if store.name == "sqlite":
        rows = await store.read(_sql("tables_with_column_on_sqlite"), {"column": _TENANT})
        known: set[Any] = {table.name for table in covered}
        return [row["name"] for row in rows if row["name"] not in known]
    rows = await store.read(_sql("tables_with_column"), {"column": _TENANT})
    known = {await _postgres_id(store, table.name) for table in covered}
    return [row["name"] for row in rows if await _postgres_id(store, row["name"]) not in known]


async def columns_of(store: Store, table: str) -> Columns:
    """Return the columns of a table; none if it does not exist."""
    sql = _sql("columns_on_sqlite" if store.name == "sqlite" else "columns")
    rows = await store.read(sql, {"name": table})
    in_key = sorted((row["position"], row["name"]) for row in rows if row["position"])
    return Columns(
        {row["name"]: row["type"].lower() for row in rows}, tuple(name for _, name in in_key)
    )


async def delete_batch(
    store: Store, table: TenantTable, columns: Columns, tenant: str, *, limit: int = _PAGE
) -> int:
    """Delete up to ``limit`` rows of a tenant in one transaction; return how many."""
    key = ", ".join(columns.key)
    where = f"{table.column} = :tenant"
    rows = await store.write(
        f"DELETE FROM {table.name} WHERE {where} AND ({key}) IN"  # noqa: S608 - checked names
        f" (SELECT {key} FROM {table.name} WHERE {where} LIMIT :limit) RETURNING 1 AS deleted",
        {"tenant": tenant, "limit": limit},
    )
    return len(rows)


async def read_rows(
    store: Store, table: TenantTable, columns: Columns, tenant: str
) -> AsyncIterator[Row]:
    """Yield the rows of a tenant in the order of the primary key, reading one page at a time."""
    key = columns.key
    order = ", ".join(key)
    last: dict[str, Any] = {}
    while True:
        values = ", ".join(f":{name}" for name in last)
        after = f" AND ({order}) > ({values})" if last else ""
        rows = await store.read(
            f"SELECT * FROM {table.name} WHERE {table.column} = :of{after}"  # noqa: S608
            f" ORDER BY {order} LIMIT {_PAGE}",
            {"of": tenant} | last,
        )
        for row in rows:
            yield row
        if len(rows) < _PAGE:
            return
        last = {f"k{number}": rows[-1][name] for number, name in enumerate(key)}


def plain_name(table: str) -> str:
    """Return the name of a table without its schema and quotes, for people."""
    return table.rpartition(".")[2].strip('"')


def own_table(names: TableNames, name: str) -> TenantTable:
    """Return a table of the library by its name without prefix and schema."""
    table = TenantTable(name)
    # A schema is quoted, which the check of names from elsewhere refuses.
    object.__setattr__(table, "name", names.table(name))
    return table


async def _postgres_id(store: Store, table: str) -> int | None:
    rows = await store.read(_sql("id_of_table"), {"name": table})
    found: int | None = rows[0]["id"]
    return found


def _sql(name: str) -> str:
    return load_queries("onceward.stores", "tenant_tables.sql")[name]
