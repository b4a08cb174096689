"""Removes what an app leaves in a session of PostgreSQL, so that no other request sees it.

A committed ``SET``, ``SET ROLE``, ``LISTEN`` or temporary table outlives its transaction; session
locks and prepared names even outlive a rollback. ``CLEAN`` is sent in one message with COMMIT or
ROLLBACK, after it: it costs no round trip, cannot fail the transaction, and an idle connection
holds no locks (docs/decisions/0032-session-state.md has the numbers).

RESET returns to the start-up parameters of the connection and to the settings of role and database.
Prepared statements of the driver are kept: only names that SQL ``PREPARE`` has made are dropped.
"""

import re
from functools import lru_cache
from typing import Any, Final

# The settings that Onceward's connections start with, so that RESET returns to them.
STARTUP_PARAMETERS: Final = {"client_encoding": "UTF8", "standard_conforming_strings": "on"}

# Of PostgreSQL, in milliseconds. A parameter of the connection, too: RESET must return to it.
IDLE_TIMEOUT: Final = "idle_in_transaction_session_timeout"

# RESET ALL comes early: a statement_timeout of the handler must not end the others. It does not
# reset the role; RESET SESSION AUTHORIZATION does, but older versions reset it to none, not to the
# one of ALTER ROLE … SET role. Cursors are closed first: DISCARD TEMP fails on a table in use.
_CLEAN: Final = (
    "RESET SESSION AUTHORIZATION;RESET ROLE;RESET ALL;CLOSE ALL;UNLISTEN *;DISCARD TEMP;"
    "SELECT pg_advisory_unlock_all()"
)
# The last statement of a message: its command tag has the number of names. Not sent always, because
# PostgreSQL lists all prepared statements, which takes longer than the rest.
_FIND_NAMES: Final = "SELECT FROM pg_prepared_statements WHERE from_sql"
_NO_NAMES: Final = "SELECT 0"
_DROP_NAMES: Final = """DO $$
DECLARE v_name text;
BEGIN
    FOR v_name IN SELECT name FROM pg_prepared_statements WHERE from_sql LOOP
        EXECUTE format('DEALLOCATE %I', v_name);
    END LOOP;
END $$"""

_PREPARE: Final = re.compile(r"\bPREPARE\b", re.IGNORECASE)
_LASTING: Final = re.compile(
    r"\s*SET\b|.*\b(?:set_config|pg_(?:try_)?advisory_lock\w*|LISTEN|TEMP(?:ORARY)?|PREPARE|HOLD)\b",
    re.IGNORECASE | re.DOTALL,
)


@lru_cache(maxsize=2048)
def _prepares(sql: str) -> bool:
    return _PREPARE.search(sql) is not None


@lru_cache(maxsize=2048)
def outlives_statement(sql: str) -> bool:
    """Check whether a statement outside a transaction is one that changes the session."""
    return _LASTING.match(sql) is not None


class UsedSession:
    """Parts of a session that a handler has used, and that must be removed at its end."""

    __slots__ = ("is_raw", "is_used", "may_have_names")

    def __init__(self) -> None:
        # A statement of the app has run, or may have.
        self.is_used = False
        # The handler got the driver's connection object.
        self.is_raw = False
        self.may_have_names = False

    def note_statement(self, sql: str) -> None:
        self.is_used = True
        if not self.may_have_names and _prepares(sql):
            self.may_have_names = True

    def note_failure(self) -> None:
        """Note that a statement of the app has failed."""

    def note_raw(self) -> None:
        """Note that the handler has the driver's connection: it may run any statement."""
        self.is_used = self.is_raw = self.may_have_names = True

    def ending(self, end: str) -> str:
        """Return the message that ends the transaction with ``end``, and cleans a used session."""
        if not self.is_used:
            return end
        return f"{end};{_CLEAN};{_FIND_NAMES}" if self.may_have_names else f"{end};{_CLEAN}"

    async def clean(self, connection: Any) -> None:
        """Clean a session outside a transaction, in its own message."""
        await self.drop_names(connection, await connection.execute(self.ending("SELECT 1")))

    async def drop_names(self, connection: Any, tag: str) -> None:
        """Drop names of SQL PREPARE, if the tag of the message of ``ending`` has found any."""
        if self.may_have_names and tag != _NO_NAMES:
            await connection.execute(_DROP_NAMES)
