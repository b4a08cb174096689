"""The options and help texts of ``onceward audit``."""

from pathlib import Path
from typing import Annotated

import typer

from onceward.cli.options import DEFAULT_DATABASE, App, Database, Json, choose_target
from onceward_protocol.cli.app import CommandApp

__all__ = ["audit_app"]

audit_app = CommandApp()

Tenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant. Default: all.")]


@audit_app.callback(invoke_without_command=True)
def audit(context: typer.Context) -> None:
    """Verify, export or seal the audit events."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@audit_app.command()
def verify(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    tenant: Tenant = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER:HASH",
            help="A seal of the tenant that was noted earlier, and must still exist.",
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(help="Seals of many tenants that were noted earlier, by --save-heads."),
    ] = None,
    save_heads: Annotated[
        Path | None,
        typer.Option(
            help="Write the last seal of each tenant to this file, if nothing is found. Keep it "
            "out of reach of those who can write to the database."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Verify an export instead of a database; - reads stdin."),
    ] = None,
    allow_unsigned: Annotated[
        bool,
        typer.Option(
            "--allow-unsigned", help="Accept seals from before ONCEWARD_AUDIT_KEY was set."
        ),
    ] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept",
            metavar="ID",
            help="An event whose finding you have looked into. May be repeated.",
        ),
    ] = None,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    json: Json = False,
) -> None:
    """Check audit events against their chain of seals; exit with 1 if something was changed.

    Finds events and seals that were changed, removed, inserted or exchanged. Events that are not
    sealed yet are counted. The last seals can be removed together with their events without a
    trace in the database: give --head or --heads to find that. With ONCEWARD_AUDIT_KEY, also checks
    the signatures of the seals. Reads one page at a time, while the server runs.

    Examples:
        onceward audit verify --save-heads heads.jsonl

        onceward audit verify --heads heads.jsonl --save-heads heads.jsonl

        onceward audit verify --tenant ada --head 12:9f86d0…

        onceward audit export | onceward audit verify --file -

    """
    from onceward_operator.cli.audit import Expected, verify_database, verify_file

    expected = Expected(
        tenant=tenant,
        head=head,
        heads=heads,
        accepted=frozenset(accept or ()),
        allow_unsigned=allow_unsigned,
    )
    target = choose_target(context, app=app, database=database)
    if file is not None:
        verify_file(file, target, expected, save_heads=save_heads, as_json=json)
    else:
        verify_database(target, expected, save_heads=save_heads, as_json=json)


@audit_app.command()
def export(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    tenant: Tenant = None,
    after: Annotated[
        str | None,
        typer.Option(
            metavar="SEAL|TIME",
            help="Only seals after this number (with --tenant), or made after this time, such as "
            "2026-01-31T09:30:00Z.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file to write, for its owner only. Default: stdout."
        ),
    ] = None,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Write the summary as JSON; the export always is.")
    ] = False,
) -> None:
    """Write audit events and their seals as JSON lines, which can be verified without the database.

    The first line describes the export. Of each tenant, the events of a seal come before the seal,
    and events that are not sealed yet come last. The last line has the numbers: without it the
    export is not complete. Reads one page at a time.

    Examples:
        onceward audit export --output audit.jsonl

        onceward audit export --tenant ada --after 12 | gzip > ada.gz

    """
    from onceward_operator.cli.audit import export_events

    target = choose_target(context, app=app, database=database)
    export_events(target, tenant, after=after, output=output, force=force, as_json=json)


@audit_app.command()
def seal(
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    json: Json = False,
) -> None:
    """Seal all audit events now. A server does it every ONCEWARD_AUDIT_SEAL_SECONDS (default: 60).

    With ONCEWARD_AUDIT_KEY, the seals are signed.

    Example:
        onceward audit seal --database sqlite:///onceward.db

    """
    from onceward_operator.cli.audit import seal_events

    seal_events(choose_target(context, app=app, database=database), as_json=json)
