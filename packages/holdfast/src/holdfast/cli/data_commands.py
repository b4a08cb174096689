"""The options and help texts of ``holdfast move``, ``backup`` and ``restore``."""

from pathlib import Path
from typing import Annotated, Final

import typer

__all__ = ["add_data_commands"]

_DATABASE: Final = "sqlite:///holdfast.db"

Database = Annotated[
    str,
    typer.Option(
        envvar="HOLDFAST_DATABASE_URL",
        metavar="URL",
        help="The server's database: sqlite:///file.db or postgresql://user@host/name.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of text.")]


def add_data_commands(app: typer.Typer) -> None:
    """Add the commands to ``holdfast``."""
    for command in (move, backup, restore):
        app.command()(command)


def move(  # noqa: PLR0917 - typer turns the parameters into options
    source: Annotated[
        str,
        typer.Option("--from", metavar="URL", help="The SQLite file: sqlite:///holdfast.db."),
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
        bool, typer.Option("--dry-run", help="Show what would be moved, and change nothing.")
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
        holdfast move --from sqlite:///shop.db --to postgresql://me@localhost/shop

        holdfast move --from sqlite:///shop.db --to postgresql://me@localhost/shop --tables orders

    """
    from holdfast.cli.move import move_database
    from holdfast.cli.move import undo as undo_move

    if undo:
        undo_move(source, as_json=json)
        return
    move_database(source, target, tables=tables, is_dry_run=dry_run, restart=restart, as_json=json)


def backup(
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    database: Database = _DATABASE,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json: Json = False,
) -> None:
    """Write a consistent copy of an SQLite database to a file, while the server runs.

    The file appears when it is complete and checked; only its owner can read it. For PostgreSQL
    the command prints the pg_dump command to use.

    Example:
        holdfast backup /backups/shop-monday.db --database sqlite:///shop.db

    """
    from holdfast.cli.backup import backup as run

    run(file, database, force=force, as_json=json)


def restore(
    file: Annotated[Path, typer.Argument(help="A file that holdfast backup has written.")],
    database: Database = _DATABASE,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the database if it exists.")
    ] = False,
    json: Json = False,
) -> None:
    """Make a database from a backup, after checking it. Stop the server and its workers first.

    Responses that memory or Redis hold from before are not replayed any more.

    Example:
        holdfast restore /backups/shop-monday.db --database sqlite:///shop.db --force

    """
    from holdfast.cli.backup import restore as run

    run(file, database, force=force, as_json=json)
