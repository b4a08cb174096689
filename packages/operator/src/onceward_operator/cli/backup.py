"""``onceward backup`` and ``restore``: copies of a SQLite database. ``restored``: any database."""

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from onceward.cli.options import AppTarget, Json, Target, command, describe_target, new_group
from onceward.stores.factory import StoreUrl, parse_store_url
from onceward_protocol.cli.output import CommandError, print_json

app = new_group("backup")

_USAGE: Final = 2
_MEBIBYTE: Final = 1 << 20


@command(app, "backup")
def backup(
    target: Target,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write a consistent copy of an SQLite database to a file, while the server runs.

    The file appears when it is complete and checked; only its owner can read it. For PostgreSQL
    the command prints the pg_dump command to use.

    Example:
        onceward backup /backups/shop-monday.db --database sqlite:///shop.db

    """
    from onceward_operator.sqlite_backup import back_up

    database = _sqlite_of(
        target, lambda url: f"pg_dump --format=custom --file={_shell(file)} {url}"
    )
    with _progress("backup", is_shown=sys.stderr.isatty() and not as_json) as on_progress:
        written = back_up(database.location, file, force=force, on_progress=on_progress)
    if as_json:
        print_json({"file": written.path, "bytes": written.size_bytes})
    else:
        print(f"{written.path} written and checked ({written.size_bytes / _MEBIBYTE:.1f} MiB)")


@command(app, "restore")
def restore(
    target: Target,
    file: Annotated[Path, typer.Argument(help="A file that onceward backup has written.")],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the database if it exists.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a database from a backup, after checking it. Stop the server and its workers first.

    Responses that memory or Redis hold from before are not replayed any more. After a restore with
    another tool, run onceward restored.

    Example:
        onceward restore /backups/shop-monday.db --database sqlite:///shop.db --force

    """
    from onceward_operator.sqlite_backup import restore as run

    database = _sqlite_of(
        target,
        lambda url: (
            f"pg_restore --clean --if-exists --single-transaction --dbname={url} {_shell(file)}"
        ),
    )
    prefix = database.table_prefix
    if not isinstance(target, AppTarget):
        prefix = prefix or os.environ.get("ONCEWARD_TABLE_PREFIX") or None
    with _progress("restore", is_shown=sys.stderr.isatty() and not as_json) as on_progress:
        written = run(
            file,
            database.location,
            force=force,
            table_prefix=database.names(prefix).prefix,
            on_progress=on_progress,
        )
    if as_json:
        print_json({"database": written.path, "bytes": written.size_bytes})
    else:
        print(f"{written.path} restored ({written.size_bytes / _MEBIBYTE:.1f} MiB)")


@command(app, "restored")
def restored(target: Target, *, as_json: Json = False) -> None:
    """Say that a database was restored: no response of before is replayed from memory or Redis.

    Run it after a restore with other tools than onceward restore, before the servers start or
    while they run. Most restores of PostgreSQL are detected without it. It loses nothing: servers
    look responses up in the database again.

    Example:
        onceward restored --database postgresql://me@localhost/shop

    """
    asyncio.run(_renew_epoch(target))
    if as_json:
        print_json({"database": describe_target(target), "renewed": True})
    else:
        print(
            f"{describe_target(target)}: servers that can reach it stop replaying cached responses "
            "of before within a second"
        )


async def _renew_epoch(target: Target) -> None:
    from onceward.cli.database import opened
    from onceward.guard.caches import new_epoch
    from onceward.stores.sql_loader import load_queries

    async with opened(target) as store:
        sql = load_queries("onceward.stores", "records.sql", names=store.table_names)
        await store.write(sql["renew_cache_epoch"], {"epoch": new_epoch()})


def _sqlite_of(target: Target, postgres_command: Callable[[str], str]) -> StoreUrl:
    """Return the SQLite database of a URL or an app.

    Raises ``CommandError`` with the command to use for PostgreSQL, which is made from its URL.
    """
    found = _of_app(target) if isinstance(target, AppTarget) else parse_store_url(target)
    if found.database == "sqlite":
        return found
    url, hint = _without_password(found), ""
    if not found.location:
        # The store of an app may be made of an engine or of settings: it has no URL to print.
        url, hint = '"$DATABASE_URL"', " (DATABASE_URL is the address of the app's database)"
    raise CommandError(f"for PostgreSQL use its own tool: {postgres_command(url)}{hint}", _USAGE)


def _of_app(app: AppTarget) -> StoreUrl:
    """Return the database of an app's store, without opening it."""
    store = app.load().store
    prefix = store.table_names.prefix
    if store.name == "postgresql":
        return StoreUrl("postgresql", "", prefix)
    path = getattr(store, "sqlite_path", None)
    if path is None:
        raise CommandError(
            f"{app.name} does not say which file its database is: give --database sqlite:///file.db",
            _USAGE,
        )
    return StoreUrl("sqlite", path, prefix)


def _without_password(url: StoreUrl) -> str:
    """Return the URL for a shell; the PostgreSQL tools ask for the password."""
    scheme, _, rest = url.location.partition("://")
    credentials, at, location = rest.rpartition("@")
    return _shell(f"{scheme}://{credentials.partition(':')[0]}{at}{location}")


def _shell(argument: object) -> str:
    return shlex.quote(str(argument))


@contextmanager
def _progress(name: str, *, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal."""
    if not is_shown:
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
