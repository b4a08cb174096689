"""Schema migrations: numbered SQL files, each applied once and in order.

``apply_migrations`` decides what to run and yields it, one statement at a time; it does no I/O.
A database runs it inside one transaction that excludes other processes, with ``run_steps`` or
``run_steps_async`` and a function that executes a statement with its driver. A ``Ledger`` says
where that database records what was applied.
"""

import sqlite3
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any, Final, Protocol, TypeVar

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
MOVED: Final = ("guard", 2_147_483_647)

T = TypeVar("T")

Rows = Sequence[Sequence[Any]]
Statement = tuple[str, tuple[Any, ...]]
Steps = Generator[Statement, Rows, T]
Applied = set[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered script. Each part of the library and each service has its own namespace."""

    namespace: str
    number: int
    name: str
    sql: str

    @property
    def id(self) -> tuple[str, int]:
        """Namespace and number: what a database records as applied."""
        return self.namespace, self.number


def load_migrations(namespace: str, folder: Traversable) -> list[Migration]:
    """Read the ``NNNN_name.sql`` files of a folder, sorted by number."""
    found = []
    for entry in folder.iterdir():
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

    def read(self) -> Steps[Applied]:
        """Create the ledger if it is missing; return what it holds."""

    def known(self, applied: Applied, /) -> Sequence[Migration]:
        """Return the migrations that the database is to have, in their order."""

    def check(self, applied: Applied, known: Sequence[Migration], /) -> Steps[None]:
        """Raise ``ConfigurationError`` if the tables are not those of the applied migrations."""

    def render(self, script: str) -> str:
        """Return a script with the names that the tables have."""

    def record(self, migration: Migration) -> Statement:
        """Return the statement that records a migration as applied."""

    def finish(self, new: Sequence[Migration]) -> Steps[None]:
        """Do what is left after these migrations were applied."""


def apply_migrations(ledger: Ledger) -> Steps[None]:
    """Yield the statements that bring a database up to date; each ``send`` gets its rows.

    Raises ``ConfigurationError`` if a newer version has migrated the database, or if tables are
    missing whose migrations are applied.
    """
    applied = yield from ledger.read()
    known = ledger.known(applied)
    pending = pending_migrations(applied, known)
    yield from ledger.check(applied, known)
    for migration in pending:
        for sql in split_statements(ledger.render(migration.sql)):
            yield sql, ()
        yield ledger.record(migration)
    yield from ledger.finish(pending)


def run_steps(steps: Steps[T], execute: Callable[[str, tuple[Any, ...]], Rows]) -> T:
    """Execute every statement of ``steps`` with a blocking driver; return what they return.

    The errors of statements are raised in ``steps``, which may translate them.
    """
    try:
        statement = next(steps)
        while True:
            try:
                rows = execute(*statement)
            except Exception as error:  # noqa: BLE001 - raised again, there
                statement = steps.throw(error)
            else:
                statement = steps.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_steps_async(
    steps: Steps[T], execute: Callable[[str, tuple[Any, ...]], Awaitable[Rows]]
) -> T:
    """Execute every statement of ``steps`` with an asynchronous driver; see ``run_steps``."""
    try:
        statement = next(steps)
        while True:
            try:
                rows = await execute(*statement)
            except Exception as error:  # noqa: BLE001 - raised again, there
                statement = steps.throw(error)
            else:
                statement = steps.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result
