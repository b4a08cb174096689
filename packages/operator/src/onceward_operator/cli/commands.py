"""The commands of operators. ``top`` and ``trace`` are declared here, groups in their modules."""

from typing import Annotated

import typer

from onceward.cli.options import DEFAULT_DATABASE, App, Database, Json, choose_target
from onceward_operator.cli.audit_commands import audit_app
from onceward_operator.cli.data_commands import add_data_commands
from onceward_operator.cli.tenant_commands import tenant_app

__all__ = ["register"]

Tenant = Annotated[str | None, typer.Option(help="Only this tenant. Default: all tenants.")]


def register(app: typer.Typer) -> None:
    """Add the commands of operators to ``onceward``."""
    app.command()(top)
    app.command()(trace)
    add_data_commands(app)
    app.add_typer(tenant_app, name="tenant")
    app.add_typer(audit_app, name="audit")


def top(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    every: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two readings.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and end.")] = False,
    json: Json = False,
) -> None:
    """Show what the servers and workers do now: outcomes of requests, queues, what is late.

    On a terminal the view is live until Ctrl-C. Elsewhere, and with `--json`, one reading is
    printed.

    Example:
        onceward top --database postgresql://me@db/shop

    """
    from onceward_operator.cli.top import show_top

    show_top(
        choose_target(context, app=app, database=database),
        every_seconds=every,
        is_once=once,
        as_json=json,
    )


def trace(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    correlation_id: Annotated[
        str, typer.Argument(help="The X-Correlation-ID of a request, or the id of an outbox entry.")
    ],
    tenant: Tenant = None,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    json: Json = False,
) -> None:
    """Show one action from the tap to its effects: requests, record, audit events, jobs.

    Example:
        onceward trace 0c2ffdcb-87ec-4b59-9bf5-a6852a0054f8

    """
    from onceward_operator.cli.trace import show_trace

    show_trace(
        choose_target(context, app=app, database=database),
        correlation_id,
        tenant=tenant,
        as_json=json,
    )
