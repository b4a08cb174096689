"""The SQL of the outbox by name, and the conversion between its rows and entries."""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, Final

import msgspec

from onceward_outbox.entry import Attempt, ConflictResolution, Entry, Reason, Status, Transition
from onceward_outbox.errors import ConfigurationError
from onceward_protocol.operation import Operation
from onceward_protocol.storage.sql_files import read_queries

__all__ = [
    "COLUMNS",
    "attempt_of",
    "awaited_local",
    "created_by",
    "entry_of",
    "instant",
    "json_text",
    "statement",
]

COLUMNS: Final = Entry.__struct_fields__
"""The columns of an entry, which are named as its fields."""

# -- statements -----------------------------------------------------------------------------------

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

_DEAD: Final = "('failed', 'discarded', 'expired')"
# Replaced in the SQL of the files.
_MACROS: Final = (
    (re.compile(r"\bENTRY\b"), ", ".join(COLUMNS)),
    # Spelled as in the partial index on lanes, or SQLite would not use that index.
    (
        re.compile(r"\bIS_OPEN\b"),
        "status <> 'succeeded' AND status <> 'discarded' AND status <> 'expired'",
    ),
    # The version to send: that of the last send, else the base followed along own successes. Empty
    # if the last success did not name one, NULL if nothing is known.
    (
        re.compile(r"\bVERSION_TO_SEND\b"),
        # Without IS NULL, which is always false of a column in RETURNING (seen in SQLite 3.40).
        """CASE operation WHEN 'create' THEN NULL ELSE coalesce(
                sent_version,
                (SELECT CASE coalesce(base_version, '') WHEN ''
                        THEN coalesce(json_extract(known.own, '$[0].before'), known.version)
                        ELSE known.version END
                   FROM entity_versions AS known
                  WHERE known.user_id = offline_sync_queue.user_id
                    AND known.entity = offline_sync_queue.entity
                    AND CASE coalesce(base_version, '') WHEN '' THEN known.own <> '[]'
                        ELSE EXISTS (SELECT 1 FROM json_each(known.own)
                                      WHERE value = base_version) END),
                base_version) END""",
    ),
    # What the entry waits for, as ``entry_waits`` names it: a JSON array.
    (
        re.compile(r"\bWAITS_FOR\b"),
        """(SELECT json_group_array(wait.awaited) FROM entry_waits AS wait
             WHERE wait.entry_id = offline_sync_queue.id AND wait.met = 0)""",
    ),
    # Patterns of endpoints, as the claims pass them: read once, not for each of the entries.
    (
        re.compile(r"\bHELD_PATTERNS\b"),
        """held AS MATERIALIZED (
               SELECT json_extract(value, '$[0]') AS pattern, json_extract(value, '$[1]') AS deeper
                 FROM json_each(:held))""",
    ),
    # Whether the path matches a pattern, and has no more segments than that.
    (
        re.compile(r"\bIS_HELD\b"),
        """EXISTS (SELECT 1 FROM held
                   WHERE HELD_PATH GLOB held.pattern AND NOT HELD_PATH GLOB held.deeper)""",
    ),
    (
        re.compile(r"\bHELD_PATH\b"),
        """CASE instr(endpoint, '?') WHEN 0 THEN endpoint
                ELSE substr(endpoint, 1, instr(endpoint, '?') - 1) END""",
    ),
    # No other entry about the same entity is in flight: a retry of that one must send the version
    # of its first send, and another lane, or another process, must not produce a newer one.
    (
        re.compile(r"\bENTITY_IS_FREE\b"),
        # Not correlated: the few claims are read once, from their index.
        """(entity IS NULL OR (user_id, entity) NOT IN (
               SELECT sent.user_id, sent.entity
                 FROM offline_sync_queue AS sent INDEXED BY idx_offline_sync_queue_lease
                WHERE sent.lease_ms IS NOT NULL AND sent.entity IS NOT NULL))""",
    ),
    # Not as two conditions with OR, for which SQLite would read the whole table.
    (
        re.compile(r"\bMAYBE_SENT\b"),
        """rowid IN (SELECT rowid FROM offline_sync_queue WHERE outcome_unknown = 1
           UNION ALL SELECT rowid FROM offline_sync_queue WHERE lease_ms IS NOT NULL)""",
    ),
    (
        re.compile(r"\bCREATED_BY\((\w+)\)"),
        r"CASE WHEN \1.operation = 'create' THEN 'local/' || \1.user_id || '/' || \1.local_id END",
    ),
    (
        re.compile(r"\bIS_DEAD\(([\w.]+)\)"),
        # The statuses are constants.
        rf"""(EXISTS (SELECT 1 FROM offline_sync_queue AS dead
                       WHERE dead.id = \1 AND dead.status IN {_DEAD})
           OR (SELECT maker.status FROM offline_sync_queue AS maker
                WHERE maker.local_id = substr(\1, -36) AND maker.operation = 'create'
                  AND 'local/' || maker.user_id || '/' || maker.local_id = \1
                ORDER BY maker.sequence_number DESC LIMIT 1) IN {_DEAD})""",  # noqa: S608
    ),
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
    for pattern, replacement in _MACROS:
        sql = pattern.sub(replacement, sql)
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
    entry_id, number, started_at, ended_at, outcome, status, code, request_id, error = row
    return Attempt(
        entry_id=entry_id,
        number=number,
        started_at=datetime.fromisoformat(started_at),
        ended_at=datetime.fromisoformat(ended_at),
        outcome=Transition(outcome),
        status=status,
        code=code,
        request_id=request_id,
        error=error,
    )
