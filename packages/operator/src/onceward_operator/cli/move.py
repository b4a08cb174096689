"""``onceward move``: from SQLite to PostgreSQL."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from onceward.cli.database import installed_migrations
from onceward.cli.options import Json, command, new_app
from onceward.stores.factory import StoreUrl, parse_store_url
from onceward_protocol.cli.output import (
    CommandError,
    print_json,
    print_table,
    print_warning,
    redact_password,
)

app = new_app()

_USAGE: Final = 2
_SHOWN_DIGITS: Final = 16


@command(app, "move")
def move(
    *,
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
    as_json: Json = False,
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
    if undo:
        _undo(source, as_json=as_json)
        return
    old = _sqlite(source)
    if target is None:
        raise CommandError("--to is missing: give postgresql://user@host/name", _USAGE)
    new = _postgres(target)
    from onceward_operator.move import DatabaseMove

    names = new.names(new.table_prefix or _variable("PREFIX"), new.schema or _variable("SCHEMA"))
    shown_target = redact_password(target)
    with _progress(is_shown=sys.stderr.isatty() and not as_json) as on_progress:
        moving = DatabaseMove(
            old.location,
            new.location,
            tables=_chosen(tables),
            restart=restart,
            migration_packages=installed_migrations(),
            table_prefix=old.names(old.table_prefix or _variable("PREFIX")).prefix,
            target_prefix=names.prefix,
            target_schema=names.schema,
            shown_target=shown_target,
            on_progress=on_progress,
        )
        if dry_run:
            _print_plan(*asyncio.run(moving.plan()), as_json=as_json)
            return
        report = asyncio.run(moving.run())
    _print_report(report, shown_target, as_json=as_json)
    if not report.is_verified:
        different = ", ".join(table.table for table in report.tables if not table.is_equal)
        raise CommandError(
            f"the copy differs in {different}: a trigger in the target has changed rows, or "
            "another process has written; disable triggers and stop writers, then run it again "
            "with --restart"
        )


def _undo(source: str, *, as_json: bool) -> None:
    """Allow servers to start on the SQLite file again."""
    from onceward_operator.move import undo_move

    old = _sqlite(source)
    prefix = old.names(old.table_prefix or _variable("PREFIX")).prefix
    mark = undo_move(old.location, table_prefix=prefix)
    if mark is not None and mark.is_finished:
        print_warning(
            f"the database was moved to {mark.target}: do not use both, or requests and jobs may "
            "take effect twice"
        )
    if as_json:
        print_json({"undone": mark is not None})
    elif mark is None:
        print(f"{old.location} was not moved: nothing to undo")
    else:
        print(f"{old.location} can be used again; what was copied is still in {mark.target}")


def _sqlite(url: str) -> StoreUrl:
    found = parse_store_url(url)
    if found.database != "sqlite":
        raise CommandError(
            "--from should be a SQLite file, sqlite:///onceward.db: to copy a PostgreSQL database, "
            "use pg_dump and pg_restore",
            _USAGE,
        )
    return found


def _postgres(url: str) -> StoreUrl:
    found = parse_store_url(url)
    if found.database != "postgresql":
        raise CommandError(
            "--to should be PostgreSQL, postgresql://user@host/name: to copy a SQLite file, use "
            "onceward backup",
            _USAGE,
        )
    return found


def _chosen(tables: str | None) -> list[str] | None:
    if tables is None:
        return None
    names = [name.strip() for name in tables.split(",") if name.strip()]
    if not names:
        raise CommandError("--tables is empty: give names, all or none", _USAGE)
    return [] if names == ["none"] else names


def _variable(name: str) -> str | None:
    return os.environ.get(f"ONCEWARD_TABLE_{name}") or None


def _print_plan(moved: dict[str, int], not_moved: tuple[str, ...], *, as_json: bool) -> None:
    if as_json:
        print_json({"tables": moved, "not_moved": list(not_moved)})
        return
    rows = [(name, str(count), "yes") for name, count in moved.items()]
    print_table(("table", "rows", "moved"), [*rows, *((name, "-", "no") for name in not_moved)])


def _print_report(report: Any, target: str, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "target": target,
                "verified": report.is_verified,
                "resumed": report.was_resumed,
                "finished_before": report.was_finished,
                "not_moved": list(report.not_moved),
                "tables": [
                    {
                        "table": table.table,
                        "rows": table.rows,
                        "hash": table.hash,
                        "target_rows": table.target_rows,
                        "target_hash": table.target_hash,
                        "equal": table.is_equal,
                    }
                    for table in report.tables
                ],
            }
        )
        return
    print_table(
        ("table", "rows", "hash", "target rows", "target hash", "equal"),
        [
            (
                table.table,
                str(table.rows),
                table.hash[:_SHOWN_DIGITS],
                str(table.target_rows),
                table.target_hash[:_SHOWN_DIGITS],
                "yes" if table.is_equal else "NO",
            )
            for table in report.tables
        ],
    )
    for name in report.not_moved:
        print(f"not moved: {name} (a table of your app)")
    if report.is_verified:
        rows = sum(table.rows for table in report.tables)
        before = "had been moved before" if report.was_finished else "moved and verified"
        print(f"{rows} rows {before}. Use {target} as the database URL from now on")


@contextmanager
def _progress(*, is_shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each table on a terminal."""
    if not is_shown:
        yield lambda _table, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(table: str, done: int, total: int) -> None:
            if table not in tasks:
                tasks[table] = progress.add_task(table, total=total)
            progress.update(tasks[table], completed=done)

        yield show
