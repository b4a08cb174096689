"""A device's file system: it can be full, and a power cut loses some of the unsynced writes.

Synced data survives. Each sector written since the last sync survives or not, in any combination:
disks and file systems do not order writes between two syncs.
"""

import os
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import apsw

__all__ = ["Disk", "FaultyVFS", "disable_sqlite_mutexes"]

_SECTOR: Final = 512
_BASE: Final = "unix-excl"
"""Keeps locks and shared memory in this process, which runs all simulated processes."""

_vfs_numbers = count()


def disable_sqlite_mutexes() -> None:
    """Turn off mutexes and memory statistics of apsw's SQLite, in a process that has not used it.

    Only one thread of a simulation runs at a time. The mutexes took a tenth of its time.
    """
    apsw.shutdown()
    apsw.config(apsw.SQLITE_CONFIG_SINGLETHREAD)
    apsw.config(apsw.SQLITE_CONFIG_MEMSTATUS, False)
    apsw.initialize()


class _Write(NamedTuple):
    offset: int
    data: bytes


class _Truncate(NamedTuple):
    size: int


class Disk:
    """One directory, with the synced contents of its files and the unsynced changes."""

    def __init__(self, directory: Path, files: dict[str, bytes]) -> None:
        self.directory = directory
        self.is_full = False
        self.was_full = False
        self._synced = {name: bytearray(data) for name, data in files.items()}
        self._unsynced: dict[str, list[_Write | _Truncate]] = {}
        directory.mkdir()
        for name, data in files.items():
            (directory / name).write_bytes(data)

    def record(self, name: str, change: _Write | _Truncate) -> None:
        """Record a change that is not synced."""
        self._unsynced.setdefault(name, []).append(change)

    def sync(self, name: str) -> None:
        """Apply the recorded changes of a file to its synced contents."""
        image = self._synced.setdefault(name, bytearray())
        for change in self._unsynced.pop(name, ()):
            if isinstance(change, _Truncate):
                del image[change.size :]
            else:
                _write_at(image, change.offset, change.data)

    def delete(self, name: str) -> None:
        """Delete a file; a deletion survives a power cut."""
        self._synced.pop(name, None)
        self._unsynced.pop(name, None)

    def cut_power(self, rng: Random) -> int:
        """Lose unsynced writes; returns how many sectors. No file may be open."""
        # The share of unsynced writes that survives.
        kept_share = rng.choice((0.0, 0.1, 0.5, 0.9))
        lost = 0
        for name, changes in self._unsynced.items():
            image = self._synced.setdefault(name, bytearray())
            for change in changes:
                lost += _apply_partially(image, change, rng, kept_share)
        self._unsynced.clear()
        for file in self.directory.iterdir():
            file.unlink()
        for name, image in self._synced.items():
            if not name.endswith("-shm"):  # shared memory does not survive
                (self.directory / name).write_bytes(image)
        return lost


def _write_at(image: bytearray, offset: int, data: bytes) -> None:
    if len(image) < offset:
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data


def _apply_partially(
    image: bytearray, change: _Write | _Truncate, rng: Random, kept_share: float
) -> int:
    if isinstance(change, _Truncate):
        if rng.random() >= kept_share:
            return 1
        del image[change.size :]
        return 0
    lost, position, end = 0, change.offset, change.offset + len(change.data)
    while position < end:
        # A sector is written completely or not at all; a write may start inside one.
        border = min(end, (position // _SECTOR + 1) * _SECTOR)
        if rng.random() < kept_share:
            _write_at(
                image, position, change.data[position - change.offset : border - change.offset]
            )
        else:
            lost += 1
        position = border
    return lost


def _full() -> apsw.Error:
    error: Any = apsw.FullError("the disk is full")
    # Errors of SQLite have these codes; an error raised in Python has none.
    error.result = error.extendedresult = apsw.SQLITE_FULL
    full: apsw.Error = error
    return full


class FaultyVFS(apsw.VFS):
    """The file system of one process. All writes fail once the process is dead."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.is_dead = False
        self.name = f"simulation-{next(_vfs_numbers)}"
        super().__init__(self.name, _BASE)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        """Open a file."""
        return _File(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        """Delete a file."""
        if self.is_dead:
            raise apsw.IOError("the process is dead")
        self.disk.delete(os.path.basename(filename))  # noqa: PTH119 - called for every file
        super().xDelete(filename, syncdir)

    def remove(self) -> None:
        """Unregister the VFS."""
        with suppress(apsw.Error):
            self.unregister()


class _File(apsw.VFSFile):
    """One open file."""

    def __init__(self, vfs: FaultyVFS, name: Any, flags: list[int]) -> None:
        super().__init__(_BASE, name, flags)
        path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        self._name = os.path.basename(path)  # noqa: PTH119
        self._vfs = vfs

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        vfs = self._vfs
        if vfs.is_dead:
            raise apsw.IOError("the process is dead")
        if vfs.disk.is_full:
            vfs.disk.was_full = True
            raise _full()
        vfs.disk.record(self._name, _Write(offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        if self._vfs.is_dead:
            raise apsw.IOError("the process is dead")
        self._vfs.disk.record(self._name, _Truncate(newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: ARG002, N802
        if self._vfs.is_dead:
            raise apsw.IOError("the process is dead")
        self._vfs.disk.sync(self._name)
        # No real sync: the files are temporary, and the power cut is simulated.
