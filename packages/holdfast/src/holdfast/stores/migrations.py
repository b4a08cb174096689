"""Migrations: numbered SQL files, applied once each, in order, whoever starts first."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from holdfast.errors import ConfigurationError

__all__ = ["Migration", "check_known", "load_migrations", "statements_of"]


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step. ``room`` keeps the numbers of the core and of each service apart."""

    room: str
    number: int
    name: str
    sql: str


def load_migrations(room: str, package: str) -> list[Migration]:
    """Read ``NNNN_name.sql`` files of a package, in order."""
    found = []
    for entry in files(package).iterdir():
        if entry.name.endswith(".sql"):
            number, _, name = entry.name.removesuffix(".sql").partition("_")
            found.append(Migration(room, int(number), name, entry.read_text(encoding="utf-8")))
    return sorted(found, key=lambda m: m.number)


def check_known(applied: set[tuple[str, int]], known: Sequence[Migration]) -> None:
    """Refuse a database that a newer version has migrated: we would not understand it."""
    rooms = {m.room for m in known}
    strange = {
        f"{room} {number:04}"
        for room, number in applied - {(m.room, m.number) for m in known}
        if room in rooms
    }
    if strange:
        raise ConfigurationError(
            f"the database was migrated by a newer version ({', '.join(sorted(strange))}): "
            "upgrade Holdfast, or use another database"
        )


def statements_of(script: str) -> list[str]:
    """Split a script for SQLite, whose drivers take one statement at a time in a transaction."""
    statements, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return [*statements, pending] if pending.strip() else statements
