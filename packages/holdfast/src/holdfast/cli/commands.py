"""The options and help texts of the library's commands. The work is in one module per command."""

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from holdfast.cli.data_commands import add_data_commands
from holdfast.cli.gc import resume_gc
from holdfast.cli.outbox_commands import outbox_app
from holdfast.cli.output import CommandError

__all__ = ["create_app"]

_DATABASE: Final = "sqlite:///holdfast.db"
# These two do most of their imports after the command line is parsed, and resume the garbage
# collector themselves when they are ready.
_RESUME_GC_THEMSELVES: Final = frozenset({"serve", "worker"})

Database = Annotated[
    str,
    typer.Option(
        envvar="HOLDFAST_DATABASE_URL",
        metavar="URL",
        help="The server's database: sqlite:///file.db or postgresql://user@host/name.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of text.")]
JsonFile = Annotated[
    Path | None, typer.Argument(help="A file that contains JSON; standard input if absent or -.")
]
Volatile = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD",
        help="Leave out this top-level field, such as a send time. May be repeated.",
    ),
]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant. Default: all tenants.")]
Queue = Annotated[str | None, typer.Option(help="Only this queue. Default: all queues.")]
Limit = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="The largest number of rows to show.")
]
JobId = Annotated[str, typer.Argument(help="The id of a job, as listed by holdfast jobs ls.")]


def create_app() -> typer.Typer:
    """Return a new ``holdfast`` with the library's commands, without those of other packages."""
    app = typer.Typer(
        name="holdfast",
        help="Exactly-once effects for apps that work offline.",
        epilog="Start a server with: holdfast serve",
        no_args_is_help=False,
        invoke_without_command=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.callback()(root)
    app.command()(canonical)
    app.command("hash")(hash_)
    app.command()(migrate)
    app.command()(sweep)

    keys_app = typer.Typer(no_args_is_help=False, rich_markup_mode="markdown")
    keys_app.callback(invoke_without_command=True)(keys)
    keys_app.command("ls")(keys_ls)
    keys_app.command("show")(keys_show)
    app.add_typer(keys_app, name="keys")

    jobs_app = typer.Typer(no_args_is_help=False, rich_markup_mode="markdown")
    jobs_app.callback(invoke_without_command=True)(jobs)
    jobs_app.command("ls")(jobs_ls)
    jobs_app.command("show")(jobs_show)
    jobs_app.command("dead")(jobs_dead)
    jobs_app.command("requeue")(jobs_requeue)
    app.add_typer(jobs_app, name="jobs")

    add_data_commands(app)
    app.add_typer(outbox_app, name="outbox")
    return app


def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Exactly-once effects for apps that work offline."""
    if context.invoked_subcommand not in _RESUME_GC_THEMSELVES:
        resume_gc()
    if version:
        from importlib.metadata import version as version_of

        print(f"holdfast {version_of('holdfast')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def canonical(file: JsonFile = None, volatile: Volatile = None) -> None:
    """Write the canonical form of JSON (RFC 8785): the bytes that the server hashes.

    Exits with 2 and one line on stderr if the input is not valid JSON.

    Examples:
        holdfast canonical order.json

        echo '{"b": 1.0, "a": 2}' | holdfast canonical

    """
    from holdfast.cli.canonical import canonical_of

    sys.stdout.buffer.write(canonical_of(file, volatile or []))
    if sys.stdout.isatty():
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


def hash_(file: JsonFile = None, volatile: Volatile = None) -> None:
    """Write the SHA-256 of the canonical form of JSON, in hex.

    Two requests with the same hash have the same body for the server. Exits with 2 and one line
    on stderr if the input is not valid JSON.

    Examples:
        holdfast hash order.json

        holdfast hash --volatile clientSubmittedAt < order.json

    """
    from hashlib import sha256

    from holdfast.cli.canonical import canonical_of

    print(sha256(canonical_of(file, volatile or [])).hexdigest())


def migrate(
    database: Database = _DATABASE,
    services: Annotated[
        bool,
        typer.Option("--services", help="Also create the tables of installed services."),
    ] = False,
    json: Json = False,
) -> None:
    """Create or update Holdfast's tables in a database.

    Tables of services are updated in a database that has them. Migrations that were applied before
    are skipped. A server and every app with Holdfast also migrate their database when they start.

    The options table_prefix and schema of the URL, or HOLDFAST_TABLE_PREFIX and
    HOLDFAST_TABLE_SCHEMA, say how the tables are named.

    Examples:
        holdfast migrate --database postgresql://me@localhost/shop

        holdfast migrate --database "postgresql://me@localhost/shop?schema=holdfast"

    """
    from holdfast.cli.database import migrate as run

    run(database, with_services=services, as_json=json)


def sweep(database: Database = _DATABASE, json: Json = False) -> None:
    """Delete expired records, in small batches.

    A server does the same every HOLDFAST_SWEEP_EVERY_SECONDS (default: 3600).

    Example:
        holdfast sweep --database sqlite:///holdfast.db

    """
    from holdfast.cli.database import sweep as run

    run(database, as_json=json)


def keys(context: typer.Context) -> None:
    """List and show idempotency records: a key, its request and the stored response."""
    if context.invoked_subcommand is None:
        raise CommandError(
            "holdfast keys needs a command: ls or show (try: holdfast keys --help)", 2
        )


def keys_ls(
    database: Database = _DATABASE,
    tenant: Tenant = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help='Only this endpoint, such as "POST /api/v1/routes". Default: all.'),
    ] = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List idempotency records, newest first.

    Examples:
        holdfast keys ls --tenant ada --limit 10

        holdfast keys ls --endpoint "POST /api/v1/routes" --json

    """
    from holdfast.cli.keys import list_keys

    list_keys(database, tenant=tenant, endpoint=endpoint, limit=limit, as_json=json)


def keys_show(
    key: Annotated[str, typer.Argument(help="The idempotency key.")],
    database: Database = _DATABASE,
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
        holdfast keys show 7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10

    """
    from holdfast.cli.keys import show_key

    show_key(database, key, tenant=tenant, endpoint=endpoint, as_json=json)


def jobs(context: typer.Context) -> None:
    """List and show jobs, and requeue dead letters."""
    if context.invoked_subcommand is None:
        raise CommandError(
            "holdfast jobs needs a command: ls, show, dead or requeue (try: holdfast jobs --help)",
            2,
        )


def jobs_ls(  # noqa: PLR0917 - typer turns the parameters into options
    database: Database = _DATABASE,
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
        holdfast jobs ls --state waiting

        holdfast jobs ls --queue routes --tenant ada --json

    """
    from holdfast.cli.jobs import list_jobs

    list_jobs(
        database,
        tenant=tenant,
        state=state,
        queue=queue,
        job_type=job_type,
        limit=limit,
        as_json=json,
    )


def jobs_show(
    job_id: JobId,
    database: Database = _DATABASE,
    tenant: Annotated[
        str | None, typer.Option(help="Fail if the job belongs to another tenant.")
    ] = None,
    json: Json = False,
) -> None:
    """Show one job: payload, failed attempts, finished steps and result.

    Exits with 1 if there is no such job.

    Example:
        holdfast jobs show 3fdbb296-1baa-4967-929b-0a5e8362f6e2

    """
    from holdfast.cli.jobs import show_job

    show_job(database, job_id, tenant=tenant, as_json=json)


def jobs_dead(
    database: Database = _DATABASE,
    tenant: Tenant = None,
    queue: Queue = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List dead letters with the reason and the last error, newest first.

    A dead letter is a job that is not retried any more. It keeps its payload and its failed
    attempts until it is requeued.

    Example:
        holdfast jobs dead --queue routes

    """
    from holdfast.cli.jobs import list_dead

    list_dead(database, tenant=tenant, queue=queue, limit=limit, as_json=json)


def jobs_requeue(
    job_ids: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of dead letters, as listed by holdfast jobs dead."),
    ] = None,
    database: Database = _DATABASE,
    tenant: Annotated[
        str | None, typer.Option(help="Only dead letters of this tenant. Default: all tenants.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option(help="Instead of ids: every dead letter of this queue.")
    ] = None,
    json: Json = False,
) -> None:
    """Put dead letters back into their queue, with their attempts counted from zero.

    The errors of earlier attempts stay visible in holdfast jobs show. Exits with 1 if one of the
    ids is not a dead letter; the others are requeued.

    Examples:
        holdfast jobs requeue 3fdbb296-1baa-4967-929b-0a5e8362f6e2

        holdfast jobs requeue --queue routes

    """
    from holdfast.cli.jobs import requeue

    requeue(database, job_ids or [], tenant=tenant, queue=queue, as_json=json)
