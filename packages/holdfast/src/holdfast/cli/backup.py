"""``holdfast backup`` and ``holdfast restore``: copies of a SQLite database."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from holdfast.cli.output import CommandError, print_json
from holdfast.stores.urls import StoreUrl, parse_store_url

__all__ = ["backup", "restore"]

_USAGE: Final = 2
_MEBIBYTE: Final = 1 << 20


def backup(file: Path, url: str, *, force: bool, as_json: bool) -> None:
    """Back up the database of a URL to a file."""
    from holdfast.stores.sqlite.backup import back_up

    database = parse_store_url(url)
    if database.database != "sqlite":
        command = f"pg_dump --format=custom --file={_shell(file)} {_without_password(database)}"
        raise CommandError(f"for PostgreSQL use its own tool: {command}", _USAGE)
    with _progress("backup", is_shown=sys.stderr.isatty() and not as_json) as on_progress:
        written = back_up(database.location, file, force=force, on_progress=on_progress)
    if as_json:
        print_json({"file": written.path, "bytes": written.size_bytes})
    else:
        print(f"{written.path} written and checked ({written.size_bytes / _MEBIBYTE:.1f} MiB)")


def restore(file: Path, url: str, *, force: bool, as_json: bool) -> None:
    """Make the database of a URL from a backup."""
    from holdfast.stores.sqlite.backup import restore as run

    database = parse_store_url(url)
    if database.database != "sqlite":
        target = _without_password(database)
        command = f"pg_restore --clean --if-exists --dbname={target} {_shell(file)}"
        raise CommandError(f"for PostgreSQL use its own tool: {command}", _USAGE)
    prefix = database.table_prefix or os.environ.get("HOLDFAST_TABLE_PREFIX") or None
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
