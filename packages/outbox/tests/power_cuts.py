"""A disk that forgets: every write is recorded, and what the disk holds after a cut is made up.

What was synced is there. What was written since may be there or not, sector by sector, in any
combination: disks and file systems keep no order among writes that nobody waited for.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import apsw

SECTOR = 512


class Write(NamedTuple):
    file: str
    offset: int
    data: bytes


class Truncate(NamedTuple):
    file: str
    size: int


class Sync(NamedTuple):
    file: str


class Delete(NamedTuple):
    file: str


class Mark(NamedTuple):
    """The app got a result at this point."""

    what: Any


Happening = Write | Truncate | Sync | Delete | Mark


class Disk(apsw.VFS):
    """SQLite's files, with a record of everything that happens to them."""

    def __init__(self, name: str) -> None:
        self.record: list[Happening] = []
        super().__init__(name, "unix")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return RecordedFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        self.record.append(Delete(os.path.basename(filename)))  # noqa: PTH119
        super().xDelete(filename, syncdir)

    def mark(self, what: Any) -> None:
        self.record.append(Mark(what))


class RecordedFile(apsw.VFSFile):
    """One file of the disk."""

    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        super().__init__("unix", name, flags)
        path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        self._name = os.path.basename(path)  # noqa: PTH119
        self._record = disk.record

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        self._record.append(Write(self._name, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._record.append(Truncate(self._name, newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._record.append(Sync(self._name))
        super().xSync(flags)


def after_cut(happenings: Iterable[Happening], random: Random) -> dict[str, bytes]:
    """Return what the disk may hold if the power goes right after these."""
    durable: dict[str, bytearray] = {}
    waiting: dict[str, list[Write | Truncate]] = {}
    for event in happenings:
        match event:
            case Write() | Truncate():
                waiting.setdefault(event.file, []).append(event)
            case Sync(file):
                image = durable.setdefault(file, bytearray())
                for change in waiting.pop(file, []):
                    _apply(image, change, keep=lambda: True)
            case Delete(file):
                durable.pop(file, None)
                waiting.pop(file, None)
            case Mark():
                continue
    # Between none and all of what nobody waited for: a cut is not always unlucky in the same way.
    share = random.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    for file, changes in waiting.items():
        image = durable.setdefault(file, bytearray())
        for change in changes:
            _apply(image, change, keep=lambda: random.random() < share)
    return {file: bytes(image) for file, image in durable.items()}


def _apply(image: bytearray, change: Write | Truncate, keep: Callable[[], bool]) -> None:
    if isinstance(change, Truncate):
        if keep():
            del image[change.size :]
        return
    position = change.offset
    end = change.offset + len(change.data)
    while position < end:
        # Sectors are written whole or not at all; a write may begin in the middle of one.
        border = min(end, (position // SECTOR + 1) * SECTOR)
        if keep():
            piece = change.data[position - change.offset : border - change.offset]
            if len(image) < position:
                image.extend(bytes(position - len(image)))
            image[position:border] = piece
        position = border


def restore(images: dict[str, bytes], directory: Path) -> None:
    """Put what is left of the disk into a directory."""
    directory.mkdir()
    for name, data in images.items():
        if not name.endswith("-shm"):  # gone with the power
            (directory / name).write_bytes(data)
