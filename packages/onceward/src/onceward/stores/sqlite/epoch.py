"""Which SQLite file a path leads to, and the epoch that is stored in it."""

import os

from onceward.ports import EpochReading

__all__ = ["FileIdentity", "file_identity", "reading_of"]

# The device and the inode of a file.
FileIdentity = tuple[int, int]


def file_identity(path: str | None) -> FileIdentity | None:
    """Return which file is at a path; None if there is none, or without a path."""
    if path is None:
        return None
    try:
        found = os.stat(path)  # noqa: PTH116 - for each request, and pathlib takes twice as long
    except OSError:
        return None
    return found.st_dev, found.st_ino


def reading_of(path: str | None, cache_epoch: str) -> EpochReading:
    """Return the epoch of a file: another file at the same path is another database."""
    device, inode = file_identity(path) or (0, 0)
    return EpochReading(f"{device}/{inode}", cache_epoch)
