"""The options and help texts of ``onceward move``, ``backup``, ``restore(d)`` and ``keys rm``."""

from pathlib import Path
from typing import Annotated

import typer

from onceward.cli.options import DEFAULT_DATABASE, App, Database, Json
from onceward.cli.target import choose_target

__all__ = ["add_data_commands"]


def add_data_commands(app: typer.Typer, keys_app: typer.Typer) -> None:
    """Add the commands to ``onceward`` and to ``onceward keys``."""
    for command in (move, backup, restore, restored):
        app.command()(command)
    keys_app.command("rm")(keys_rm)


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


def move(  # noqa: PLR0917 - typer turns the parameters into options
    source: Annotated[
        str,
        typer.Option("--from", metavar="URL", help="The SQLite file: sqlite:///onceward.db."),
    ],
    target: Annotated[
        str | None,
        typer.Option("--to", metavar="URL", help="An empty database: postgresql://user@host/name."),
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Tables of your app to move as well, separated by commas; all; or none. "
            "They must exist in the target.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check both databases, show what would be moved, change nothing."
        ),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Delete what an unfinished move has copied, begin again."),
    ] = False,
    undo: Annotated[
        bool,
        typer.Option("--undo", help="Use the SQLite file again; leaves the target as it is."),
    ] = False,
    json: Json = False,
) -> None:
    """Move a database from SQLite to PostgreSQL, and verify every table by count and hash.

    Moves records, audit events, jobs, dead letters, completion markers and the tables of
    installed services. Stop the server and its workers first. A move that was interrupted, even
    by kill -9, continues where it was when the command runs again. Until it is finished, no
    server starts on either database; afterwards, none starts on the SQLite file.

    Examples:
        onceward move --from sqlite:///shop.db --to postgresql://me@localhost/shop

        onceward move --from sqlite:///shop.db --to postgresql://me@localhost/shop --tables orders

    """
    from onceward.cli.move import move_database
    from onceward.cli.move import undo as undo_move

    if undo:
        undo_move(source, as_json=json)
        return
    move_database(source, target, tables=tables, is_dry_run=dry_run, restart=restart, as_json=json)


def backup(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json: Json = False,
) -> None:
    """Write a consistent copy of an SQLite database to a file, while the server runs.

    The file appears when it is complete and checked; only its owner can read it. For PostgreSQL
    the command prints the pg_dump command to use.

    Example:
        onceward backup /backups/shop-monday.db --database sqlite:///shop.db

    """
    from onceward.cli.backup import backup as run

    target = choose_target(context, app=app, database=database)
    run(file, target, force=force, as_json=json)


def restore(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A file that onceward backup has written.")],
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the database if it exists.")
    ] = False,
    json: Json = False,
) -> None:
    """Make a database from a backup, after checking it. Stop the server and its workers first.

    Responses that memory or Redis hold from before are not replayed any more. After a restore with
    another tool, run onceward restored.

    Example:
        onceward restore /backups/shop-monday.db --database sqlite:///shop.db --force

    """
    from onceward.cli.backup import restore as run

    target = choose_target(context, app=app, database=database)
    run(file, target, force=force, as_json=json)


def restored(
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    json: Json = False,
) -> None:
    """Say that a database was restored: no response of before is replayed from memory or Redis.

    Run it after a restore with other tools than onceward restore, before the servers start or
    while they run. Most restores of PostgreSQL are detected without it. It loses nothing: servers
    look responses up in the database again.

    Example:
        onceward restored --database postgresql://me@localhost/shop

    """
    from onceward.cli.backup import declare_restored

    declare_restored(choose_target(context, app=app, database=database), as_json=json)
