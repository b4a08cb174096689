"""A person's notifications: numbered in the order of their commits, and read by a cursor."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

from onceward import Transaction
from onceward.errors import BodyInvalidError, NotFoundError, ServiceError
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_services.planning.model import row_view
from onceward_services.planning.repository import is_id

if TYPE_CHECKING:
    from onceward_protocol.storage.sql_files import Queries

__all__ = [
    "CURSOR_GONE",
    "Cursor",
    "Inbox",
    "NotificationKind",
    "add_notification",
    "mark_many_read",
    "mark_read",
    "notification_view",
    "read_inbox",
]

CURSOR_GONE: Final = "notifications.cursor_gone"

NotificationKind = Literal["assigned", "moved", "changed", "ended"]

# Of one request, so that its transaction is short.
_MARK_LIMIT: Final = 1000
_CURSOR: Final = re.compile(r"([1-9][0-9]{0,17})-([0-9a-f]{12})")


class Inbox(NamedTuple):
    """Whose notifications: a person of an organization."""

    tenant: str
    recipient: str


class Cursor(NamedTuple):
    """A position: everything up to a number, and the end of the id that the number had.

    A restored backup takes numbers back, and others get them; the id shows it.
    """

    seq: int = 0
    tail: str = ""

    @classmethod
    def parse(cls, text: str | None, field: str = "after") -> Self:
        """Parse a cursor; None is the beginning. Raises ``BodyInvalidError``."""
        if text is None:
            return cls()
        found = _CURSOR.fullmatch(text)
        if found is None:
            raise BodyInvalidError(
                f"{field} should be the cursor of a notification", details={"field": field}
            )
        return cls(int(found[1]), found[2])

    @classmethod
    def of(cls, row: Row) -> Self:
        """Return the position after a notification."""
        return cls(row["seq"], _tail(row["id"]))

    def check(self, last_seq: int, current_id: str | None) -> None:
        """Raise ``ServiceError`` (410) if the database has lost what this cursor includes.

        A number without a notification is fine: it may have been deleted because of its age.
        """
        is_other = current_id is not None and _tail(current_id) != self.tail
        if self.seq and (self.seq > last_seq or is_other):
            raise ServiceError(
                410,
                CURSOR_GONE,
                "the database has lost notifications that this cursor includes: read all of them "
                "again, without a cursor",
            )

    def __str__(self) -> str:
        """Return the text of the cursor, which needs no escaping in a URL."""
        return f"{self.seq}-{self.tail}"


async def add_notification(
    tx: Transaction, inbox: Inbox, about: dict[str, Any], *, notification_id: str, now: datetime
) -> bool:
    """Add a notification; returns False if the person has got it already."""
    whose = inbox._asdict()
    number = await tx.fetch_one(_sql("next_number"), whose)
    assert number is not None  # noqa: S101 - the statement always returns a row
    values = about | whose | {"id": notification_id, "now": now, "seq": number["seq"]}
    return await tx.fetch_one(_sql("add_notification"), values) is not None


async def read_inbox(
    store: Store, inbox: Inbox, after: Cursor, *, limit: int, unread: bool = False
) -> Sequence[Row]:
    """Return up to ``limit`` notifications after a cursor, oldest first.

    Raises ``ServiceError`` (410) if the database has lost what the cursor includes.
    """
    values = inbox._asdict() | {"after": after.seq, "limit": limit}
    rows = await store.read(_sql("list_unread" if unread else "list_notifications"), values)
    after.check(rows[0]["last_seq"] if rows else 0, rows[0]["after_id"] if rows else None)
    return [row for row in rows if row["id"] is not None]


async def mark_read(tx: Transaction, inbox: Inbox, notification_id: str, now: datetime) -> Row:
    """Mark a notification as read and return it. Raises ``NotFoundError``."""
    about = inbox._asdict() | {"id": notification_id}
    if is_id(notification_id):
        await tx.execute(_sql("mark_read"), about | {"now": now})
        row = await tx.fetch_one(_sql("find_notification"), about)
        if row is not None:
            return row
    raise NotFoundError("there is no such notification")


async def mark_many_read(
    tx: Transaction, inbox: Inbox, up_to: Cursor, now: datetime
) -> tuple[int, bool]:
    """Mark notifications up to a cursor as read; returns how many, and whether there may be more.

    Raises ``ServiceError`` (410) if the database has lost what the cursor includes.
    """
    about = inbox._asdict() | {"up_to": up_to.seq}
    locked = await tx.fetch_one(_sql("lock_inbox"), about)
    up_to.check(*((locked["seq"], locked["up_to_id"]) if locked else (0, None)))
    values = about | {"now": now, "limit": _MARK_LIMIT}
    marked = await tx.execute(_sql("mark_many_read"), values)
    return marked, marked == _MARK_LIMIT


def notification_view(row: Row) -> dict[str, Any]:
    """Return the JSON fields of a notification."""
    fields = ("id", "kind", "assignment_id", "version", "mission_id", "mission_title")
    return {
        **{name: row[name] for name in fields},
        **row_view({name: row[name] for name in ("project_id", "created_at", "read_at")}),
        "cursor": str(Cursor.of(row)),
    }


def _tail(notification_id: str) -> str:
    return notification_id[-12:]


def _sql(name: str) -> str:
    queries: Queries = load_queries("onceward_services.planning", "inbox.sql")
    return queries[name]
