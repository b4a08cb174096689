"""Empty databases, migrated once per process: a migration takes longer than most seeds."""

import asyncio
import os
import shutil
import tempfile
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from onceward.stores.parts import LIBRARY_PARTS
from onceward.stores.sqlite import SqliteStore
from onceward_lab.simulation.app import SCHEMA
from onceward_lab.simulation.database import ServerDatabase
from onceward_outbox.queue import OutboxQueue
from onceward_protocol.storage.migrations import Migration

__all__ = ["Templates", "shared_directory"]

_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - in memory, where it exists
_PREFIX: Final = "onceward-simulation-"


def shared_directory() -> "tempfile.TemporaryDirectory[str]":
    """Return a directory for several processes; it is removed however they end."""
    return tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_memory(), ignore_cleanup_errors=True)


def _memory() -> Path | None:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else None


class Templates:
    """The directory of one process, in memory where possible, with its empty databases."""

    def __init__(self, base: str | None = None) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base or _memory()))
        self._numbers = count()
        server = self._directory / "server.db"
        asyncio.run(_migrate(server))
        self.server = ServerDatabase(server)
        outbox = self._directory / "outbox.db"
        OutboxQueue.open(outbox, driver="apsw").close()
        self.device = outbox.read_bytes()

    def new_directory(self) -> Path:
        """Make a directory for one seed."""
        directory = self._directory / str(next(self._numbers))
        directory.mkdir()
        return directory

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.server.close()
        shutil.rmtree(self._directory, ignore_errors=True)


async def _migrate(path: Path) -> None:
    store = SqliteStore(path, migrations=[Migration("simulate", 1, "simulate", SCHEMA)])
    store.schema.want(*LIBRARY_PARTS)
    await store.open()
    await store.close()
