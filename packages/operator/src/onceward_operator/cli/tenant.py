"""``onceward tenant``: export and erase everything that is stored of one tenant."""

import asyncio
import getpass
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer

from onceward.cli.database import namespaces_in, opened, opened_cache
from onceward.cli.options import (
    AppTarget,
    Environment,
    Json,
    RedisUrl,
    Target,
    command,
    new_group,
)
from onceward.errors import ConfigurationError, StoreError
from onceward.ports import Store
from onceward.stores.tenant_tables import TenantTable
from onceward_operator.tenant_data import (
    EXPORT_FORMAT,
    Erased,
    StillWrittenError,
    TenantData,
    export_json,
)
from onceward_protocol.cli.output import (
    CommandError,
    print_json,
    print_table,
    print_warning,
    printable,
)
from onceward_protocol.cli.plugins import declared_by_packages
from onceward_protocol.clock import SystemClock
from onceward_protocol.storage.private_files import private_output

app = new_group("tenant")

_USAGE: Final = 2
_MAX_REASON: Final = 1000

Name = Annotated[str, typer.Argument(help="The tenant, as onceward keys ls shows it.")]
Tables = Annotated[
    list[str] | None,
    typer.Option(
        "--table",
        metavar="TABLE[:COLUMN]",
        help="A table of your app with rows of tenants, and the column with the tenant "
        "(default: tenant). May be repeated; rows are deleted in this order.",
    ),
]

ForgetCached = Callable[[str], Awaitable[int]]


@command(app, "export")
def export_tenant(
    target: Target,
    tenant: Name,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file to write, for its owner only. Default: stdout."
        ),
    ] = None,
    tables: Tables = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the summary as JSON; the export always is.")
    ] = False,
) -> None:
    """Write every row of a tenant as JSON lines.

    Records, jobs, dead letters, audit events, and the tables of services and of your app. The first
    line describes the export, each further line is {"table": …, "row": {…}}, and the last one has
    the number of rows by table: without it the export is not complete.

    Examples:
        onceward tenant export ada --output ada.jsonl

        onceward tenant export ada --app shop.main:onceward --table orders:customer | gzip > ada.gz

    """
    _check_name(tenant)
    given = [_parse_table(text) for text in tables or ()]
    if output is None:
        asyncio.run(_export(target, tenant, given, sys.stdout))
        return
    with private_output(output, force=force) as file:
        counts = asyncio.run(_export(target, tenant, given, file))
    if as_json:
        print_json({"tenant": tenant, "file": str(output), "rows": counts})
    else:
        _print_counts(counts)
        print(f"{output} written ({sum(counts.values())} rows)")


@command(app, "erase")
def erase_tenant(
    target: Target,
    tenant: Name,
    *,
    reason: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Why, for the audit log. Name no person in it."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Erase. Without it, only show what would be erased.")
    ] = False,
    redis: RedisUrl = None,
    environment: Environment = "development",
    tables: Tables = None,
    as_json: Json = False,
) -> None:
    """Delete every row of a tenant: records, jobs, dead letters, audit events, tables of services.

    End the tenant's access first. Shows what would be erased, unless --yes is given. Deletes in
    small batches while the server runs; an erasure that was interrupted continues when the command
    runs again. Running servers stop replaying the tenant's records within a second. Two audit
    events with your name, the reason and a hash of the tenant remain. Backups and logs are yours to
    delete.

    Examples:
        onceward tenant erase ada

        onceward tenant erase ada --reason "request 4711" --yes

    """
    _check_name(tenant)
    given = [_parse_table(text) for text in tables or ()]
    text = (reason or "").strip()
    if yes and not 0 < len(text) <= _MAX_REASON:
        raise CommandError(
            f"--reason is missing or longer than {_MAX_REASON} characters: say why, for the audit "
            "log",
            _USAGE,
        )
    if not yes:
        counts = asyncio.run(_count(target, tenant, given))
        if as_json:
            print_json({"erased": False, "tenant": tenant, "rows": counts})
            return
        _print_counts(counts)
        total = sum(counts.values())
        print(f'{total} rows would be erased, nothing was; to erase them: add --yes --reason "…"')
        return
    erased = asyncio.run(
        _erase(target, tenant, given, (redis, environment) if redis else None, text)
    )
    if as_json:
        print_json(
            {
                "erased": True,
                "tenant": tenant,
                "rows": erased.rows,
                "redis_values": erased.cached,
                "audit_id": erased.audit_id,
            }
        )
        return
    _print_counts(erased.rows)
    cached = "" if erased.cached is None else f" and {erased.cached} values in Redis"
    print(
        f"tenant {printable(tenant)} erased: {sum(erased.rows.values())} rows{cached} (audit event "
        f"{erased.audit_id}); servers that can reach the database stop replaying its records "
        "within a second"
    )


async def _export(
    target: Target, tenant: str, given: Sequence[TenantTable], file: TextIO
) -> dict[str, int]:
    async with _opened(target, given) as (_, data):
        counts = dict.fromkeys(await _counts(data, tenant), 0)
        head = {
            "format": EXPORT_FORMAT,
            "tenant": tenant,
            "exported_at": export_json(SystemClock().now()),
            "tables": list(counts),
        }
        _write_line(file, head)
        with _progress("export") as on_progress:
            async for table, row in data.rows(tenant):
                _write_line(file, {"table": table, "row": dict(row)})
                counts[table] += 1
                on_progress(table, counts[table])
        _write_line(file, {"complete": True, "rows": counts})
        file.flush()
        return counts


async def _count(target: Target, tenant: str, given: Sequence[TenantTable]) -> dict[str, int]:
    async with _opened(target, given) as (_, data):
        return await _counts(data, tenant)


async def _counts(data: TenantData, tenant: str) -> dict[str, int]:
    """Return the number of rows by table. Raises ``CommandError`` if there are none."""
    counts = await data.count(tenant)
    if not any(counts.values()):
        was = " any more: it was erased" if await data.is_erased(tenant) else ""
        raise CommandError(f"nothing is stored of a tenant {printable(tenant)}{was}")
    return counts


async def _erase(
    target: Target,
    tenant: str,
    given: Sequence[TenantTable],
    redis: tuple[str, str] | None,
    reason: str,
) -> Erased:
    async with (
        _opened(target, given) as (store, data),
        opened_cache(target, store, redis) as cache,
    ):
        if not await data.is_erased(tenant):
            await _counts(data, tenant)  # an erasure that was interrupted is continued
        forget_cached: ForgetCached | None = getattr(cache, "forget_tenant", None)
        with _progress("erase") as on_progress:
            try:
                return await data.erase(
                    tenant,
                    actor=f"{getpass.getuser()} via onceward tenant erase",
                    reason=reason,
                    forget_cached=forget_cached,
                    on_progress=on_progress,
                )
            except StillWrittenError as error:
                raise CommandError(str(error)) from error
            except StoreError as error:
                raise CommandError(
                    f"the erasure is not finished: {error}; run the command again to continue"
                ) from error


@asynccontextmanager
async def _opened(
    target: Target, given: Sequence[TenantTable]
) -> AsyncIterator[tuple[Store, TenantData]]:
    """Open a store with the tables of the library, of services, of the app and of the command."""
    async with opened(target) as store:
        declared: dict[str, list[TenantTable]] = declared_by_packages("tenant_tables")
        present = await namespaces_in(store)
        tables = [table for name in declared if name in present for table in declared[name]]
        if isinstance(target, AppTarget):
            tables += target.load().runtime.tenant_tables
        unique = list({table.name: table for table in [*given, *tables]}.values())
        try:
            data = await TenantData.open(store, SystemClock(), unique)
        except ConfigurationError as error:
            raise CommandError(str(error), _USAGE) from error
        for table in await data.uncovered():
            print_warning(
                f"table {table} has a column tenant and is left out: add --table {table} if its "
                "rows belong to tenants"
            )
        yield store, data


def _check_name(tenant: str) -> None:
    if not tenant or "\0" in tenant:
        raise CommandError("the name of the tenant is empty or contains NUL", _USAGE)


def _parse_table(text: str) -> TenantTable:
    name, colon, column = text.partition(":")
    try:
        return TenantTable(name, column) if colon else TenantTable(name)
    except ConfigurationError as error:
        raise CommandError(f"--table {text}: {error}", _USAGE) from error


def _print_counts(counts: dict[str, int]) -> None:
    rows = [(table, str(count)) for table, count in counts.items() if count]
    print_table(("table", "rows"), rows)


def _write_line(file: TextIO, value: dict[str, Any]) -> None:
    file.write(json.dumps(value, ensure_ascii=False, default=export_json) + "\n")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str, int], None]]:
    """Show the table at hand and its rows on a terminal."""
    status: Any = nullcontext(None)
    if sys.stderr.isatty():
        from rich.console import Console

        status = Console(stderr=True).status(what)
    with status as shown:
        yield lambda table, rows: shown and shown.update(f"{what} {table}: {rows} rows")
