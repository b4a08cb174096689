"""``onceward sweep``: delete expired records and old rows."""

import asyncio
import sys
from contextlib import nullcontext
from typing import Annotated, Any, Final

import typer

from onceward.cli.database import (
    audit_keys,
    check_known_tenant,
    namespaces_in,
    opened,
    opened_cache,
)
from onceward.cli.options import (
    AppTarget,
    Environment,
    Json,
    RedisUrl,
    Target,
    command,
    describe_target,
    new_app,
)
from onceward.errors import OncewardError
from onceward.maintenance.retention import Retention, delete_old_rows
from onceward.maintenance.sweeper import Sweeper
from onceward.ports import Store
from onceward.records import RecordId
from onceward.stores.clock import StoreClock, read_clock
from onceward.stores.sql_loader import load_queries
from onceward_protocol.cli.output import CommandError, print_json
from onceward_protocol.cli.plugins import declared_by_packages

_BATCH: Final = 500

app = new_app()


@command(app, "sweep")
def sweep(
    target: Target,
    tenant: Annotated[
        str | None, typer.Option(help="Only expired records of this tenant, and no old rows.")
    ] = None,
    redis: RedisUrl = None,
    environment: Environment = "development",
    *,
    as_json: Json = False,
) -> None:
    """Delete expired records and old rows, in small batches.

    A server deletes expired records every ONCEWARD_SWEEP_EVERY_SECONDS (default: 3600), and once a
    day rows that are older than the retention of their table: that of the app with --app, or
    ONCEWARD_AUDIT_RETENTION_DAYS, ONCEWARD_DEAD_LETTER_RETENTION_DAYS and the services' settings.
    With --tenant and --redis, or an app that has a cache, the records are dropped there too.

    Examples:
        onceward sweep --database sqlite:///onceward.db

        onceward sweep --tenant ada

    """
    cache = (redis, environment) if redis else None
    sweeping = _sweep(target) if tenant is None else _sweep_of(target, tenant, cache)
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
        clock = await _checked_clock(target, store)
        params = {"tenant": tenant, "now": clock.now(), "limit": _BATCH}
        deleted = 0
        while batch := await store.write(sql["sweep_records_of_tenant"], params):
            deleted += len(batch)
            if cache is not None:
                # One that was made again meanwhile costs a query, and is cached again.
                await cache.forget(
                    RecordId(tenant, row["endpoint"], row["idempotency_key"]) for row in batch
                )
        if not deleted:
            await check_known_tenant(store, tenant)
        return deleted, {}


async def _checked_clock(target: Target, store: Store) -> StoreClock:
    clock = StoreClock()
    try:
        await read_clock(store, clock)
    except OncewardError as error:
        raise CommandError(f"{describe_target(target)}: {error}") from error
    return clock


async def _sweep(target: Target) -> tuple[int, dict[str, int]]:
    progress: Any = nullcontext(None)
    if sys.stderr.isatty():
        from rich.console import Console

        progress = Console(stderr=True).status("looking for expired records")
    async with opened(target) as store:
        with progress as status:

            def show(deleted: int) -> None:
                if status is not None:
                    status.update(f"{deleted} expired records deleted")

            try:
                clock = StoreClock()
                deleted = await Sweeper(store, clock).sweep(on_batch=show)
                now, keys = clock.now(), audit_keys(target)
                old = {
                    rule.table: await delete_old_rows(store, rule, now, keys)
                    for rule in await _retention(target, store)
                }
            except OncewardError as error:
                raise CommandError(f"{describe_target(target)}: {error}") from error
    return deleted, old


async def _retention(target: Target, store: Store) -> list[Retention]:
    """Return how long rows are kept: as the app says, or as the services in the database do."""
    if isinstance(target, AppTarget):
        return list(target.load().runtime.config.retention)
    declared: dict[str, list[Retention]] = declared_by_packages("retention")
    present = await namespaces_in(store)
    rules = [rule for name in declared if name in present for rule in declared[name]]
    store.schema.want(*(part for rule in rules for part in rule.parts))
    await store.open()
    return rules
