"""The SQL of the outbox by name, and the conversion between its rows and entries."""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, Final

import msgspec

from onceward_outbox.entry import Attempt, ConflictResolution, Entry, Reason, Status
from onceward_outbox.errors import ConfigurationError
from onceward_protocol.operation import Operation
from onceward_protocol.storage.sql_files import read_queries

COLUMNS: Final = Entry.__struct_fields__
"""The columns of an entry, which are named as its fields."""

_FILES: Final = (
    "enqueue.sql",
    "claims.sql",
    "resolution.sql",
    "queries.sql",
    "maintenance.sql",
    "pruning.sql",
    "versions.sql",
    "sequences.sql",
)


def statement(name: str) -> str:
    """Return the SQL of one statement. Raises ``ConfigurationError`` for an unknown name."""
    try:
        return _statements()[name]
    except KeyError:
        raise ConfigurationError(f"the outbox has no statement {name!r}") from None


@cache
def _statements() -> dict[str, str]:
    return {
        name: _expand(sql)
        for file in _FILES
        for name, sql in read_queries("onceward_outbox", file).items()
    }


def _expand(sql: str) -> str:
    """Replace the names of macros, in the order of their file; see there."""
    sql = re.sub(r"\bENTRY\b", ", ".join(COLUMNS), sql)
    for name, text in read_queries("onceward_outbox", "macros.sql").items():
        for found in reversed([*re.finditer(rf"\b{name}\b(?:\(([\w.]+)\))?", sql)]):
            expanded = text.replace("ARGUMENT", found[1] or "")
            sql = sql[: found.start()] + expanded + sql[found.end() :]
    return sql


# -- rows -----------------------------------------------------------------------------------------

_encode = msgspec.json.Encoder().encode
_strings = msgspec.json.Decoder(tuple[str, ...]).decode
_headers = msgspec.json.Decoder(dict[str, str]).decode
_date = datetime.fromisoformat


def _member(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    """Return a look-up of an enumeration's members by value, which is faster than a call of it."""
    return {member.value: member for member in kind}.__getitem__


# Columns that are not stored as they are, by position; NULL stays None.
_CONVERTERS: Final[tuple[tuple[int, Callable[[Any], Any]], ...]] = tuple(
    (COLUMNS.index(name), convert)
    for name, convert in (
        ("operation", _member(Operation)),
        ("status", _member(Status)),
        ("conflict_resolution", _member(ConflictResolution)),
        ("reason", _member(Reason)),
        ("headers", _headers),
        ("dependency_ids", _strings),
        ("local_refs", _strings),
        ("conflict_fields", _strings),
        ("next_retry_at", _date),
        ("created_at", _date),
        ("synced_at", _date),
        ("client_generated_at", _date),
        ("forced", bool),
        ("outcome_unknown", bool),
    )
)


def instant(at: datetime) -> str:
    """Return an instant as ISO 8601 text in UTC, which sorts by time."""
    utc = at if at.tzinfo is UTC else at.astimezone(UTC)
    return f"{utc.isoformat(timespec='microseconds')[:-6]}Z"


def json_text(value: Any) -> str | None:
    """Return a list or an object as JSON; None if it is empty."""
    return _encode(value).decode() if value else None


def awaited_local(user_id: str, local_id: str) -> str:
    """Return the name of a local id's mapping in ``entry_waits``."""
    return f"local/{user_id}/{local_id}"


def created_by(entry: Entry) -> str | None:
    """Return the name in ``entry_waits`` of the mapping that this entry's success creates."""
    if entry.operation is not Operation.CREATE or entry.local_id is None:
        return None
    return awaited_local(entry.user_id, entry.local_id)


def entry_of(row: Sequence[Any]) -> Entry:
    """Return a row of ``COLUMNS`` as an entry."""
    values = list(row)
    for index, convert in _CONVERTERS:
        value = values[index]
        if value is not None:
            values[index] = convert(value)
    fields = dict(zip(COLUMNS, values, strict=True))
    # Stored as NULL if empty.
    fields["headers"] = fields["headers"] or {}
    fields["dependency_ids"] = fields["dependency_ids"] or ()
    fields["local_refs"] = fields["local_refs"] or ()
    fields["conflict_fields"] = fields["conflict_fields"] or ()
    return Entry(**fields)


def attempt_of(row: Sequence[Any]) -> Attempt:
    """Return a row of ``attempts``."""
    return msgspec.convert(dict(zip(Attempt.__struct_fields__, row, strict=True)), Attempt)
