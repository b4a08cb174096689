"""``onceward migrate`` and ``onceward sweep``: the schema and expired records of a database."""

import asyncio
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from datetime import datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from onceward import open_store
from onceward.audit.chain import AuditKeys
from onceward.cli.options import AppTarget, Target, describe_target
from onceward.errors import ConfigurationError, OncewardError
from onceward.maintenance.retention import Retention
from onceward.maintenance.sweeper import Sweeper
from onceward.ports import RecordCache, Store
from onceward.records import RecordId
from onceward.stores.factory import StoreUrl, parse_store_url, uses_psycopg
from onceward.stores.parts import GUARD, LIBRARY_PARTS, Part, distribute_store, installed_parts
from onceward.stores.postgres.store import BasePostgresStore
from onceward.stores.sql_loader import load_queries
from onceward.stores.tenant_tables import TenantTable, covered_tables, plain_name, uncovered_tables
from onceward_protocol.cli.output import (
    CommandError,
    print_json,
    print_table,
    print_warning,
    redact_password,
)
from onceward_protocol.cli.plugins import declared_by_packages
from onceward_protocol.clock import SystemClock

__all__ = [
    "audit_keys",
    "installed_migrations",
    "migrate",
    "namespaces_in",
    "opened",
    "opened_cache",
    "sweep",
]

_MIGRATIONS_GROUP: Final = "onceward.migrations"
_CONNECT_SECONDS: Final = 5
_SWEEP_BATCH: Final = 500
_USAGE: Final = 2
_AUDIT_KEY: Final = "ONCEWARD_AUDIT_KEY"
_APPLIED: Final = (
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
        async with _opened_app(target, parts) as store:
            yield store
    else:
        async with _opened_url(target, parts, migration_packages, must_exist=must_exist) as store:
            yield store


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
        from onceward.cli.app_loader import load_onceward

        cache = load_onceward(target.name).runtime.config.cache
    try:
        yield cache
    finally:
        if cache is not None:
            await cache.close()


@asynccontextmanager
async def _opened_app(app: AppTarget, parts: Sequence[Part]) -> AsyncIterator[Store]:
    from onceward.cli.app_loader import load_onceward

    store = load_onceward(app.name).store
    store.schema.want(*parts)
    _lift_statement_limit(store)
    try:
        await store.open()
    except OncewardError as error:
        raise CommandError(f"{app.name}: {error}") from error
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def _opened_url(
    url: str,
    parts: Sequence[Part],
    migration_packages: Sequence[tuple[str, str]],
    *,
    must_exist: bool,
) -> AsyncIterator[Store]:
    target = parse_store_url(url)
    store = open_store(url, migration_packages=migration_packages, **_environment(target))
    store.schema.want(*parts)
    _lift_statement_limit(store)
    # SQLite would create an empty file for a misspelt name.
    if must_exist and _is_missing_file(target):
        raise CommandError(
            f"{target.location} does not exist: "
            f"check --database, or create it with: onceward migrate --database {url}"
        )
    try:
        # Only the migrate command changes the schema.
        if must_exist and not await _is_up_to_date(target, parts):
            raise CommandError(
                f"{redact_password(url)} does not have this version's tables: "
                f"run onceward migrate --database {redact_password(url)}"
            )
        await store.open()
    except OncewardError as error:
        raise CommandError(f"{redact_password(url)}: {error}") from error
    try:
        yield store
    finally:
        await store.close()


def _lift_statement_limit(store: Store) -> None:
    """Let the statements of a command take their time: they read or delete many rows."""
    if isinstance(store, BasePostgresStore):
        store.lift_statement_limit()


def migrate(
    target: Target,
    *,
    parts: Sequence[str] = (),
    with_services: bool = False,
    on_citus: bool = False,
    as_json: bool,
) -> None:
    """Apply missing migrations, distribute the tables if Citus is wanted, and print both."""
    chosen = _chosen_parts(parts)
    if isinstance(target, AppTarget):
        if with_services:
            raise CommandError("give --app or --services, not both: an app has its migrations", 2)
        applied, present, distributed = asyncio.run(_migrate_app(target, chosen, on_citus=on_citus))
    else:
        applied, present, distributed = asyncio.run(
            _migrate(target, chosen, with_services=with_services, on_citus=on_citus)
        )
    if as_json:
        keys = ("namespace", "number", "name")
        found = [dict(zip(keys, row, strict=True)) for row in applied]
        more = {"distributed": distributed} if on_citus else {}
        print_json({"applied": found, "present": present} | more)
        return
    if applied:
        rows = [(namespace, f"{number:04}", name) for namespace, number, name in applied]
        print_table(("applied to", "number", "name"), rows)
    else:
        print(f"{describe_target(target)} is up to date ({present} migrations)")
    if distributed:
        print_table(("distributed",), [(table,) for table in distributed])
    elif on_citus:
        print("all tables are distributed already")


_Migrated = tuple[list[tuple[str, int, str]], int, list[str]]


def _chosen_parts(names: Sequence[str]) -> list[Part]:
    """Return the parts of these names; without names, all that are installed."""
    installed = installed_parts()
    if unknown := [name for name in names if name not in installed]:
        raise CommandError(
            f"there is no part {', '.join(unknown)}: choose among {', '.join(installed)}", _USAGE
        )
    return [installed[name] for name in names or installed]


async def _migrate(
    url: str, parts: Sequence[Part], *, with_services: bool, on_citus: bool
) -> _Migrated:
    target = parse_store_url(url)
    # Refuses a bad URL before anything is touched.
    open_store(url, **_environment(target))
    before = await _applied_before(target, unreachable=set()) or set()
    # An installed service is not necessarily used with this database.
    used = {namespace for namespace, _ in before}
    packages = [pair for pair in installed_migrations() if with_services or pair[0] in used]
    async with opened(url, *parts, must_exist=False, migration_packages=packages) as store:
        rows = await store.read(store.table_names.render(_APPLIED))
        distributed = await _distribute(store, ()) if on_citus else []
    after = [(row["namespace"], row["number"], row["name"]) for row in rows]
    return [found for found in after if found[:2] not in before], len(after), distributed


async def _migrate_app(app: AppTarget, parts: Sequence[Part], *, on_citus: bool) -> _Migrated:
    """Open the app's store. What it applies is recorded with the time of this machine's clock."""
    started = SystemClock().now()
    async with opened(app, *parts) as store:
        rows = await store.read(store.table_names.render(_APPLIED))
        distributed = []
        if on_citus:
            from onceward.cli.app_loader import load_onceward

            distributed = await _distribute(store, load_onceward(app.name).runtime.tenant_tables)
    applied = [
        (row["namespace"], row["number"], row["name"])
        for row in rows
        if _instant(row["applied_at"]) >= started
    ]
    return applied, len(rows), distributed


async def _distribute(store: Store, of_app: Sequence[TenantTable]) -> list[str]:
    """Distribute the tables of the library, of services and of the app over the nodes of Citus."""
    declared: dict[str, list[TenantTable]] = declared_by_packages("tenant_tables")
    present = await namespaces_in(store)
    others = [table for name in declared if name in present for table in declared[name]]
    unique = list({table.name: table for table in [*of_app, *others]}.values())
    try:
        covered = await covered_tables(store, unique)
        done = await distribute_store(store, [(table.name, table.column) for table in covered])
    except ConfigurationError as error:
        raise CommandError(str(error)) from error
    for table in await uncovered_tables(store, list(covered)):
        print_warning(
            f"table {table} has a column tenant and was not distributed: if its rows belong to "
            "tenants, declare it with Onceward.add_tenant_table and use --app"
        )
    return [plain_name(table) for table in done]


def _instant(applied_at: datetime | str) -> datetime:
    """Return the time of a migration: SQLite stores it as text."""
    return datetime.fromisoformat(applied_at) if isinstance(applied_at, str) else applied_at


def installed_migrations() -> list[tuple[str, str]]:
    """Return the (namespace, package) pairs of every installed package that has migrations."""
    return [pair for point in entry_points(group=_MIGRATIONS_GROUP) for pair in point.load()()]


class _Names(TypedDict):
    table_prefix: str | None
    schema: str | None


def _environment(target: StoreUrl) -> _Names:
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
    applied = await _applied_before(target, unreachable=None)
    if applied is None or _OF_0_1 in applied:
        return True
    present = {namespace for namespace, _ in applied}
    used = {GUARD, *parts, *(part for part in LIBRARY_PARTS if part.name in present)}
    is_sqlite = target.database == "sqlite"
    return {m.id for part in used for m in part.migrations(is_sqlite=is_sqlite)} <= applied


_Applied = set[tuple[str, int]]


async def _applied_before(target: StoreUrl, *, unreachable: _Applied | None) -> _Applied | None:
    """Read what is applied without opening the store, which would migrate it."""
    if _is_missing_file(target):
        return set()
    sql = target.names(**_environment(target)).render(_APPLIED_BEFORE)
    if target.database == "sqlite":
        return _applied_on_sqlite(target.location, sql, unreachable)
    if uses_psycopg(target.driver):
        return _applied_on_psycopg(target.location, sql, unreachable)
    return await _applied_on_asyncpg(target.location, sql, unreachable)


def _applied_on_sqlite(path: str, query: str, unreachable: _Applied | None) -> _Applied | None:
    try:
        with closing(sqlite3.connect(path)) as database:
            return {row[:2] for row in database.execute(query)}
    except sqlite3.OperationalError:  # no such table
        return set()
    except sqlite3.Error:  # not a database: opening the store reports it
        return unreachable


async def _applied_on_asyncpg(
    url: str, query: str, unreachable: _Applied | None
) -> _Applied | None:
    import asyncpg

    try:
        # No named statements: behind a pooler, another client may have the same. Opening the store
        # refuses such a pooler in one line.
        connection = await asyncpg.connect(url, timeout=_CONNECT_SECONDS, statement_cache_size=0)
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return unreachable  # opening the store reports it
    try:
        return {(row[0], row[1]) for row in await connection.fetch(query)}
    except asyncpg.UndefinedTableError:
        return set()
    finally:
        await connection.close()


def _applied_on_psycopg(url: str, query: str, unreachable: _Applied | None) -> _Applied | None:
    import psycopg

    try:
        connection = psycopg.connect(url, connect_timeout=_CONNECT_SECONDS)
    except psycopg.Error:
        return unreachable  # opening the store reports it
    try:
        return {(row[0], row[1]) for row in connection.execute(query.encode())}
    except psycopg.errors.UndefinedTable:
        return set()
    finally:
        connection.close()


class _Counted:
    """Passes sweeps to the store and shows progress in the terminal."""

    def __init__(self, store: Store, status: Any) -> None:
        self._store = store
        self._status = status
        self._deleted = 0

    async def sweep(self, now: datetime, limit: int) -> int:
        deleted = await self._store.sweep(now, limit)
        self._deleted += deleted
        if self._status is not None:
            self._status.update(f"{self._deleted} expired records deleted")
        return deleted


def sweep(
    target: Target,
    *,
    tenant: str | None = None,
    redis: tuple[str, str] | None = None,
    as_json: bool,
) -> None:
    """Delete all expired records and old rows, or a tenant's expired records; print how many.

    The records of a tenant are dropped from Redis too, which has a URL and an environment.
    """
    sweeping = _sweep(target) if tenant is None else _sweep_of(target, tenant, redis)
    deleted, old = asyncio.run(sweeping)
    if as_json:
        print_json({"deleted": deleted} | ({"old_rows": old} if old else {}))
        return
    print(f"{deleted} expired record{'' if deleted == 1 else 's'} deleted")
    for table, count in old.items():
        print(f"{count} old row{'' if count == 1 else 's'} of {table} deleted")


async def _sweep_of(
    target: Target, tenant: str, redis: tuple[str, str] | None
) -> tuple[int, dict[str, int]]:
    async with opened(target) as store, opened_cache(target, store, redis) as cache:
        sql = load_queries("onceward.stores", "records.sql", names=store.table_names)
        params = {"tenant": tenant, "now": SystemClock().now(), "limit": _SWEEP_BATCH}
        deleted = 0
        while batch := await store.write(sql["sweep_records_of_tenant"], params):
            deleted += len(batch)
            if cache is not None:
                # One that was made again meanwhile costs a query, and is cached again.
                await cache.forget(
                    RecordId(tenant, row["endpoint"], row["idempotency_key"]) for row in batch
                )
        return deleted, {}


def audit_keys(target: Target) -> AuditKeys:
    """Return the keys of audit seals: of the app, or of the environment. May be none.

    Raises ``CommandError``.
    """
    if isinstance(target, AppTarget):
        from onceward.cli.app_loader import load_onceward

        return load_onceward(target.name).runtime.audit_keys
    try:
        return AuditKeys.parse(os.environ.get(_AUDIT_KEY))
    except OncewardError as error:
        raise CommandError(f"{_AUDIT_KEY}: {error}", _USAGE) from error


async def namespaces_in(store: Store) -> set[str]:
    """Return the namespaces whose migrations an open store has."""
    rows = await store.read(store.table_names.render(_APPLIED))
    return {row["namespace"] for row in rows}


async def _retention(target: Target, store: Store) -> list[Retention]:
    """Return how long rows are kept: as the app says, or as the services in the database do."""
    if isinstance(target, AppTarget):
        from onceward.cli.app_loader import load_onceward

        return list(load_onceward(target.name).runtime.config.retention)
    declared: dict[str, list[Retention]] = declared_by_packages("retention")
    present = await namespaces_in(store)
    rules = [rule for name in declared if name in present for rule in declared[name]]
    store.schema.want(*(part for rule in rules for part in rule.parts))
    await store.open()
    return rules


async def _sweep(target: Target) -> tuple[int, dict[str, int]]:
    progress: Any = nullcontext(None)
    if sys.stderr.isatty():
        from rich.console import Console

        progress = Console(stderr=True).status("looking for expired records")
    async with opened(target) as store:
        with progress as status:
            counted = cast("Store", _Counted(store, status))
            sweeper = Sweeper(counted, SystemClock())
            try:
                deleted = await sweeper.sweep()
                retention = await _retention(target, store)
                old = Sweeper(
                    store, SystemClock(), retention=retention, audit_keys=audit_keys(target)
                )
                return deleted, await old.delete_old_rows()
            except OncewardError as error:
                raise CommandError(f"{describe_target(target)}: {error}") from error
