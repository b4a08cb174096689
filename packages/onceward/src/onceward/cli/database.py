"""The databases that commands work on: opened without a change of the schema, unless wanted."""

import os
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, TypedDict

from onceward import open_store
from onceward.audit.chain import AuditKeys
from onceward.cli.options import USAGE, AppTarget, Target, describe_target
from onceward.errors import OncewardError
from onceward.ports import RecordCache, Store
from onceward.stores.factory import StoreUrl, parse_store_url, uses_psycopg
from onceward.stores.parts import GUARD, LIBRARY_PARTS, Part
from onceward.stores.postgres.store import BasePostgresStore
from onceward.stores.tenant_tables import covered_tables
from onceward.tenants import TenantFilter, tenant_or_none
from onceward_protocol.cli.output import CommandError, printable, redact_password

_MIGRATIONS_GROUP: Final = "onceward.migrations"
_CONNECT_SECONDS: Final = 5
_AUDIT_KEY: Final = "ONCEWARD_AUDIT_KEY"
APPLIED: Final = (
    "SELECT namespace, number, name, applied_at FROM onceward_migrations WHERE number > 0"
    " ORDER BY namespace, number"
)
# Namespace and number are the first columns; version 0.1 names them differently.
_APPLIED_BEFORE: Final = "SELECT * FROM onceward_migrations"
_OF_0_1: Final = ("core", 1)


@asynccontextmanager
async def opened(
    target: Target,
    *parts: Part,
    must_exist: bool = True,
    migration_packages: Sequence[tuple[str, str]] = (),
) -> AsyncIterator[Store]:
    """Open the store of a URL or of an app, and close it afterwards. Raises ``CommandError``.

    The store of an app is opened as the app does it, including its migrations. The database of a
    URL must have the tables of ``parts``, unless ``must_exist`` is False: then they are created.
    """
    if isinstance(target, AppTarget):
        store = target.load().store
    else:
        names = table_options(parse_store_url(target))
        store = open_store(target, migration_packages=migration_packages, **names)
    store.schema.want(*parts)
    if isinstance(store, BasePostgresStore):
        # The statements of a command read or delete many rows: they may take their time.
        store.lift_statement_limit()
    try:
        if must_exist and not isinstance(target, AppTarget):
            await _check_tables(target, parts)
        await store.open()
    except OncewardError as error:
        raise CommandError(f"{describe_target(target)}: {error}") from error
    try:
        yield store
    finally:
        await store.close()


async def _check_tables(url: str, parts: Sequence[Part]) -> None:
    """Raise ``CommandError`` unless opening the store would find what it needs.

    Only the migrate command changes the schema, and SQLite would create an empty file for a
    misspelt name.
    """
    target = parse_store_url(url)
    if _is_missing_file(target):
        raise CommandError(
            f"{target.location} does not exist: "
            f"check --database, or create it with: onceward migrate --database {url}"
        )
    if not await _is_up_to_date(target, parts):
        raise CommandError(
            f"{redact_password(url)} does not have this version's tables: "
            f"run onceward migrate --database {redact_password(url)}"
        )


@asynccontextmanager
async def opened_cache(
    target: Target, store: Store, redis: tuple[str, str] | None
) -> AsyncIterator[RecordCache | None]:
    """Yield the cache of records: Redis by URL and environment, or the app's; None without one."""
    cache: RecordCache | None = None
    if redis is not None:
        from onceward.stores.redis import RedisRecords

        url, environment = redis
        cache = RedisRecords(url, environment=environment, secret=store.secret)
    elif isinstance(target, AppTarget):
        cache = target.load().runtime.config.cache
    try:
        yield cache
    finally:
        if cache is not None:
            await cache.close()


def installed_migrations() -> list[tuple[str, str]]:
    """Return the (namespace, package) pairs of every installed package that has migrations."""
    return [pair for point in entry_points(group=_MIGRATIONS_GROUP) for pair in point.load()()]


class _Names(TypedDict):
    table_prefix: str | None
    schema: str | None


def table_options(target: StoreUrl) -> _Names:
    """Return the options of ``open_store`` that environment variables set and the URL does not."""
    read = os.environ.get
    return {
        "table_prefix": target.table_prefix or read("ONCEWARD_TABLE_PREFIX") or None,
        "schema": target.schema or read("ONCEWARD_TABLE_SCHEMA") or None,
    }


def _is_missing_file(target: StoreUrl) -> bool:
    return target.database == "sqlite" and not Path(target.location).exists()


async def _is_up_to_date(target: StoreUrl, parts: Sequence[Part]) -> bool:
    """Check whether all migrations of these parts and of those that are there are applied.

    True if that is unknown, or if opening the store refuses the database anyway.
    """
    applied = await applied_before(target)
    if applied is None or _OF_0_1 in applied:
        return True
    present = {namespace for namespace, _ in applied}
    used = {GUARD, *parts, *(part for part in LIBRARY_PARTS if part.name in present)}
    is_sqlite = target.database == "sqlite"
    return {m.id for part in used for m in part.migrations(is_sqlite=is_sqlite)} <= applied


async def applied_before(target: StoreUrl) -> set[tuple[str, int]] | None:
    """Read what is applied without opening the store, which would migrate it.

    None if that is not possible: then opening the store reports why.
    """
    if _is_missing_file(target):
        return set()
    sql = target.names(**table_options(target)).render(_APPLIED_BEFORE)
    if target.database == "sqlite":
        return _applied_on_sqlite(target.location, sql)
    if uses_psycopg(target.driver):
        return _applied_on_psycopg(target.location, sql)
    return await _applied_on_asyncpg(target.location, sql)


def _applied_on_sqlite(path: str, query: str) -> set[tuple[str, int]] | None:
    try:
        with closing(sqlite3.connect(path)) as database:
            return {row[:2] for row in database.execute(query)}
    except sqlite3.OperationalError:  # no such table
        return set()
    except sqlite3.Error:  # not a database
        return None


async def _applied_on_asyncpg(url: str, query: str) -> set[tuple[str, int]] | None:
    import asyncpg

    try:
        # No named statements: behind a pooler, another client may have the same. Opening the store
        # refuses such a pooler in one line.
        connection = await asyncpg.connect(url, timeout=_CONNECT_SECONDS, statement_cache_size=0)
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return None
    try:
        return {(row[0], row[1]) for row in await connection.fetch(query)}
    except asyncpg.UndefinedTableError:
        return set()
    finally:
        await connection.close()


def _applied_on_psycopg(url: str, query: str) -> set[tuple[str, int]] | None:
    import psycopg

    try:
        connection = psycopg.connect(url, connect_timeout=_CONNECT_SECONDS)
    except psycopg.Error:
        return None
    try:
        return {(row[0], row[1]) for row in connection.execute(query.encode())}
    except psycopg.errors.UndefinedTable:
        return set()
    finally:
        connection.close()


def audit_keys(target: Target) -> AuditKeys:
    """Return the keys of audit seals: of the app, or of the environment. May be none.

    Raises ``CommandError``.
    """
    if isinstance(target, AppTarget):
        return target.load().runtime.audit_keys
    try:
        return AuditKeys.parse(os.environ.get(_AUDIT_KEY))
    except OncewardError as error:
        raise CommandError(f"{_AUDIT_KEY}: {error}", USAGE) from error


async def namespaces_in(store: Store) -> set[str]:
    """Return the namespaces whose migrations an open store has."""
    rows = await store.read(store.table_names.render(APPLIED))
    return {row["namespace"] for row in rows}


async def check_known_tenant(store: Store, tenant: TenantFilter) -> None:
    """Raise ``CommandError`` if no table of the library has a row of the tenant."""
    named = tenant_or_none(tenant)
    for table in await covered_tables(store) if named is not None else ():
        sql = f"SELECT 1 AS found FROM {table.name} WHERE {table.column} = :tenant LIMIT 1"  # noqa: S608
        if await store.read(sql, {"tenant": named}):
            return
    if named is not None:
        raise CommandError(f"nothing is stored of a tenant {printable(named)}")
