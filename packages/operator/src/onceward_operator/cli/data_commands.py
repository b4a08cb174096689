"""The options and help texts of ``onceward move``, ``backup``, ``restore`` and ``restored``."""

from pathlib import Path
from typing import Annotated

import typer

from onceward.cli.options import DEFAULT_DATABASE, App, Database, Json, choose_target

__all__ = ["add_data_commands"]


def add_data_commands(app: typer.Typer) -> None:
    """Add the commands to ``onceward``."""
    for command in (move, backup, restore, restored):
        app.command()(command)


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
    from onceward_operator.cli.move import move_database
    from onceward_operator.cli.move import undo as undo_move

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
    from onceward_operator.cli.backup import backup as run

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
    from onceward_operator.cli.backup import restore as run

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
    from onceward_operator.cli.backup import declare_restored

    declare_restored(choose_target(context, app=app, database=database), as_json=json)
