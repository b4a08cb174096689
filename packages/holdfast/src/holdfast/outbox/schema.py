"""The schema of the file: made, brought up to date, or refused. Nothing queued is lost by it."""

from importlib.resources import files
from typing import Final

from holdfast.errors import FileReadOnlyError, NewerFileError, OutboxFileError
from holdfast.outbox.database import Database

__all__ = ["load_steps", "prepare_schema"]

_TABLES: Final = ("users", "offline_sync_queue", "entry_waits", "id_mappings", "attempts")


def load_steps() -> list[tuple[int, str]]:
    """Return the numbered steps of the schema, in order."""
    found = [
        (int(entry.name.partition("_")[0]), entry.read_text(encoding="utf-8"))
        for entry in files("holdfast.outbox.migrations").iterdir()
        if entry.name.endswith(".sql")
    ]
    return sorted(found)


def prepare_schema(database: Database, *, busy_seconds: float, create: bool = True) -> None:
    """Bring the file up to date, whoever comes first; refuse one that is newer or not ours.

    With ``create`` a file without an outbox gets one.
    """
    database.configure()
    steps = load_steps()
    _check_file(database, newest=steps[-1][0], create=create)
    if not database.switch_to_wal(busy_seconds):
        raise FileReadOnlyError(
            f"{database.path} cannot be written beside: the outbox keeps a log next to its file"
        )
    database.rows("BEGIN IMMEDIATE")
    try:
        version = _version(database)
        if version == 0:
            _check_room(database)
            database.rows(
                "CREATE TABLE outbox_meta (name TEXT PRIMARY KEY NOT NULL, value) WITHOUT ROWID"
            )
        for number, sql in steps:
            if number > version:
                for statement in _statements(sql):
                    database.rows(statement)
                database.rows(
                    "INSERT INTO outbox_meta (name, value) VALUES ('schema', ?)"
                    " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                    (number,),
                )
        database.rows("COMMIT")
    except BaseException:
        database.rollback()
        raise


def _check_file(database: Database, *, newest: int, create: bool) -> None:
    """Refuse what cannot be worked with, before anything is written."""
    version = _version(database)
    if version > newest:
        raise NewerFileError(
            f"{database.path} was written by a newer version (schema {version}, this one knows "
            f"{newest}): upgrade Holdfast to open it"
        )
    if version == 0:
        if not create:
            raise OutboxFileError(f"there is no outbox in {database.path}")
        _check_room(database)
    if database.rows("PRAGMA query_only")[0][0]:
        raise FileReadOnlyError(f"{database.path} cannot be written")


def _version(database: Database) -> int:
    """Return the number of the last step this file has had; 0 if it is not an outbox yet."""
    if not database.rows("SELECT 1 FROM sqlite_schema WHERE name = 'outbox_meta'"):
        return 0
    found = database.rows("SELECT value FROM outbox_meta WHERE name = 'schema'")
    return int(found[0][0]) if found else 0


def _check_room(database: Database) -> None:
    """Look whether an outbox can begin here, possibly in a file that is the app's own as well."""
    # In one statement: another process may be making the outbox this moment.
    names = ", ".join(f"'{table}'" for table in _TABLES)
    found = database.rows(
        f"SELECT name FROM sqlite_schema WHERE name IN ({names})"  # noqa: S608 - constants
        " AND NOT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'outbox_meta')"
    )
    if found:
        raise OutboxFileError(
            f"{database.path} has a table {found[0][0]!r} of its own: give the outbox another file"
        )


def _statements(sql: str) -> list[str]:
    # No statement of a step holds a semicolon at a line's end, except the one that ends it.
    lines = [line for line in sql.splitlines() if not line.lstrip().startswith("--")]
    return [part for part in "\n".join(lines).split(";\n") if part.strip(" ;\n")]
