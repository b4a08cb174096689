"""The commands of the library. Groups are in their own modules, imported when they are used."""

import os
import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from onceward.cli.options import (
    DEFAULT_DATABASE,
    App,
    AppTarget,
    Database,
    Environment,
    Json,
    RedisUrl,
    choose_target,
)
from onceward_protocol.cli.gc import resume_gc
from onceward_protocol.cli.output import CommandError

__all__ = ["register"]

# Someone waits for the new code.
_RELOAD_DRAIN_SECONDS: Final = "2"


def register(app: typer.Typer) -> None:
    """Add the commands of the server library to ``onceward``."""
    app.command()(migrate)
    app.command()(sweep)
    app.command()(worker)

    _add_group(
        app,
        "keys",
        "List, show and remove idempotency records: a key, its request and the stored response.",
        "ls, show or rm",
    )
    _add_group(
        app,
        "jobs",
        "List, show and cancel jobs, requeue dead letters, pause queues.",
        "ls, show, dead, requeue, cancel, pause, resume or paused",
    )


def _add_group(app: typer.Typer, name: str, text: str, commands: str) -> None:
    """Add the commands of a module, which is imported when one of them is used."""

    @cache
    def load() -> dict[str, Any]:
        group: Any = typer.main.get_group(import_module(f"onceward.cli.{name}").app)
        return dict(group.commands)

    class Group(TyperGroup):
        commands = property(lambda _: load(), lambda _, _none: None)

    group = typer.Typer(cls=Group, rich_markup_mode="markdown")

    @group.callback(invoke_without_command=True, help=text)
    def require_command(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            raise CommandError(
                f"onceward {name} needs a command: {commands} (try: onceward {name} --help)", 2
            )

    app.add_typer(group, name=name)


def migrate(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    services: Annotated[
        bool,
        typer.Option("--services", help="Also create the tables of installed services."),
    ] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Only the tables of this part, such as jobs. May be repeated."),
    ] = None,
    citus: Annotated[
        bool,
        typer.Option("--citus", help="Distribute the tables over the nodes of Citus, by tenant."),
    ] = False,
    json: Json = False,
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
    from onceward.cli.database import migrate as run

    target = choose_target(context, app=app, database=database)
    run(target, parts=part or (), with_services=services, on_citus=citus, as_json=json)


def sweep(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only expired records of this tenant, and no old rows.")
    ] = None,
    redis: RedisUrl = None,
    environment: Environment = "development",
    json: Json = False,
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
    from onceward.cli.database import sweep as run

    run(
        choose_target(context, app=app, database=database),
        tenant=tenant,
        redis=(redis, environment) if redis else None,
        as_json=json,
    )


def worker(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            envvar="ONCEWARD_APP",
            metavar="MODULE:NAME",
            help="The app whose jobs to run, such as shop.main:onceward. "
            "Default: the jobs of the installed services.",
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_DATABASE_URL",
            metavar="URL",
            help="The database of the services; an app has its own.",
            show_default=DEFAULT_DATABASE,
        ),
    ] = None,
    nats: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_NATS_URL", metavar="URL", help="NATS server that delivers jobs."
        ),
    ] = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            "--queues",
            metavar="QUEUE",
            help="Run jobs of these queues only. May be repeated, or separated by commas.",
            show_default="all",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Number of jobs to run at the same time.",
            show_default="16; for the services ONCEWARD_JOBS_CONCURRENCY or 8",
        ),
    ] = None,
    drain_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=86_400,
            help="How long to wait for running jobs after the first signal.",
            show_default="30, with --reload 2",
        ),
    ] = None,
    lease_seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=86_400,
            help="How long a job stays claimed if this process dies; leases are renewed.",
            show_default="30; for the services ONCEWARD_JOBS_LEASE_SECONDS or 30",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Run the jobs that are due, then exit.")
    ] = False,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Restart when a .py or .sql file below this directory changes. For development.",
        ),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Serve Prometheus metrics on this port.",
            show_default="off",
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="The address for --metrics-port; 0.0.0.0 for all. There is no sign-in.",
        ),
    ] = "127.0.0.1",
    require_durability: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_REQUIRE_DURABILITY",
            metavar="replicated",
            help="Refuse a database that does not wait for a synchronous standby.",
        ),
    ] = None,
) -> None:
    """Run jobs: those of your app, or those of the installed services.

    Prints one line when it is ready. Ctrl-C or SIGTERM finishes the running jobs, releases those
    that do not end in time, and exits with code 0; a second signal releases them at once.

    Examples:
        onceward worker --app shop.main:onceward

        onceward worker --app shop.main:onceward --queue mail --concurrency 4

        onceward worker --app shop.main:onceward --reload

        onceward worker --database postgresql://me@localhost/shop

    """
    from onceward.cli.worker import WorkerOptions, run_app_worker, run_default_worker

    target = choose_target(context, app=app, database=database or "")
    if reload:
        raise typer.Exit(_reload_worker(drain_seconds, once=once))
    chosen = [name.strip() for given in queues or [] for name in given.split(",")]
    options = WorkerOptions(
        queues=tuple(name for name in chosen if name),
        lease_seconds=lease_seconds,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        once=once,
        require_durability=require_durability,
    )
    if isinstance(target, AppTarget):
        code = run_app_worker(
            target.name,
            nats=nats,
            concurrency=concurrency,
            drain_seconds=drain_seconds,
            options=options,
        )
    else:
        code = run_default_worker(
            database=database,
            nats=nats,
            concurrency=concurrency,
            drain_seconds=drain_seconds,
            options=options,
        )
    raise typer.Exit(code)


def _reload_worker(drain_seconds: float | None, *, once: bool) -> int:
    """Run this command line in a child process, without ``--reload``."""
    from onceward.cli.reload import run_with_reload
    from onceward.cli.worker import PARENT_VARIABLE

    if once:
        raise CommandError("give --once or --reload, not both", 2)
    arguments = [argument for argument in sys.argv[1:] if argument != "--reload"]
    if drain_seconds is None:
        arguments += ["--drain-seconds", _RELOAD_DRAIN_SECONDS]
    resume_gc()
    return run_with_reload(arguments, os.environ | {PARENT_VARIABLE: str(os.getpid())})
