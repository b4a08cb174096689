"""The options and help texts of ``onceward tenant``."""

from pathlib import Path
from typing import Annotated

import typer

from onceward.cli.options import (
    DEFAULT_DATABASE,
    App,
    Database,
    Environment,
    Json,
    RedisUrl,
    choose_target,
)
from onceward_protocol.cli.app import CommandApp

__all__ = ["tenant_app"]

tenant_app = CommandApp()

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


@tenant_app.callback(invoke_without_command=True)
def tenant(context: typer.Context) -> None:
    """Export or erase everything that is stored of one tenant."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@tenant_app.command()
def export(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    name: Name,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file to write, for its owner only. Default: stdout."
        ),
    ] = None,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    table: Tables = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json: Annotated[
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
    from onceward_operator.cli.tenant import export_tenant

    target = choose_target(context, app=app, database=database)
    export_tenant(target, name, tables=table or [], output=output, force=force, as_json=json)


@tenant_app.command()
def erase(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    name: Name,
    reason: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Why, for the audit log. Name no person in it."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Erase. Without it, only show what would be erased.")
    ] = False,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    redis: RedisUrl = None,
    environment: Environment = "development",
    table: Tables = None,
    json: Json = False,
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
    from onceward_operator.cli.tenant import erase_tenant

    erase_tenant(
        choose_target(context, app=app, database=database),
        name,
        tables=table or [],
        redis=(redis, environment) if redis else None,
        reason=reason,
        is_dry_run=not yes,
        as_json=json,
    )
