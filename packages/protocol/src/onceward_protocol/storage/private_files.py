"""Files of secrets and personal data: only their owner can use them.

A file is created with its mode before the first byte is written: a later ``chmod`` would leave a
time in which others can open it. SQLite gives its log and its index of the log the mode of the
database.
"""

import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

from onceward_protocol.errors import ConfigurationError

__all__ = [
    "create_database_file",
    "create_private_file",
    "private_output",
]

_log = logging.getLogger("onceward.stores")

_OWNER_ONLY: Final = 0o600


def create_private_file(path: str | Path) -> bool:
    """Create an empty file with mode 0600; False if it exists. Raises ``OSError``.

    A symbolic link is followed, also where the file it names does not exist yet.
    """
    # Not O_EXCL on the link itself: a database may be a link to another disk.
    real = os.path.realpath(path)
    try:
        descriptor = os.open(real, os.O_CREAT | os.O_EXCL | os.O_RDWR, _OWNER_ONLY)
    except FileExistsError:
        return False
    os.close(descriptor)
    return True


def create_database_file(path: str | None, *, of_app: bool = False) -> None:
    """Create the file of an SQLite database with mode 0600, unless it exists.

    Logs a warning for one that every user of the machine can open, except for a file ``of_app``:
    its mode is the app's choice. Never raises: SQLite reports what is wrong with a path. None and
    ``:memory:`` are not files.
    """
    if not path or ":memory:" in path:
        return
    with suppress(OSError):
        if create_private_file(path) or of_app:
            return
        if Path(path).stat().st_mode & stat.S_IRWXO:
            _log.warning(
                "%s can be opened by every user of this machine: run chmod o= on it, and on the "
                "files that SQLite keeps beside it",
                path,
            )


@contextmanager
def private_output(path: Path, *, force: bool) -> Iterator[TextIO]:
    """Write a text file with mode 0600 that appears when it is complete.

    Raises ``ConfigurationError`` if the file exists and ``force`` is False, or for a bad path.
    """
    if path.exists() and not force:
        raise ConfigurationError(f"{path} exists: choose another file, or give --force")
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _OWNER_ONLY)
    except OSError as error:
        raise ConfigurationError(f"cannot write to {path.parent}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
