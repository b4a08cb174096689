"""Databases for tests that need a new one. They are used again: to create one is slow."""

from collections.abc import Iterator
from contextlib import contextmanager

from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.reset_db import drop_postgres_tables

__all__ = ["SpareDatabases"]


class SpareDatabases:
    """The databases of one server that no test uses at the moment. They have no tables."""

    def __init__(self, server: RealPostgres) -> None:
        self._server = server
        self._urls: list[str] = []

    @contextmanager
    def lend(self) -> Iterator[str]:
        """Return the URL of a database without tables for the duration of the block."""
        self._server.start()  # a test before this one may have stopped it
        url = self._urls.pop() if self._urls else self._server.create_database()
        yield url
        self._server.start()
        drop_postgres_tables(url)
        self._urls.append(url)
