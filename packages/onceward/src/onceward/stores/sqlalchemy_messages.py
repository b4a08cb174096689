"""The claim with BEGIN, and the record with COMMIT, in one message each on psycopg's connections.

For ``SqlAlchemySyncStore`` on PostgreSQL, so that a guarded request has as many round trips as one
without a guard. Also the time limits of these connections.
"""

import math
import os
from datetime import datetime
from typing import Any

from onceward_protocol.extras import needs_extra

with needs_extra("psycopg"):
    import psycopg

from onceward.core.idempotency_record import AuditEvent, Record, RecordId
from onceward.errors import CommitUnknownError, StoreUnavailableError, SupersededError
from onceward.stores.postgres.params import finish_statement, instant_literal, text_literals
from onceward.stores.psycopg.errors import ServerLostError, raise_outage
from onceward.stores.psycopg_limits import PsycopgLimits, limits_of, thread_limit
from onceward.stores.psycopg_message import exchange
from onceward.stores.replication import unconfirmed
from onceward.stores.session_limits import CONFIRM, SessionLimits
from onceward.stores.sqlalchemy_errors import SUPERSEDED_STATES, is_outage

__all__ = [
    "begin_and_claim",
    "commit",
    "confirm",
    "finish_and_commit",
    "limits_of",
    "on_checkin",
    "on_connect",
    "thread_limit",
]


def begin_and_claim(  # noqa: PLR0917 - the parts of one message
    raw: Any, begin: str, function: str, lock: int, record_id: RecordId, now: datetime
) -> int:
    """Begin, lock and look up; return the number of rows of ``onceward_claim``."""
    names = ",".join(text_literals(record_id))
    result = _send(raw, f"{begin};SELECT {function}({lock},{names},{instant_literal(now)})")
    return int(result.ntuples)


def finish_and_commit(
    raw: Any, function: str, record: Record, audit: AuditEvent | None, limits: SessionLimits
) -> None:
    """Write record and audit event, and commit. Raises ``CommitUnknownError``."""
    found = limits_of(raw)
    assert found is not None  # noqa: S101 - a connection of psycopg 3
    found.begin_commit(limits.commit_seconds)
    try:
        _send(raw, f"{finish_statement(function, record, audit)};COMMIT")
        found.check_commit()
    except ServerLostError as error:
        raise CommitUnknownError(
            f"the connection was lost in COMMIT: {error}", is_cut=found.note_cut(limits.abandoned)
        ) from error
    except psycopg.Error as error:
        if error.sqlstate in SUPERSEDED_STATES:
            raise SupersededError("another request with this key was committed first") from error
        if is_outage(error):
            raise StoreUnavailableError(f"the database is unavailable: {error}") from error
        raise


def confirm(raw: Any, limits: SessionLimits) -> None:
    """Commit what was read, so that a synchronous standby has it too. Raises if it may not."""
    found = limits_of(raw)
    assert found is not None  # noqa: S101 - a connection of psycopg 3
    found.begin_commit(limits.commit_seconds)
    try:
        _send(raw, CONFIRM if raw.autocommit else f"{CONFIRM};COMMIT")
    except ServerLostError:
        found.note_cut(limits.abandoned)
        raise
    if found.notices.has_warned:
        raise unconfirmed("the standby did not confirm it")


def commit(raw: Any, limits: SessionLimits) -> None:
    """Commit. Raises ``CommitUnknownError`` after a warning, and if COMMIT was cut."""
    found = limits_of(raw)
    assert found is not None  # noqa: S101 - a connection of psycopg 3
    found.begin_commit(limits.commit_seconds)
    try:
        raw.commit()
    except psycopg.Error as error:
        if found.note_cut(limits.abandoned):
            raise CommitUnknownError(
                f"the connection was lost in COMMIT: {error}", is_cut=True
            ) from error
        raise
    found.check_commit()


def on_checkin(raw: Any, _record: Any) -> None:
    """Remove the limit of a connection that returns to the pool; a listener of the pool."""
    found = getattr(raw, "wait", None)
    if type(found) is PsycopgLimits:
        found.seconds = None


def on_connect(_engine: Any, _record: Any, _args: Any, parameters: dict[str, Any]) -> None:
    """Limit the time to connect during a call of Onceward, unless the app does; ``do_connect``."""
    seconds = thread_limit.current()
    if seconds is not None and "PGCONNECT_TIMEOUT" not in os.environ:
        parameters.setdefault("connect_timeout", math.ceil(seconds))


def _send(raw: Any, statements: str) -> Any:
    """Run statements in one round trip; return the result of the last."""
    try:
        with raw.lock:
            return raw.wait(exchange(raw.pgconn, statements.encode()))
    except psycopg.Error as error:
        raise_outage(raw, error)
        raise
