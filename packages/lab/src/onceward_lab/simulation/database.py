"""The server's database: one file for all seeds of a process, reset before each.

A new connection reads the schema and prepares every statement again, which took longer than the
writes of most seeds. So connections are reused: the transaction of a killed process is rolled back,
as SQLite does when a file is closed.
"""

import gc
import sqlite3
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["Contents", "ServerDatabase"]

_UNIX_EPOCH_JULIAN: Final = 2440587.5
_DAY_SECONDS: Final = 86_400.0

# The rows of each table.
Contents = dict[str, list[tuple[Any, ...]]]


class ServerDatabase:
    """A migrated file and its pool of connections. Each reset restores its first contents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # The clock of SQLite, by which jobs are leased.
        self.unix_time: Callable[[], float] = _no_clock
        self._idle: deque[sqlite3.Connection] = deque()
        # The checker's connection. Always open, so that a killed process is never the last one to
        # close the file, which would checkpoint it.
        self.reader = sqlite3.connect(path, timeout=0, isolation_level=None)
        self.reader.execute("PRAGMA synchronous=OFF")
        tables = self.reader.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table'"
        ).fetchall()
        self._tables = [name for (name,) in tables]
        self._contents = self.back_up()
        self._schema = self._schema_version()

    def reset(self, unix_time: Callable[[], float]) -> None:
        """Restore the first contents, and use the clock of the next world."""
        self.unix_time = unix_time
        if self._schema_version() != self._schema:
            raise RuntimeError("the previous seed has changed the schema")
        self._restore_contents()
        if not self._is_idle():  # a snapshot would show rows of the previous seed
            self._close_idle()
            gc.collect()  # unfinished cursors may be kept by reference cycles
            if not self._is_idle():
                raise RuntimeError("a connection still reads rows of the previous seed")

    def back_up(self) -> Contents:
        """Return everything that is committed."""
        return {
            name: self.reader.execute(f"SELECT * FROM {name}").fetchall()  # noqa: S608
            for name in self._tables
        }

    def restore(self, backup: Contents, epoch: str) -> bool:
        """Go back to a backup, with a new epoch; returns False while a process writes."""
        try:
            self.reader.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        self._replace_contents(backup)
        self.reader.execute("UPDATE onceward_secret SET cache_epoch = ?", (epoch,))
        self.reader.execute("COMMIT")
        return True

    def _restore_contents(self) -> None:
        self.reader.execute("BEGIN IMMEDIATE")
        self._replace_contents(self._contents)
        self.reader.execute("COMMIT")

    def _replace_contents(self, new: Contents) -> None:
        for table, contents in new.items():
            self.reader.execute(f"DELETE FROM {table}")  # noqa: S608
            if contents:
                places = ", ".join("?" * len(contents[0]))
                self.reader.executemany(f"INSERT INTO {table} VALUES ({places})", contents)  # noqa: S608

    def _is_idle(self) -> bool:
        """Return whether no connection has an open transaction."""
        is_busy, *_ = self.reader.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        return not is_busy

    def acquire(self, connect: Callable[[], sqlite3.Connection]) -> sqlite3.Connection:
        """Return an idle connection, or a new one."""
        if self._idle:
            return self._idle.popleft()
        connection = connect()
        # A kill ends a process and not the machine: committed data survives without syncs.
        connection.execute("PRAGMA synchronous=OFF")
        connection.create_function("julianday", 1, self._julian_day)
        return connection

    def release(self, connection: sqlite3.Connection) -> None:
        """Roll back, and keep the connection for the next process."""
        connection.rollback()
        self._idle.append(connection)

    def close(self) -> None:
        """Close every connection."""
        self._close_idle()
        self.reader.close()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _schema_version(self) -> int:
        version: int = self.reader.execute("PRAGMA schema_version").fetchone()[0]
        return version

    def _julian_day(self, what: str) -> float:
        """Replace the clock of SQLite: ``julianday('now')``."""
        if what != "now":
            raise ValueError(what)
        return self.unix_time() / _DAY_SECONDS + _UNIX_EPOCH_JULIAN


def _no_clock() -> float:
    raise RuntimeError("the database has no clock: call reset() first")
