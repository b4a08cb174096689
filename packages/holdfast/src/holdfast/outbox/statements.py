"""The SQL of the outbox by name, from the ``.sql`` files of this package, with macros expanded."""

import re
from functools import cache
from typing import Final

from holdfast.errors import ConfigurationError
from holdfast.outbox.rows import COLUMNS
from holdfast.stores.sql_loader import load_queries

__all__ = ["statement"]

_FILES: Final = ("enqueue.sql", "claims.sql", "resolution.sql", "queries.sql", "maintenance.sql")

_DEAD: Final = "('failed', 'discarded', 'expired')"
_MACROS: Final = (
    (re.compile(r"\bENTRY\b"), ", ".join(COLUMNS)),
    # Spelled as in the partial index on lanes, or SQLite would not use that index.
    (
        re.compile(r"\bIS_OPEN\b"),
        "status <> 'succeeded' AND status <> 'discarded' AND status <> 'expired'",
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
        for name, sql in load_queries("holdfast.outbox", file).items()
    }


def _expand(sql: str) -> str:
    for pattern, replacement in _MACROS:
        sql = pattern.sub(replacement, sql)
    return sql
