"""The commands and their options. Each hands over to a module of its own as soon as it can."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.gc import release_collector
from holdfast.cli.outbox_commands import outbox_app
from holdfast.cli.output import Failure
from holdfast.cli.plugins import add_plugins

__all__ = ["app"]

app = typer.Typer(
    name="holdfast",
    help="Exactly-once effects for apps that work offline.",
    epilog="Start with: holdfast serve",
    no_args_is_help=False,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
keys_app = typer.Typer(
    help="Look at what the server remembers.", no_args_is_help=False, rich_markup_mode="markdown"
)
app.add_typer(keys_app, name="keys")
jobs_app = typer.Typer(
    help="Look at jobs, and put dead ones back.", no_args_is_help=False, rich_markup_mode="markdown"
)
app.add_typer(jobs_app, name="jobs")
app.add_typer(outbox_app, name="outbox")
add_plugins(app)

_DATABASE = "sqlite:///holdfast.db"
# These have most of their starting still before them.
_RELEASE_WHEN_READY = frozenset({"serve", "worker"})

Database = Annotated[
    str,
    typer.Option(
        envvar="HOLDFAST_DATABASE_URL",
        metavar="URL",
        help="sqlite:///file.db or postgresql://…",
        rich_help_panel="Where",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON, for scripts.")]
File = Annotated[
    Path | None, typer.Argument(help="A file with JSON; standard input if absent or -.")
]
Volatile = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD", help="Leave this top-level field out. May be repeated."),
]


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False,
) -> None:
    """Exactly-once effects for apps that work offline."""
    if context.invoked_subcommand not in _RELEASE_WHEN_READY:
        release_collector()
    if version:
        from importlib.metadata import version as version_of

        print(f"holdfast {version_of('holdfast')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def canonical(file: File = None, volatile: Volatile = None) -> None:
    """Write the canonical form of JSON (RFC 8785), exactly as it is hashed.

    Bad input ends with exit code 2 and one line that says why.

    For example:

        holdfast canonical order.json

        echo '{"b": 1.0, "a": 2}' | holdfast canonical
    """
    from holdfast.cli.canonical import canonical_of

    sys.stdout.buffer.write(canonical_of(file, volatile or []))
    if sys.stdout.isatty():
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


@app.command("hash")
def hash_(file: File = None, volatile: Volatile = None) -> None:
    """Write the SHA-256 of the canonical form of JSON, in hex.

    Bad input ends with exit code 2 and one line that says why.

    For example:

        holdfast hash order.json

        holdfast hash --volatile clientSubmittedAt < order.json
    """
    from hashlib import sha256

    from holdfast.cli.canonical import canonical_of

    print(sha256(canonical_of(file, volatile or [])).hexdigest())


@app.command()
def migrate(database: Database = _DATABASE, json: Json = False) -> None:
    """Bring a database up to date. Running it again changes nothing.

    The server does the same when it starts.

    For example:

        holdfast migrate --database postgresql://me@localhost/shop
    """
    from holdfast.cli.database import migrate as run

    run(database, as_json=json)


@app.command()
def sweep(database: Database = _DATABASE, json: Json = False) -> None:
    """Delete records past their time, in small batches.

    The server does so every hour by itself (HOLDFAST_SWEEP_EVERY_SECONDS).

    For example:

        holdfast sweep --database sqlite:///holdfast.db
    """
    from holdfast.cli.database import sweep as run

    run(database, as_json=json)


@keys_app.callback(invoke_without_command=True)
def keys(context: typer.Context) -> None:
    """Look at what the server remembers."""
    if context.invoked_subcommand is None:
        raise Failure("say what to do with the keys: ls or show (try: holdfast keys --help)", 2)


@keys_app.command("ls")
def keys_ls(
    database: Database = _DATABASE,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Only of this operation.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most so many.")] = 50,
    json: Json = False,
) -> None:
    """List records, newest first.

    For example:

        holdfast keys ls --tenant ada --limit 10

        holdfast keys ls --endpoint "POST /api/v1/routes" --json
    """
    from holdfast.cli.keys import list_keys

    list_keys(database, tenant=tenant, endpoint=endpoint, limit=limit, as_json=json)


@keys_app.command("show")
def keys_show(
    key: Annotated[str, typer.Argument(help="The idempotency key.")],
    database: Database = _DATABASE,
    tenant: Annotated[str | None, typer.Option(help="Whose, if several have it.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Of which operation.")] = None,
    json: Json = False,
) -> None:
    """Show everything about one record, the stored answer included.

    For example:

        holdfast keys show 7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10
    """
    from holdfast.cli.keys import show_key

    show_key(database, key, tenant=tenant, endpoint=endpoint, as_json=json)


@jobs_app.callback(invoke_without_command=True)
def jobs(context: typer.Context) -> None:
    """Look at jobs, and put dead ones back."""
    if context.invoked_subcommand is None:
        raise Failure(
            "say what to do with the jobs: ls, show, dead or requeue (try: holdfast jobs --help)", 2
        )


@jobs_app.command("ls")
def jobs_ls(  # noqa: PLR0917 - typer turns them into options
    database: Database = _DATABASE,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    state: Annotated[
        str | None, typer.Option(help="Only waiting, running, done or dead ones.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Only of this queue.")] = None,
    job_type: Annotated[str | None, typer.Option("--type", help="Only of this type.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most so many.")] = 50,
    json: Json = False,
) -> None:
    """List jobs, newest first.

    For example:

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


@jobs_app.command("show")
def jobs_show(
    job_id: Annotated[str, typer.Argument(help="The job's id, as jobs ls shows it.")],
    database: Database = _DATABASE,
    tenant: Annotated[str | None, typer.Option(help="Only if it is this tenant's.")] = None,
    json: Json = False,
) -> None:
    """Show everything about one job: payload, failed attempts, finished steps, result.

    For example:

        holdfast jobs show 3fdbb296-1baa-4967-929b-0a5e8362f6e2
    """
    from holdfast.cli.jobs import show_job

    show_job(database, job_id, tenant=tenant, as_json=json)


@jobs_app.command("dead")
def jobs_dead(
    database: Database = _DATABASE,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    queue: Annotated[str | None, typer.Option(help="Only of this queue.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most so many.")] = 50,
    json: Json = False,
) -> None:
    """List dead letters and why each was given up.

    For example:

        holdfast jobs dead --queue routes
    """
    from holdfast.cli.jobs import list_dead

    list_dead(database, tenant=tenant, queue=queue, limit=limit, as_json=json)


@jobs_app.command("requeue")
def jobs_requeue(
    job_ids: Annotated[
        list[str] | None, typer.Argument(help="Ids of dead letters, as jobs dead shows them.")
    ] = None,
    database: Database = _DATABASE,
    tenant: Annotated[str | None, typer.Option(help="Only if they are this tenant's.")] = None,
    queue: Annotated[
        str | None, typer.Option(help="Instead of ids: every dead letter of this queue.")
    ] = None,
    json: Json = False,
) -> None:
    """Put dead letters back into their queue with all attempts before them.

    What is known of their failed attempts is kept. Ends with exit code 1 if one of the ids is no
    dead letter (any more).

    For example:

        holdfast jobs requeue 3fdbb296-1baa-4967-929b-0a5e8362f6e2

        holdfast jobs requeue --queue routes
    """
    from holdfast.cli.jobs import requeue

    requeue(database, job_ids or [], tenant=tenant, queue=queue, as_json=json)
