"""Every index begins with the tenant, except those that a decision names."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import asyncpg

from onceward_services.registry import tenant_tables

from .support.services_database import migrate

DECISION = Path("docs/decisions/0043-indexes-without-the-tenant.md")


def named(*, is_sqlite: bool) -> set[str]:
    lines = (Path(__file__).parents[3] / DECISION).read_text(encoding="utf-8").splitlines()
    rows = [
        line.split("|")[1]
        for line in lines
        if line.startswith("| `idx_") and not (is_sqlite and "PostgreSQL only" in line)
    ]
    return set(re.findall(r"`(idx_\w+)`", " ".join(rows)))


def covered() -> set[str]:
    return {table.name for tables in tenant_tables().values() for table in tables}


async def test_indexes_without_the_tenant_are_those_of_the_decision(
    tmp_path: Path, services_database: str
) -> None:
    await migrate(f"sqlite:///{tmp_path}/services.db")
    with closing(sqlite3.connect(tmp_path / "services.db")) as database:
        on_sqlite = {
            (name, table)
            for name, table, first in database.execute(
                "SELECT i.name, m.name,"
                " (SELECT c.name FROM pragma_index_info(i.name) AS c WHERE c.seqno = 0)"
                " FROM sqlite_master AS m, pragma_index_list(m.name) AS i WHERE m.type = 'table'"
            )
            if first != "tenant"
        }
    connection = await asyncpg.connect(services_database)
    try:
        rows = await connection.fetch(
            "SELECT CASE n.nspname WHEN 'onceward' THEN replace(i.relname, 'idx_', 'idx_onceward_')"
            " ELSE i.relname END AS name, t.relname AS table FROM pg_index AS x"
            " JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_class AS t ON t.oid = x.indrelid"
            " JOIN pg_attribute AS a ON a.attrelid = i.oid AND a.attnum = 1"
            " JOIN pg_namespace AS n ON n.oid = t.relnamespace"
            " WHERE n.nspname IN ('public', 'onceward') AND a.attname <> 'tenant'"
        )
    finally:
        await connection.close()
    on_postgres = {(row["name"], row["table"]) for row in rows}
    for is_sqlite, found in ((True, on_sqlite), (False, on_postgres)):
        # Tables without rows of tenants have other keys.
        names = {name for name, table in found if name.startswith("idx_") or table in covered()}
        expected = named(is_sqlite=is_sqlite)
        assert names == expected, f"say in {DECISION} why an index cannot begin with the tenant"
