"""The parts of Onceward's schema: what a database has depends on what is used.

Every database has the guard. The other parts come with ``onceward migrate``, or when they are used:
what uses one calls ``store.schema.want`` before ``store.open``, which creates what is missing. A
store that is open creates it at the next ``open``. An app that enqueues its first job, and was not
known to have jobs, gets their tables in that transaction (``create_within``).

A part has its own numbers in the table of migrations. Its tables are in ``schema/PART``, and its
functions of PostgreSQL in ``sql/PART``: a file each, named after the function. A file
``NAME.citus.sql`` takes the place of ``NAME.sql`` where the tables are distributed by Citus.

A store runs ``MigrationTable.apply`` inside one transaction that excludes other processes.
Afterwards ``MigrationTable.names`` are the names of the database's tables.

A row with the number 0 is about the functions of a part: the version that has created them, and
their hash. Where the hash differs they are replaced, except by an older version: it uses those that
it finds. So a function keeps its arguments and its meaning; another one gets another name, or comes
with a migration, which older versions refuse.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import entry_points, version
from importlib.resources import files
from typing import Final

from onceward.errors import ConfigurationError
from onceward.ports import Row, Store, Transaction
from onceward.stores.citus import (
    IS_CITUS,
    SEQUENTIAL,
    distribute,
    is_distributed,
    refuse_other_nodes,
)
from onceward.stores.errors import is_denied
from onceward.stores.sql_loader import load_queries
from onceward.stores.table_names import TableNames
from onceward_protocol.storage.migrations import (
    Applied,
    Migration,
    Rows,
    Statement,
    Steps,
    T,
    apply_migrations,
    load_migrations,
    run_steps_async,
)
from onceward_protocol.storage.sql_files import without_comments

# The advisory lock of PostgreSQL that every store takes before it migrates: "once" in ASCII.
MIGRATION_LOCK: Final = 0x6F6E6365

_FIRST: Final = ("guard", 1)
_FUNCTIONS: Final = 0
_SERVER: Final = f"SELECT current_setting('server_encoding'), ({IS_CITUS})"
_CREATED: Final = re.compile(r"^CREATE TABLE (?:IF NOT EXISTS )?(\S+) \(", re.MULTILINE)
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


class MigrationTable:
    """The table ``onceward_migrations``, for SQLite and for PostgreSQL."""

    def __init__(
        self,
        names: TableNames,
        *,
        is_sqlite: bool,
        wanted: Sequence[Part] = (),
        optional: Sequence[Part] = (),
        others: Sequence[Migration] = (),
    ) -> None:
        """Migrate the ``wanted`` parts, those ``optional`` ones that are there, and ``others``."""
        # The names that the tables have; ``read`` finds out if they are distributed.
        self.names = names
        # The parts that the database has in the end.
        self.parts: Sequence[Part] = wanted
        self._is_sqlite = is_sqlite
        self._optional = optional
        self._others = others
        self._table = names.table("migrations")
        # What is recorded about the functions of each part.
        self._functions: dict[str, str] = {}

    def apply(self) -> Steps[None]:
        with _refusing(
            "the role may not create or change Onceward's tables and functions: run onceward "
            "migrate with a role that may"
        ):
            yield from apply_migrations(self)

    def read(self) -> Steps[Applied]:
        """Create the table if it is missing; return the applied (namespace, number) pairs.

        Raises ``ConfigurationError`` if the database cannot store every text, or is one of 0.1.
        """
        is_citus = False
        if not self._is_sqlite:
            [(encoding, is_citus)] = yield _SERVER, ()
            _refuse_encoding(encoding)
            if is_citus:
                yield from refuse_other_nodes()
        columns = {row[0] for row in (yield self._columns(), ())}
        applied: Applied = set()
        if "namespace" in columns:
            rows = yield f"SELECT namespace, number, name FROM {self._table}", ()  # noqa: S608
            applied = {(row[0], row[1]) for row in rows if row[1] != _FUNCTIONS}
            self._functions = {row[0]: row[2] for row in rows if row[1] == _FUNCTIONS}
        if _FIRST not in applied:
            yield from self._refuse_database_of_0_1()
        if not columns:  # looked up first: a role that may not create tables can use them
            yield from self._create()
        if is_citus and (yield from is_distributed(self.names)):
            self.names = replace(self.names, is_distributed=True)
            yield SEQUENTIAL, ()
        return applied

    def known(self, applied: Applied, /) -> Sequence[Migration]:
        """Return the migrations of all parts that the database has or gets."""
        present = {namespace for namespace, _ in applied} - {part.name for part in self.parts}
        self.parts = [*self.parts, *(part for part in self._optional if part.name in present)]
        own = [m for part in self.parts for m in part.migrations(is_sqlite=self._is_sqlite)]
        return [*own, *self._others]

    def check(self, applied: Applied, known: Sequence[Migration], /) -> Steps[None]:
        """Raise ``ConfigurationError`` for a table of a part without its migration, or the reverse.

        An empty table in place of a lost one would forget keys and jobs without a sign. Other
        tables are not checked: an app may drop its own without a migration.
        """
        parts = {part.name for part in self.parts}
        is_recorded = {
            name: migration.id in applied
            for migration in known
            if migration.namespace in parts
            for name in _CREATED.findall(self.names.render(migration.sql))
        }
        if not is_recorded:
            return
        present = {row[0] for row in (yield self._present(is_recorded), ())}
        if missing := [
            name for name, found in is_recorded.items() if found and name not in present
        ]:
            raise ConfigurationError(
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing although "
                f"{self._table} records the migration: restore a backup, or drop all tables of "
                "Onceward, which loses what they hold, and migrate again"
            )
        if extra := [name for name in is_recorded if not is_recorded[name] and name in present]:
            raise ConfigurationError(
                f"{', '.join(extra)} {'exists' if len(extra) == 1 else 'exist'} although "
                f"{self._table} does not record the migration: restore a backup, choose another "
                "table_prefix, or drop all tables of Onceward, which loses what they hold"
            )

    def render(self, script: str) -> str:
        return self.names.render(script)

    def record(self, migration: Migration) -> Statement:
        """Return the statement that records a migration as applied now, or what it is now."""
        now = datetime.now(UTC)
        applied_at = f"{now:%Y-%m-%dT%H:%M:%S.%fZ}" if self._is_sqlite else now
        placeholders = "?, ?, ?, ?" if self._is_sqlite else "$1, $2, $3, $4"
        insert = (
            f"INSERT INTO {self._table} (namespace, number, name, applied_at)"  # noqa: S608
            f" VALUES ({placeholders}) ON CONFLICT (namespace, number) DO UPDATE"
            " SET name = excluded.name, applied_at = excluded.applied_at"
        )
        return insert, (migration.namespace, migration.number, migration.name, applied_at)

    def finish(self, new: Sequence[Migration]) -> Steps[None]:
        """Distribute new tables where Citus has those of the database; replace old functions."""
        if self._is_sqlite:
            return
        if new and self.names.is_distributed:
            tables: dict[str, str | None] = {}
            for migration in new:
                for table in _CREATED.findall(self.names.render(migration.sql)):
                    has_tenant = (yield _sql("has_tenant"), (table,))[0][0]
                    tables[table] = "tenant" if has_tenant else None
            yield from distribute(self.names, tables.items())
        yield from self._replace_functions()

    def distribute(self, tables: Iterable[tuple[str, str | None]]) -> Steps[list[str]]:
        """Distribute the tables of an up-to-date database; see ``onceward.stores.citus``."""
        self.known((yield from self.read()))
        changed = yield from distribute(self.names, tables)
        self.names = replace(self.names, is_distributed=True)
        yield from self._replace_functions()
        return changed

    def _replace_functions(self) -> Steps[None]:
        here = version("onceward")
        for part in self.parts:
            functions = part.functions(self.names)
            digest = sha256("\0".join(functions).encode()).hexdigest()
            found, _, recorded = self._functions.get(part.name, "").partition(" ")
            if not functions or recorded == digest or _numbers(found) > _numbers(here):
                continue
            for function in functions:
                yield function, ()
            yield self.record(Migration(part.name, _FUNCTIONS, f"{here} {digest}", ""))

    def _refuse_database_of_0_1(self) -> Steps[None]:
        for (table,) in (yield _sql("ledgers_on_sqlite" if self._is_sqlite else "ledgers"), ()):
            first = f"SELECT 1 FROM {table} WHERE number = 1 AND name = 'records'"  # noqa: S608
            if (yield first, ()):
                raise ConfigurationError(
                    f"this is a database of version 0.1 (table {table}), which 0.2 does not read: "
                    "use another database, or drop the tables of 0.1, which loses what they hold"
                )

    def _columns(self) -> str:
        if self._is_sqlite:
            return f"SELECT name FROM pragma_table_info('{self._table}')"  # noqa: S608
        return (
            "SELECT attname FROM pg_attribute"  # noqa: S608
            f" WHERE attrelid = to_regclass('{self._table}') AND attnum > 0 AND NOT attisdropped"
        )

    def _present(self, names: Iterable[str]) -> str:
        listed = ", ".join(f"'{name}'" for name in names)
        if self._is_sqlite:
            return f"SELECT name FROM sqlite_schema WHERE name IN ({listed})"  # noqa: S608
        return (
            f"SELECT name FROM unnest(ARRAY[{listed}]) AS name"  # noqa: S608
            " WHERE to_regclass(name) IS NOT NULL"
        )

    def _create(self) -> Steps[None]:
        schema = self.names.schema
        if schema is not None:
            found = yield f"SELECT 1 FROM pg_namespace WHERE nspname = '{schema}'", ()  # noqa: S608
            if not found:
                with _refusing(
                    f"the role may not create the schema {schema}: run CREATE SCHEMA "
                    f'"{schema}" AUTHORIZATION role as the owner of the database, or use '
                    'schema="public"'
                ):
                    yield f'CREATE SCHEMA "{schema}"', ()
        timestamp = "TEXT" if self._is_sqlite else "timestamptz"
        create = (
            f"CREATE TABLE {self._table} (namespace TEXT NOT NULL,"
            f" number INTEGER NOT NULL, name TEXT NOT NULL, applied_at {timestamp} NOT NULL,"
            " PRIMARY KEY (namespace, number))"
        )
        yield create, ()


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


def _sql(name: str) -> str:
    return load_queries("onceward.stores", "parts.sql")[name]


@contextmanager
def _refusing(message: str) -> Iterator[None]:
    """Raise ``ConfigurationError`` with this message for a statement that the role may not run."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        if is_denied(error):
            raise ConfigurationError(f"{message} ({error})") from error
        raise


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a version, without those of a pre-release: ``0.2.0rc1`` is 0.2.0."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])


def _refuse_encoding(encoding: str) -> None:
    if encoding != "UTF8":
        raise ConfigurationError(
            f"the encoding of the database is {encoding}, which cannot store every text: create it "
            "with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )
