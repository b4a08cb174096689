"""The schema of an outbox file: create it, migrate it, or refuse the file."""

from collections.abc import Generator, Sequence
from typing import Any, Final

from holdfast.errors import FileReadOnlyError, NewerFileError, OutboxFileError
from holdfast.outbox.database import Database
from holdfast.stores.migrations import (
    Migration,
    Statement,
    apply_migrations,
    load_migrations,
    run_steps,
    split_statements,
)

__all__ = ["load_steps", "prepare_schema"]

_NAMESPACE: Final = "outbox"
_TABLES: Final = ("users", "offline_sync_queue", "entry_waits", "id_mappings", "attempts")
_CREATE_META: Final = (
    "CREATE TABLE IF NOT EXISTS outbox_meta (name TEXT PRIMARY KEY NOT NULL, value) WITHOUT ROWID"
)
_READ_VERSION: Final = "SELECT value FROM outbox_meta WHERE name = 'schema'"
_SAVE_VERSION: Final = (
    "INSERT INTO outbox_meta (name, value) VALUES ('schema', ?)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)


def load_steps() -> list[tuple[int, str]]:
    """Return number and script of each migration, sorted."""
    migrations = load_migrations(_NAMESPACE, "holdfast.outbox.migrations")
    return [(migration.number, migration.sql) for migration in migrations]


def prepare_schema(database: Database, *, busy_seconds: float, create: bool = True) -> None:
    """Create the tables or bring them up to date; safe if several processes open the file.

    With ``create``, a file without an outbox gets one. Raises ``NewerFileError`` for a file of a
    newer version and ``OutboxFileError`` for one that cannot hold an outbox.
    """
    database.configure()
    migrations = [Migration(_NAMESPACE, number, "", sql) for number, sql in load_steps()]
    newest = migrations[-1].number
    _check_file(database, newest=newest, create=create)
    if not database.switch_to_wal(busy_seconds):
        raise FileReadOnlyError(
            f"the log of {database.path} cannot be written: the outbox keeps it next to the file"
        )
    database.rows("BEGIN IMMEDIATE")
    try:
        if _checked_version(database, newest=newest) == 0:
            _check_tables_absent(database)
        run_steps(apply_migrations(migrations, _SchemaVersion()), database.rows)
        database.rows("COMMIT")
    except BaseException:
        database.rollback()
        raise


class _SchemaVersion:
    """The ledger of an outbox: the number of the newest migration, in ``outbox_meta``."""

    def read(self) -> Generator[Statement, Sequence[Sequence[Any]], set[tuple[str, int]]]:
        yield _CREATE_META, ()
        rows = yield _READ_VERSION, ()
        version = int(rows[0][0]) if rows else 0
        return {(_NAMESPACE, number) for number in range(1, version + 1)}

    def split(self, script: str) -> list[str]:
        return split_statements(script)

    def record(self, migration: Migration) -> Statement:
        return _SAVE_VERSION, (migration.number,)


def _check_file(database: Database, *, newest: int, create: bool) -> None:
    """Raise for a file that cannot be used, before anything is written."""
    if _checked_version(database, newest=newest) == 0:
        if not create:
            raise OutboxFileError(f"there is no outbox in {database.path}")
        _check_tables_absent(database)
    if database.rows("PRAGMA query_only")[0][0]:
        raise FileReadOnlyError(f"{database.path} cannot be written")


def _checked_version(database: Database, *, newest: int) -> int:
    """Return the number of the newest migration applied; 0 if there is no outbox yet."""
    if not database.rows("SELECT 1 FROM sqlite_schema WHERE name = 'outbox_meta'"):
        return 0
    found = database.rows(_READ_VERSION)
    version = int(found[0][0]) if found else 0
    if version > newest:
        raise NewerFileError(
            f"{database.path} was written by a newer version (schema {version}, this one knows "
            f"{newest}): upgrade Holdfast to open it"
        )
    return version


def _check_tables_absent(database: Database) -> None:
    """Raise if the file, which may be the app's database, has tables that the outbox needs."""
    # One statement, because another process may be creating the outbox at the same time.
    names = ", ".join(f"'{table}'" for table in _TABLES)
    found = database.rows(
        f"SELECT name FROM sqlite_schema WHERE name IN ({names})"  # noqa: S608 - constants
        " AND NOT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'outbox_meta')"
    )
    if found:
        raise OutboxFileError(
            f"{database.path} already has a table {found[0][0]!r}: give the outbox another file"
        )
