"""Schema migrations: numbered SQL files, each applied once and in order.

``apply_migrations`` decides what to run and yields it, one statement at a time; it does no I/O.
A database runs it inside one transaction that excludes other processes, with ``run_steps`` or
``run_steps_async`` and a function that executes a statement with its driver. A ``Ledger`` says
where that database records what was applied.
"""

import sqlite3
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, Protocol

from onceward_protocol.errors import ConfigurationError
from onceward_protocol.storage.sql_files import without_comments

__all__ = [
    "MOVED",
    "Applied",
    "Ledger",
    "Migration",
    "Rows",
    "Statement",
    "Steps",
    "apply_migrations",
    "load_migrations",
    "pending_migrations",
    "run_steps",
    "run_steps_async",
    "split_statements",
]

# Recorded while a database is moved and in the source afterwards, so that no server starts on it.
# The number is unknown to every version, and an unknown number is refused.
MOVED: Final = ("core", 2_147_483_647)

Rows = Sequence[Sequence[Any]]
Statement = tuple[str, tuple[Any, ...]]
Steps = Generator[Statement, Rows, None]
Applied = set[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered script. ``namespace`` separates the numbers of the core and of each service."""

    namespace: str
    number: int
    name: str
    sql: str

    @property
    def id(self) -> tuple[str, int]:
        """Namespace and number: what a database records as applied."""
        return self.namespace, self.number


def load_migrations(namespace: str, package: str) -> list[Migration]:
    """Read the ``NNNN_name.sql`` files of a package, sorted by number."""
    found = []
    for entry in files(package).iterdir():
        if entry.name.endswith(".sql"):
            number, _, name = entry.name.removesuffix(".sql").partition("_")
            found.append(Migration(namespace, int(number), name, entry.read_text(encoding="utf-8")))
    return sorted(found, key=lambda migration: migration.number)


def pending_migrations(applied: Applied, known: Sequence[Migration]) -> list[Migration]:
    """Return the known migrations that are not applied, in the order given.

    Raises ``ConfigurationError`` if a known namespace has migrations applied that are unknown
    here: a newer version has changed the schema. Unknown namespaces are ignored.
    """
    if MOVED in applied:
        raise ConfigurationError(
            "the database was moved with onceward move, or the move is not finished: finish it "
            "and use the new database, or use the old one again with onceward move --undo"
        )
    namespaces = {migration.namespace for migration in known}
    unknown = sorted(
        f"{namespace} {number:04}"
        for namespace, number in applied - {migration.id for migration in known}
        if namespace in namespaces
    )
    if unknown:
        raise ConfigurationError(
            f"the database was migrated by a newer version ({', '.join(unknown)}): "
            "upgrade Onceward, or use another database"
        )
    return [migration for migration in known if migration.id not in applied]


def split_statements(script: str) -> list[str]:
    """Split a script into statements that each end with a line.

    The body of a trigger of SQLite, or of a function of PostgreSQL in ``$$``, stays in one piece.
    """
    statements, current = [], ""
    for line in without_comments(script).splitlines(keepends=True):
        current += line
        if current.count("$$") % 2 == 0 and sqlite3.complete_statement(current):
            statements.append(current.strip())
            current = ""
    return [*statements, current.strip()] if current.strip() else statements


class Ledger(Protocol):
    """Where a database records which migrations were applied."""

    def read(self) -> Generator[Statement, Rows, Applied]:
        """Create the ledger if it is missing; return what it holds."""

    def check(
        self, applied: Applied, known: Sequence[Migration], /
    ) -> Generator[Statement, Rows, None]:
        """Raise ``ConfigurationError`` if the tables are not those of the applied migrations."""

    def split(self, script: str) -> Iterable[str]:
        """Return a script in the pieces that the driver can execute."""

    def record(self, migration: Migration) -> Statement:
        """Return the statement that records a migration as applied."""

    def finish(self, new: Sequence[Migration]) -> Generator[Statement, Rows, None]:
        """Do what is left after these migrations were applied."""


def apply_migrations(known: Sequence[Migration], ledger: Ledger) -> Steps:
    """Yield the statements that bring a database up to date; each ``send`` gets its rows.

    Raises ``ConfigurationError`` if a newer version has migrated the database, or if tables are
    missing whose migrations are applied.
    """
    applied = yield from ledger.read()
    pending = pending_migrations(applied, known)
    yield from ledger.check(applied, known)
    for migration in pending:
        for sql in ledger.split(migration.sql):
            yield sql, ()
        yield ledger.record(migration)
    yield from ledger.finish(pending)


def run_steps(steps: Steps, execute: Callable[[str, tuple[Any, ...]], Rows]) -> None:
    """Execute every statement of ``steps`` with a blocking driver."""
    try:
        statement = next(steps)
        while True:
            statement = steps.send(execute(*statement))
    except StopIteration:
        return


async def run_steps_async(
    steps: Steps, execute: Callable[[str, tuple[Any, ...]], Awaitable[Rows]]
) -> None:
    """Execute every statement of ``steps`` with an asynchronous driver."""
    try:
        statement = next(steps)
        while True:
            statement = steps.send(await execute(*statement))
    except StopIteration:
        return
