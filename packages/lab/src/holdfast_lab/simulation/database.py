"""The server's database: one file for all worlds of a process, emptied between two of them.

To open a connection means to read the schema, and to prepare every statement anew; that took
longer than what most worlds write. So connections go from the dead to the living: what a killed
process had open is rolled back, as SQLite does when the file is closed.
"""

import gc
import sqlite3
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["ServerDatabase"]

_UNIX_EPOCH_JULIAN: Final = 2440587.5
_DAY_SECONDS: Final = 86_400.0


class ServerDatabase:
    """A migrated file, and who is connected to it."""

    def __init__(self, path: Path) -> None:
        """Take a file as it is: each world is to find it like this."""
        self.path = path
        # The database's clock, which decides about jobs: the world's.
        self.unix_time: Callable[[], float] = _no_clock
        self._idle: deque[sqlite3.Connection] = deque()
        # What the checker reads with. Open all the time: a killed process is never the last one to
        # close the file, and so never tidies up after itself.
        self.rows = sqlite3.connect(path, timeout=0, isolation_level=None)
        self.rows.execute("PRAGMA synchronous=OFF")
        tables = self.rows.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        self._contents = {
            name: self.rows.execute(f"SELECT * FROM {name}").fetchall()  # noqa: S608
            for (name,) in tables
        }
        self._schema = self._schema_version()

    def begin_world(self, unix_time: Callable[[], float]) -> None:
        """Undo all that the world before has written, and go by the clock of the next."""
        self.unix_time = unix_time
        if self._schema_version() != self._schema:
            raise RuntimeError("a world has changed the schema")
        self._empty()
        if not self._is_still():  # a snapshot of that world must not be seen in the next
            self._close_idle()
            gc.collect()  # what was not read to its end may be held by garbage
            if not self._is_still():
                raise RuntimeError("somebody still reads what a world has left")

    def _empty(self) -> None:
        self.rows.execute("BEGIN IMMEDIATE")
        for table, contents in self._contents.items():
            self.rows.execute(f"DELETE FROM {table}")  # noqa: S608
            if contents:
                places = ", ".join("?" * len(contents[0]))
                self.rows.executemany(f"INSERT INTO {table} VALUES ({places})", contents)  # noqa: S608
        self.rows.execute("COMMIT")

    def _is_still(self) -> bool:
        """Say whether nobody has a transaction open."""
        is_busy, *_ = self.rows.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        return not is_busy

    def take(self, connect: Callable[[], sqlite3.Connection]) -> sqlite3.Connection:
        """Return an idle connection, or a new one."""
        if self._idle:
            return self._idle.popleft()
        connection = connect()
        # A kill takes a process, not the machine: what is committed is there without this.
        connection.execute("PRAGMA synchronous=OFF")
        connection.create_function("julianday", 1, self._julian_day)
        return connection

    def give_back(self, connection: sqlite3.Connection) -> None:
        """Undo what is open, and keep the connection for the next process."""
        connection.rollback()
        self._idle.append(connection)

    def close(self) -> None:
        """Close every connection."""
        self._close_idle()
        self.rows.close()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _schema_version(self) -> int:
        version: int = self.rows.execute("PRAGMA schema_version").fetchone()[0]
        return version

    def _julian_day(self, what: str) -> float:
        """Stand in for SQLite's own clock."""
        if what != "now":
            raise ValueError(what)
        return self.unix_time() / _DAY_SECONDS + _UNIX_EPOCH_JULIAN


def _no_clock() -> float:
    raise RuntimeError("no world is under way")
