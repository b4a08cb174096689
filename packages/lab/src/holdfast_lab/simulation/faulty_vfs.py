"""A device's file system: it fills up, and after a power cut it has what was synced, or less luck.

What was synced is there. What was written since may be there or not, sector by sector, in any
combination: disks and file systems keep no order among writes that nobody waited for.
"""

import os
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import apsw

__all__ = ["Disk", "DiskDoor", "do_without_locks"]

_SECTOR: Final = 512
_BASE: Final = "unix-excl"
"""Locks and shared memory within one process of the machine, which is where all of ours are."""

_doors = count()


def do_without_locks() -> None:
    """Let SQLite spare its mutexes and its sums of memory, in a process that has not used it yet.

    Of all threads of a torture only one runs at any time, so nothing is there to be locked; taking
    and giving back what nobody else wants was a tenth of its time.
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
    """One directory, with what is certain of its files, and what is not yet."""

    def __init__(self, directory: Path, files: dict[str, bytes]) -> None:
        """Put these files on it, synced."""
        self.directory = directory
        self.is_full = False
        self.was_full = False
        self._synced = {name: bytearray(data) for name, data in files.items()}
        self._unsynced: dict[str, list[_Write | _Truncate]] = {}
        directory.mkdir()
        for name, data in files.items():
            (directory / name).write_bytes(data)

    def change(self, name: str, change: _Write | _Truncate) -> None:
        """Take note of a change that is not synced."""
        self._unsynced.setdefault(name, []).append(change)

    def sync(self, name: str) -> None:
        """Make certain what was changed."""
        image = self._synced.setdefault(name, bytearray())
        for change in self._unsynced.pop(name, ()):
            if isinstance(change, _Truncate):
                del image[change.size :]
            else:
                _put(image, change.offset, change.data)

    def delete(self, name: str) -> None:
        """Forget a file."""
        self._synced.pop(name, None)
        self._unsynced.pop(name, None)

    def cut_power(self, chance: Random) -> int:
        """Lose some of what was not synced; returns how many pieces. Nobody may have it open."""
        # Between none and all: a cut is not always unlucky in the same way.
        share = chance.choice((0.0, 0.1, 0.5, 0.9))
        lost = 0
        for name, changes in self._unsynced.items():
            image = self._synced.setdefault(name, bytearray())
            for change in changes:
                lost += _put_some(image, change, chance, share)
        self._unsynced.clear()
        for file in self.directory.iterdir():
            file.unlink()
        for name, image in self._synced.items():
            if not name.endswith("-shm"):  # gone with the power
                (self.directory / name).write_bytes(image)
        return lost


def _put(image: bytearray, offset: int, data: bytes) -> None:
    if len(image) < offset:
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data


def _put_some(image: bytearray, change: _Write | _Truncate, chance: Random, share: float) -> int:
    if isinstance(change, _Truncate):
        if chance.random() >= share:
            return 1
        del image[change.size :]
        return 0
    lost, position, end = 0, change.offset, change.offset + len(change.data)
    while position < end:
        # Sectors are written whole or not at all; a write may begin in the middle of one.
        border = min(end, (position // _SECTOR + 1) * _SECTOR)
        if chance.random() < share:
            _put(image, position, change.data[position - change.offset : border - change.offset])
        else:
            lost += 1
        position = border
    return lost


def _full() -> apsw.Error:
    error: Any = apsw.FullError("the disk is full")
    # As SQLite's own errors have it; one that is raised in Python has no number.
    error.result = error.extendedresult = apsw.SQLITE_FULL
    full: apsw.Error = error
    return full


class DiskDoor(apsw.VFS):
    """One process's way to a disk. Once the process is dead, nothing of it gets through."""

    def __init__(self, disk: Disk) -> None:
        """Open the way."""
        self.disk = disk
        self.is_shut = False
        self.name = f"torture-{next(_doors)}"
        super().__init__(self.name, _BASE)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        """Open a file."""
        return _File(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        """Delete a file."""
        if self.is_shut:
            raise apsw.IOError("the process is dead")
        self.disk.delete(os.path.basename(filename))  # noqa: PTH119 - called for every file
        super().xDelete(filename, syncdir)

    def remove(self) -> None:
        """Take the door away."""
        with suppress(apsw.Error):
            self.unregister()


class _File(apsw.VFSFile):
    """One open file."""

    def __init__(self, door: DiskDoor, name: Any, flags: list[int]) -> None:
        super().__init__(_BASE, name, flags)
        path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        self._name = os.path.basename(path)  # noqa: PTH119
        self._door = door

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        door = self._door
        if door.is_shut:
            raise apsw.IOError("the process is dead")
        if door.disk.is_full:
            door.disk.was_full = True
            raise _full()
        door.disk.change(self._name, _Write(offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        if self._door.is_shut:
            raise apsw.IOError("the process is dead")
        self._door.disk.change(self._name, _Truncate(newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: ARG002, N802
        if self._door.is_shut:
            raise apsw.IOError("the process is dead")
        self._door.disk.sync(self._name)
        # The directory lies in memory or in a temporary place: only the record above counts.
