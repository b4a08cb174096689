"""The options and help texts of the library's commands. The work is in one module per command."""

import os
import sys
from typing import Annotated, Final

import typer

from onceward.cli.options import DEFAULT_DATABASE, App, Database, Environment, Json, RedisUrl
from onceward.cli.target import AppTarget, choose_target
from onceward_protocol.cli.gc import resume_gc
from onceward_protocol.cli.output import CommandError

__all__ = ["register"]

# Someone waits for the new code.
_RELOAD_DRAIN_SECONDS: Final = "2"

Tenant = Annotated[str | None, typer.Option(help="Only this tenant. Default: all tenants.")]
Queue = Annotated[str | None, typer.Option(help="Only this queue. Default: all queues.")]
Limit = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="The largest number of rows to show.")
]
JobId = Annotated[str, typer.Argument(help="The id of a job, as listed by onceward jobs ls.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The name of a queue.")]
Reason = Annotated[str, typer.Option(help="Why, for the audit event.")]


def register(app: typer.Typer) -> None:
    """Add the commands of the server library to ``onceward``."""
    app.command()(migrate)
    app.command()(sweep)
    app.command()(worker)

    keys_app = typer.Typer(no_args_is_help=False, rich_markup_mode="markdown")
    keys_app.callback(invoke_without_command=True)(keys)
    keys_app.command("ls")(keys_ls)
    keys_app.command("show")(keys_show)
    keys_app.command("rm")(keys_rm)
    app.add_typer(keys_app, name="keys")

    jobs_app = typer.Typer(no_args_is_help=False, rich_markup_mode="markdown")
    jobs_app.callback(invoke_without_command=True)(jobs)
    jobs_app.command("ls")(jobs_ls)
    jobs_app.command("show")(jobs_show)
    jobs_app.command("dead")(jobs_dead)
    jobs_app.command("requeue")(jobs_requeue)
    jobs_app.command("cancel")(jobs_cancel)
    jobs_app.command("pause")(jobs_pause)
    jobs_app.command("resume")(jobs_resume)
    jobs_app.command("paused")(jobs_paused)
    app.add_typer(jobs_app, name="jobs")


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


def keys(context: typer.Context) -> None:
    """List, show and remove idempotency records: a key, its request and the stored response."""
    if context.invoked_subcommand is None:
        raise CommandError(
            "onceward keys needs a command: ls, show or rm (try: onceward keys --help)", 2
        )


def keys_ls(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Tenant = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help='Only this endpoint, such as "POST /api/v1/routes". Default: all.'),
    ] = None,
    status: Annotated[
        int | None,
        typer.Option(help="Only records whose response has this status.", min=100, max=599),
    ] = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List idempotency records, newest first.

    Examples:
        onceward keys ls --tenant ada --limit 10

        onceward keys ls --endpoint "POST /api/v1/routes" --json

    """
    from onceward.cli.keys import list_keys

    target = choose_target(context, app=app, database=database)
    list_keys(target, tenant=tenant, endpoint=endpoint, status=status, limit=limit, as_json=json)


def keys_show(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="The idempotency key.")],
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Annotated[
        str | None, typer.Option(help="The tenant, if several tenants used this key.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="The endpoint, if the key was used with several.")
    ] = None,
    json: Json = False,
) -> None:
    """Show one idempotency record, including the stored response.

    Exits with 1 if no record matches, or more than one.

    Example:
        onceward keys show 7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10

    """
    from onceward.cli.keys import show_key

    target = choose_target(context, app=app, database=database)
    show_key(target, key, tenant=tenant, endpoint=endpoint, as_json=json)


def keys_rm(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="The idempotency key.")],
    tenant: Annotated[str, typer.Option(help="The tenant of the record.")],
    endpoint: Annotated[
        str, typer.Option(help='The endpoint of the record, such as "POST /api/v1/routes".')
    ],
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why; stored in the audit event.")
    ] = None,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the record, and remove nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove one idempotency record: the next request with this key runs again.

    What the first request has changed stays as it is. The removal is an audit event with your
    name and the reason. Running servers stop replaying the record within a second.

    Example:
        onceward keys rm order-17 --tenant ada --endpoint orders.create --reason "ticket 4711"

    """
    from onceward.cli.keys import remove_key

    remove_key(
        choose_target(context, app=app, database=database),
        key,
        tenant=tenant,
        endpoint=endpoint,
        reason=reason,
        is_dry_run=dry_run,
        as_json=json,
    )


def jobs(context: typer.Context) -> None:
    """List, show and cancel jobs, requeue dead letters, pause queues."""
    if context.invoked_subcommand is None:
        raise CommandError(
            "onceward jobs needs a command: ls, show, dead, requeue, cancel, pause, resume or "
            "paused (try: onceward jobs --help)",
            2,
        )


def jobs_ls(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Tenant = None,
    state: Annotated[
        str | None,
        typer.Option(help="Only jobs in this state: waiting, running, done or dead. Default: all."),
    ] = None,
    queue: Queue = None,
    job_type: Annotated[
        str | None, typer.Option("--type", help="Only this type of job. Default: all types.")
    ] = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List jobs, newest first.

    Examples:
        onceward jobs ls --state waiting

        onceward jobs ls --queue routes --tenant ada --json

    """
    from onceward.cli.jobs import list_jobs

    list_jobs(
        choose_target(context, app=app, database=database),
        tenant=tenant,
        state=state,
        queue=queue,
        job_type=job_type,
        limit=limit,
        as_json=json,
    )


def jobs_show(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    job_id: JobId,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Annotated[
        str | None, typer.Option(help="Fail if the job belongs to another tenant.")
    ] = None,
    json: Json = False,
) -> None:
    """Show one job: payload, failed attempts, finished steps and result.

    Exits with 1 if there is no such job.

    Example:
        onceward jobs show 3fdbb296-1baa-4967-929b-0a5e8362f6e2

    """
    from onceward.cli.jobs import show_job

    target = choose_target(context, app=app, database=database)
    show_job(target, job_id, tenant=tenant, as_json=json)


def jobs_dead(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Tenant = None,
    queue: Queue = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List dead letters with the reason and the last error, newest first.

    A dead letter is a job that is not retried any more. It keeps its payload and its failed
    attempts until it is requeued.

    Example:
        onceward jobs dead --queue routes

    """
    from onceward.cli.jobs import list_dead

    target = choose_target(context, app=app, database=database)
    list_dead(target, tenant=tenant, queue=queue, limit=limit, as_json=json)


def jobs_requeue(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    job_ids: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of dead letters, as listed by onceward jobs dead."),
    ] = None,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only dead letters of this tenant. Default: all tenants.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option(help="Instead of ids: every dead letter of this queue.")
    ] = None,
    json: Json = False,
) -> None:
    """Put dead letters back into their queue, with their attempts counted from zero.

    The errors of earlier attempts stay visible in onceward jobs show. Exits with 1 if one of the
    ids is not a dead letter; the others are requeued.

    Examples:
        onceward jobs requeue 3fdbb296-1baa-4967-929b-0a5e8362f6e2

        onceward jobs requeue --queue routes

    """
    from onceward.cli.jobs import requeue

    target = choose_target(context, app=app, database=database)
    requeue(target, job_ids or [], tenant=tenant, queue=queue, as_json=json)


def jobs_cancel(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    job_ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Ids of waiting jobs, as listed by onceward jobs ls."),
    ],
    reason: Reason,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only jobs of this tenant. Default: all tenants.")
    ] = None,
    json: Json = False,
) -> None:
    """Move waiting jobs to the dead letters, from where they can be requeued.

    A job that a worker has started is not cancelled. Exits with 1 if one of the ids is not a
    waiting job; the others are cancelled.

    Example:
        onceward jobs cancel 3fdbb296-1baa-4967-929b-0a5e8362f6e2 --reason "sent by post"

    """
    from onceward.cli.jobs import cancel

    target = choose_target(context, app=app, database=database)
    cancel(target, job_ids, tenant=tenant, reason=reason, as_json=json)


def jobs_pause(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    queue: QueueName,
    reason: Reason,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    json: Json = False,
) -> None:
    """Stop workers from claiming jobs of a queue. Jobs that run go on, new ones wait.

    Exits with 1 if the queue is paused already.

    Example:
        onceward jobs pause mail --reason "the mail server is down"

    """
    from onceward.cli.jobs import pause

    target = choose_target(context, app=app, database=database)
    pause(target, queue, reason=reason, as_json=json)


def jobs_resume(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    queue: QueueName,
    reason: Reason = "",
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    json: Json = False,
) -> None:
    """Have workers claim the jobs of a paused queue again, at once.

    Exits with 1 if the queue is not paused.

    Example:
        onceward jobs resume mail

    """
    from onceward.cli.jobs import resume

    target = choose_target(context, app=app, database=database)
    resume(target, queue, reason=reason, as_json=json)


def jobs_paused(
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    json: Json = False,
) -> None:
    """List the paused queues: since when, by whom and why.

    Example:
        onceward jobs paused

    """
    from onceward.cli.jobs import list_paused

    list_paused(choose_target(context, app=app, database=database), as_json=json)
