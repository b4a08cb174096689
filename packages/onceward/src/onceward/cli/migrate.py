"""``onceward migrate``: create or update the tables of a database."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer

from onceward import open_store
from onceward.cli.database import (
    APPLIED,
    applied_before,
    installed_migrations,
    namespaces_in,
    opened,
    table_options,
)
from onceward.cli.options import (
    USAGE,
    AppTarget,
    Json,
    Target,
    command,
    describe_target,
    new_app,
)
from onceward.errors import ConfigurationError
from onceward.ports import Store
from onceward.stores.factory import parse_store_url
from onceward.stores.parts import Part, distribute_store, installed_parts
from onceward.stores.tenant_tables import TenantTable, covered_tables, plain_name, uncovered_tables
from onceward_protocol.cli.output import CommandError, print_json, print_table, print_warning
from onceward_protocol.cli.plugins import declared_by_packages
from onceward_protocol.clock import SystemClock

app = new_app()


@command(app, "migrate")
def migrate(
    target: Target,
    *,
    with_services: Annotated[
        bool,
        typer.Option("--services", help="Also create the tables of installed services."),
    ] = False,
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", help="Only the tables of this part, such as jobs. May be repeated."),
    ] = None,
    on_citus: Annotated[
        bool,
        typer.Option("--citus", help="Distribute the tables over the nodes of Citus, by tenant."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Create or update Onceward's tables in a database.

    Creates the tables of all installed parts, or of those that --part names. Those of services are
    updated in a database that has them. Migrations that were applied before are skipped. A server
    and every app with Onceward also migrate their database when they start; they create the tables
    of the parts that they use.

    With --app: under the app's table names. Otherwise the options table_prefix and schema of the
    URL, or ONCEWARD_TABLE_PREFIX and ONCEWARD_TABLE_SCHEMA, say how the tables are named. By
    default they are in the schema onceward of PostgreSQL, and begin with onceward_ on SQLite.

    With --citus, on the coordinator: tables with rows of tenants are distributed by tenant, the
    others are copied to every node. Rows are moved; writers wait meanwhile. Tables that are
    distributed already are left alone.

    Examples:
        onceward migrate --app shop.main:onceward

        onceward migrate --database postgresql://me@localhost/shop

        onceward migrate --part jobs --database "postgresql://me@localhost/shop?schema=public"

        onceward migrate --citus --database postgresql://me@coordinator/shop

    """
    chosen = _chosen_parts(parts or ())
    if with_services and isinstance(target, AppTarget):
        raise CommandError("give --app or --services, not both: an app has its migrations", USAGE)
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


def _chosen_parts(names: Sequence[str]) -> list[Part]:
    """Return the parts of these names; without names, all that are installed."""
    installed = installed_parts()
    if unknown := [name for name in names if name not in installed]:
        raise CommandError(
            f"there is no part {', '.join(unknown)}: choose among {', '.join(installed)}", USAGE
        )
    return [installed[name] for name in names or installed]


async def _migrate(
    target: Target, parts: Sequence[Part], *, with_services: bool, on_citus: bool
) -> tuple[list[tuple[str, int, str]], int, list[str]]:
    """Return the applied migrations, the number of all, and the distributed tables."""
    packages: list[tuple[str, str]] = []
    tables: Sequence[TenantTable] = ()
    if isinstance(target, AppTarget):
        tables = target.load().runtime.tenant_tables
    else:
        url = parse_store_url(target)
        # Refuses a bad URL before anything is touched.
        open_store(target, **table_options(url))
        # An installed service is not necessarily used with this database.
        used = {namespace for namespace, _ in await applied_before(url) or ()}
        packages = [pair for pair in installed_migrations() if with_services or pair[0] in used]
    # A migration is recorded with the time of this machine's clock.
    started = SystemClock().now()
    async with opened(target, *parts, must_exist=False, migration_packages=packages) as store:
        rows = await store.read(store.table_names.render(APPLIED))
        distributed = await _distribute(store, tables) if on_citus else []
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
