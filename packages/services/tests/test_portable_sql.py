"""What Citus refuses is not in the schema and not in the statements. Runs without Citus."""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from onceward_protocol.storage.sql_files import without_comments
from packages.onceward.tests.support.citus import functions_for_citus

PACKAGES = Path(__file__).parents[2]

# Each finds rows of the catalogue that Citus refuses, once the tables with a column "tenant" are
# distributed by it.
REFUSED = {
    "a trigger": """
        SELECT tgname FROM pg_trigger AS t JOIN tenant_tables AS x ON x.oid = t.tgrelid
         WHERE NOT t.tgisinternal""",
    "a unique index or primary key without the tenant": """
        SELECT i.indexrelid::regclass::text FROM pg_index AS i
          JOIN tenant_tables AS x ON x.oid = i.indrelid
         WHERE i.indisunique AND NOT x.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])""",
    "a table without a primary key": """
        SELECT x.oid::regclass::text FROM tenant_tables AS x
         WHERE NOT EXISTS (
               SELECT 1 FROM pg_index AS i WHERE i.indrelid = x.oid AND i.indisprimary)""",
    "a foreign key without the tenant": """
        SELECT c.conname FROM pg_constraint AS c JOIN tenant_tables AS x ON x.oid = c.conrelid
         WHERE c.contype = 'f' AND NOT x.attnum = ANY (c.conkey)""",
    "an exclusion constraint": """
        SELECT c.conname FROM pg_constraint AS c JOIN tenant_tables AS x ON x.oid = c.conrelid
         WHERE c.contype = 'x'""",
    "a tenant of another type or collation": """
        SELECT x.oid::regclass::text FROM tenant_tables AS x
         WHERE x.atttypid <> 'text'::regtype OR x.attcollation <> '"C"'::regcollation
            OR NOT x.attnotnull""",
    "a default that changes within a statement": """
        SELECT a.attrelid::regclass::text || '.' || a.attname
          FROM pg_attrdef AS d
          JOIN tenant_tables AS x ON x.oid = d.adrelid
          JOIN pg_attribute AS a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
         WHERE pg_get_expr(d.adbin, d.adrelid) LIKE '%clock_timestamp%'""",
    "a serial column: identity columns are numbered by the coordinator": """
        SELECT a.attrelid::regclass::text || '.' || a.attname
          FROM pg_attrdef AS d
          JOIN tenant_tables AS x ON x.oid = d.adrelid
          JOIN pg_attribute AS a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
         WHERE pg_get_expr(d.adbin, d.adrelid) LIKE '%nextval%'""",
    "a row security policy": """
        SELECT polname FROM pg_policy AS p JOIN tenant_tables AS x ON x.oid = p.polrelid""",
    "inheritance": """
        SELECT x.oid::regclass::text FROM pg_inherits AS i
          JOIN tenant_tables AS x ON x.oid IN (i.inhrelid, i.inhparent)""",
}
TENANT_TABLES = """
WITH tenant_tables AS (
    SELECT t.oid, a.attnum, a.atttypid, a.attcollation, a.attnotnull
      FROM pg_class AS t
      JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attname = 'tenant' AND NOT a.attisdropped
     WHERE t.relkind IN ('r', 'p')
       AND t.relnamespace IN ('public'::regnamespace, 'onceward'::regnamespace))
"""


NOT_PORTABLE = re.compile(r"\bctid\b|\bclock_timestamp\(\)|\btxid_current\(\)")
# A lock on rows: from the SELECT that it belongs to.
LOCK = re.compile(
    r"SELECT(?:(?!\bSELECT\b).)*?\bFOR\s+(?:NO\s+KEY\s+)?(?:UPDATE|SHARE)\b", re.DOTALL
)
OF_TENANT = re.compile(r"\btenant\s*=\s*(?:v_|p_|:tenant|\$1)")


def locks_tenants(sql: str) -> bool:
    return any(OF_TENANT.search(found.group()) is None for found in LOCK.finditer(sql))


async def refused_by_citus(connection: Any) -> dict[str, list[Any]]:
    """Return what Citus refuses in the schema with the functions for it; changes the schema."""
    for function in functions_for_citus():
        await connection.execute(function)
    found = {
        what: [row[0] for row in await connection.fetch(TENANT_TABLES + query)]
        for what, query in REFUSED.items()
    }
    # One of the library for a single PostgreSQL is left: it has an argument of type tid[].
    functions = await connection.fetch(
        "SELECT proname, prosrc FROM pg_proc WHERE NOT 'tid[]'::regtype = ANY (proargtypes)"
        " AND pronamespace IN ('public'::regnamespace, 'onceward'::regnamespace)"
    )
    found["a function that reads the clock again for each row, or ctid"] = [
        row["proname"] for row in functions if NOT_PORTABLE.search(row["prosrc"])
    ]
    found["a function that locks rows of several tenants"] = [
        row["proname"] for row in functions if locks_tenants(row["prosrc"])
    ]
    return {what: names for what, names in found.items() if names}


@pytest.fixture
async def connection(postgres_url: str) -> AsyncIterator[Any]:
    """Return a connection in a transaction that is rolled back."""
    connection = await asyncpg.connect(postgres_url)
    transaction = connection.transaction()
    await transaction.start()
    yield connection
    await transaction.rollback()
    await connection.close()


async def test_schema_of_all_services_has_nothing_that_citus_refuses(connection: Any) -> None:
    assert await refused_by_citus(connection) == {}


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        (
            (
                "CREATE TRIGGER t AFTER UPDATE ON onceward.jobs FOR EACH ROW"
                " EXECUTE FUNCTION suppress_redundant_updates_trigger()"
            ),
            "a trigger",
        ),
        (
            "CREATE UNIQUE INDEX u ON walk_reviews (id)",
            "a unique index or primary key without the tenant",
        ),
        (
            "CREATE UNIQUE INDEX u ON walk_reviews (id) INCLUDE (tenant)",
            "a unique index or primary key without the tenant",
        ),
        (
            'CREATE TABLE t (tenant text COLLATE "C" NOT NULL)',
            "a table without a primary key",
        ),
        (
            "ALTER TABLE walk_reviews ADD COLUMN n integer REFERENCES onceward.secret (only_row)",
            "a foreign key without the tenant",
        ),
        (
            "ALTER TABLE onceward.jobs ADD CONSTRAINT x EXCLUDE (seq WITH =)",
            "an exclusion constraint",
        ),
        (
            "ALTER TABLE walkers ALTER COLUMN tenant TYPE text COLLATE pg_catalog.default",
            "a tenant of another type or collation",
        ),
        (
            "ALTER TABLE onceward.jobs ALTER COLUMN enqueued_at SET DEFAULT clock_timestamp()",
            "a default that changes within a statement",
        ),
        (
            (
                "CREATE FUNCTION f() RETURNS void LANGUAGE plpgsql AS"
                " 'BEGIN PERFORM 1 FROM onceward.jobs WHERE ctid IS NOT NULL; END'"
            ),
            "a function that reads the clock again for each row, or ctid",
        ),
        (
            (
                "CREATE FUNCTION f() RETURNS void LANGUAGE plpgsql AS"
                " 'BEGIN UPDATE onceward.jobs SET visible_at = clock_timestamp(); END'"
            ),
            "a function that reads the clock again for each row, or ctid",
        ),
        (
            (
                "CREATE FUNCTION f() RETURNS void LANGUAGE plpgsql AS"
                " 'BEGIN PERFORM 1 FROM (SELECT id FROM onceward.jobs FOR UPDATE) AS x; END'"
            ),
            "a function that locks rows of several tenants",
        ),
    ],
)
async def test_schema_that_citus_refuses_is_found(
    connection: Any, statement: str, what: str
) -> None:
    await connection.execute(statement)
    assert list(await refused_by_citus(connection)) == [what]


def statements() -> Iterator[tuple[str, str]]:
    """Yield the statements for PostgreSQL that are not migrations, with their names."""
    for path in sorted(PACKAGES.glob("*/src/**/*.sql")):
        if {"migrations", "schema", "sql"} & {*path.parts} or "sqlite" in str(path):
            continue
        if "outbox" in path.parts:
            continue
        parts = re.split(
            r"^-- name: (\w+(?: on citus)?)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            yield f"{path.name}: {name}", without_comments(text)


def test_statements_have_nothing_that_citus_refuses() -> None:
    found = list(statements())
    assert len(found) > 200, "the statements were not found"
    assert [name for name, text in found if NOT_PORTABLE.search(text)] == []
    assert [name for name, text in found if locks_tenants(text)] == []


def test_recursive_and_lateral_statements_have_another_for_citus() -> None:
    found = dict(statements())
    refused = [name for name, text in found.items() if re.search(r"\b(RECURSIVE|LATERAL)\b", text)]
    assert len(refused) >= 5, "the statements were not found"
    assert [name for name in refused if f"{name} on citus" not in found] == []
    assert [name for name in refused if name.endswith(" on citus")] == []


def test_python_code_has_no_statement_that_citus_refuses() -> None:
    paths = [path for name in ("onceward", "services") for path in (PACKAGES / name).rglob("*.py")]
    sources = [path for path in paths if "src" in path.relative_to(PACKAGES).parts]
    assert len(sources) > 200, "the code was not found"
    texts = {path.name: path.read_text(encoding="utf-8") for path in sources}
    assert [name for name, text in texts.items() if NOT_PORTABLE.search(text)] == []
