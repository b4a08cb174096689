"""Closes connections of an engine to an SQLite file that was replaced by another one."""

from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.exc import DisconnectionError

from onceward.stores.sqlite.epoch import file_identity

__all__ = ["ReplacedFile"]

# The key of ``ConnectionPoolEntry.info`` for the file of the connection.
_FILE: Final = "onceward_file"


class ReplacedFile:
    """Listens to an engine. An open connection would go on reading and writing the old file."""

    def __init__(self, engine: Any, path: str | None) -> None:
        """``path`` is None for a database without a file."""
        self._engine = engine
        self._path = path

    def listen(self) -> None:
        """Begin to compare, at each checkout of a connection."""
        if self._path is not None:
            event.listen(self._engine, "connect", self._on_connect)
            event.listen(self._engine, "checkout", self._on_checkout)

    def stop(self) -> None:
        """Stop comparing. Idempotent."""
        for name, listener in (("connect", self._on_connect), ("checkout", self._on_checkout)):
            if event.contains(self._engine, name, listener):
                event.remove(self._engine, name, listener)

    def _on_connect(self, _driver: Any, pooled: Any) -> None:
        pooled.info[_FILE] = file_identity(self._path)

    def _on_checkout(self, _driver: Any, pooled: Any, _proxy: Any) -> None:
        found = file_identity(self._path)
        if found is not None and pooled.info.setdefault(_FILE, found) != found:
            # SQLAlchemy closes the connection and opens another one.
            raise DisconnectionError(f"{self._path} was replaced by another file")
