"""The parts of Onceward's schema: what a database has depends on what is used.

Every database has the guard. The other parts come with ``onceward migrate``, or when they are used:
what uses one calls ``store.schema.want`` before ``store.open``, which creates what is missing. A
store that is open creates it at the next ``open``. An app that enqueues its first job, and was not
known to have jobs, gets their tables in that transaction (``create_within``).

A part has its own numbers in the table of migrations. Its tables are in ``schema/PART``, and its
functions of PostgreSQL in ``sql/PART``: a file each, named after the function. A file
``NAME.citus.sql`` takes the place of ``NAME.sql`` where the tables are distributed by Citus.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Final

from onceward.core.table_names import TableNames
from onceward.errors import ConfigurationError
from onceward.ports import Row, Store, Transaction
from onceward.stores.migrations import MIGRATION_LOCK, MigrationTable
from onceward_protocol.storage.migrations import (
    Migration,
    Rows,
    Steps,
    T,
    load_migrations,
    run_steps_async,
)
from onceward_protocol.storage.sql_files import without_comments

__all__ = [
    "AUDIT_SEALS",
    "GUARD",
    "JOBS",
    "LIBRARY_PARTS",
    "REQUEST_LOG",
    "SEQUENCES",
    "Part",
    "Schema",
    "create_within",
    "distribute_store",
    "installed_parts",
    "run_within",
]

_LOCK: Final = f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"
_GROUP: Final = "onceward.parts"
# A parameter in the style of a driver: ``$1`` or ``?``.
_PLACEHOLDER: Final = re.compile(r"\$(\d)|\?")


@dataclass(frozen=True, slots=True)
class Part:
    """Tables that are created together. ``name`` is the namespace of their migrations."""

    name: str
    # Has the folders ``schema/NAME/sqlite``, ``schema/NAME/postgres`` and, if any, ``sql/NAME``.
    package: str = "onceward.stores"

    def migrations(self, *, is_sqlite: bool) -> list[Migration]:
        """Return the migrations for one kind of database."""
        database = "sqlite" if is_sqlite else "postgres"
        return load_migrations(
            self.name, files(self.package).joinpath("schema", self.name, database)
        )

    def functions(self, names: TableNames) -> Sequence[str]:
        """Return the statements that create the functions of PostgreSQL."""
        return _functions(self, names)


GUARD: Final = Part("guard")
JOBS: Final = Part("jobs")
SEQUENCES: Final = Part("sequences")
AUDIT_SEALS: Final = Part("audit_seals")
REQUEST_LOG: Final = Part("request_log")
LIBRARY_PARTS: Final = (GUARD, JOBS, SEQUENCES, AUDIT_SEALS, REQUEST_LOG)


def installed_parts() -> dict[str, Part]:
    """Return the parts of this library and of installed packages, by name."""
    others = [part for point in entry_points(group=_GROUP) for part in point.load()]
    return {part.name: part for part in (*LIBRARY_PARTS, *others)}


class Schema:
    """The parts of one database: which are wanted, and which it is known to have."""

    def __init__(
        self, names: TableNames, *, is_sqlite: bool, migrations: Sequence[Migration] = ()
    ) -> None:
        """``migrations`` of the app are applied after those of the parts."""
        self.names = names
        self.is_sqlite = is_sqlite
        self._of_app = migrations
        self._wanted = {GUARD.name: GUARD}
        self._present: set[str] = set()
        # Whether the database has all parts that are wanted.
        self.is_complete = False

    def want(self, *parts: Part) -> None:
        """Have the next ``open`` of the store create these parts, if they are missing."""
        self._wanted |= {part.name: part for part in parts}
        self.is_complete = self._wanted.keys() <= self._present

    def has(self, part: Part) -> bool:
        """Return whether the database has a part, as far as is known since ``open``."""
        return part.name in self._present

    def migration(self, *parts: Part) -> MigrationTable:
        """Return the ledger with the wanted parts and ``parts``."""
        wanted = self._wanted | {part.name: part for part in parts}
        return MigrationTable(
            self.names,
            is_sqlite=self.is_sqlite,
            wanted=tuple(wanted.values()),
            optional=LIBRARY_PARTS,
            others=self._of_app,
        )

    def committed(self, migration: MigrationTable) -> None:
        """Note what a migration has done, after its commit."""
        self.names = migration.names
        self._present = {part.name for part in migration.parts}
        self.want()


async def distribute_store(store: Store, tables: Sequence[tuple[str, str]]) -> list[str]:
    """Distribute the tables of an open store over the nodes of Citus; return which were not yet.

    Raises ``ConfigurationError`` if it is not on the coordinator of Citus.
    """
    if store.name != "postgresql":
        raise ConfigurationError("Citus is an extension of PostgreSQL: give a postgresql:// URL")
    unit = await store.begin()
    try:
        await unit.statements.fetch_all(_LOCK)
        steps = store.schema.migration().distribute(tables)
        changed = await run_within(unit.statements, steps)
    except BaseException:
        await unit.rollback()
        raise
    await unit.commit(None, None)
    return changed


async def create_within(tx: Transaction, schema: Schema, part: Part) -> MigrationTable:
    """Create the tables of a part in a transaction of the app, unless they are there.

    After the commit, call ``Schema.committed``: a transaction that is rolled back takes the tables
    along. A second connection would wait for ever for the lock of SQLite, which this one holds.
    """
    migration = schema.migration(part)
    if not schema.is_sqlite:
        await tx.fetch_all(_LOCK)
    await run_within(tx, migration.apply())
    return migration


async def run_within(tx: Transaction, steps: Steps[T]) -> T:
    """Execute every statement of ``steps`` in a transaction; return what they return."""

    async def execute(sql: str, values: tuple[object, ...]) -> Rows:
        params = None
        if values:
            sql, params = _named(sql, values)
        if not sql.startswith("SELECT"):
            await tx.execute(sql, params)
            return ()
        rows: Sequence[Row] = await tx.fetch_all(sql, params)
        return [tuple(row.values()) for row in rows]

    return await run_steps_async(steps, execute)


def _named(sql: str, values: tuple[object, ...]) -> tuple[str, dict[str, object]]:
    """Return a statement of one of the drivers, and its values, with names for the parameters."""
    places = iter(range(1, len(values) + 1))
    named = _PLACEHOLDER.sub(lambda found: f":p{found[1] or next(places)}", sql)
    return named, {f"p{place}": value for place, value in enumerate(values, 1)}


@cache
def _functions(part: Part, names: TableNames) -> tuple[str, ...]:
    folder = files(part.package).joinpath("sql", part.name)
    found = {} if not folder.is_dir() else {file.name: file for file in folder.iterdir()}
    chosen = {name.split(".")[0]: name for name in sorted(found) if name.count(".") == 1}
    if names.is_distributed:
        chosen |= {name.split(".")[0]: name for name in found if name.endswith(".citus.sql")}
    texts = (found[file].read_text(encoding="utf-8") for _, file in sorted(chosen.items()))
    return tuple(names.render(without_comments(text)).strip() for text in texts)
