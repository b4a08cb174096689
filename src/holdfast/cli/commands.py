"""The commands and their options. Each hands over to a module of its own as soon as it can."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import Failure

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

_DATABASE = "sqlite:///holdfast.db"

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
    if version:
        from importlib.metadata import version as version_of

        print(f"holdfast {version_of('holdfast')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def serve(  # noqa: PLR0917 - typer turns them into options
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_DATABASE_URL",
            metavar="URL",
            help="sqlite:///file.db or postgresql://…",
            show_default=_DATABASE,
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(envvar="HOLDFAST_REDIS_URL", metavar="URL", help="Adds a cache of records."),
    ] = None,
    nats: Annotated[
        str | None, typer.Option(envvar="HOLDFAST_NATS_URL", metavar="URL", help="For jobs, later.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes to serve with.")] = 1,
    no_jobs: Annotated[  # noqa: ARG001 - there are no jobs yet, so there is nothing to leave out
        bool,
        typer.Option("--no-jobs", help="Do not run jobs here. (None in this version.)"),
    ] = False,
) -> None:
    """Run all services.

    Prints one line with the address when it is ready. Ctrl-C or SIGTERM finishes what is running
    and ends with exit code 0. Every setting has a variable, HOLDFAST_…

    For example:

        holdfast serve

        holdfast serve --port 0 --database sqlite:///try.db

        holdfast serve --database postgresql://me@localhost/shop --workers 4
    """
    from holdfast.cli.serving import run_server

    raise typer.Exit(
        run_server(host=host, port=port, workers=workers, database=database, redis=redis, nats=nats)
    )


@app.command()
def token(
    sub: Annotated[str, typer.Option(help="Who signs in: the walker or user.")],
    org: Annotated[str | None, typer.Option(help="Their organization.")] = None,
    role: Annotated[list[str] | None, typer.Option(help="A role. May be repeated.")] = None,
    app_check: Annotated[
        bool, typer.Option("--app-check", help="An App Check token instead. (Not in this version.)")
    ] = False,
    hours: Annotated[float, typer.Option(help="How long it holds.")] = 24.0,
) -> None:
    """Make a development token for the server of this directory.

    It is signed with HOLDFAST_JWT_SECRET or, without one, with the secret the server keeps in
    .holdfast (HOLDFAST_HOME).

    For example:

        holdfast token --sub ada

        curl -H "Authorization: Bearer $(holdfast token --sub ada)" …
    """
    from holdfast.cli.tokens import make_token

    print(make_token(sub=sub, org=org, roles=role or [], app_check=app_check, hours=hours))


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
