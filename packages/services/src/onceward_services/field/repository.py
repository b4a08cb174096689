"""Queries of field documents, always by tenant.

On PostgreSQL ``add_next`` and ``begin_change`` do in one round trip what ``next_change``, ``find``
and ``add`` do in several. All other SQL is the same on SQLite and PostgreSQL.
"""

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

from onceward import Transaction
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_protocol.ids import new_request_id
from onceward_protocol.storage.sql_files import Queries
from onceward_services.field.model import Kind, encode, response_text, server_fields
from onceward_services.large_bodies import decode_document

__all__ = [
    "Change",
    "ChangePage",
    "Item",
    "Page",
    "add",
    "add_next",
    "begin_change",
    "change",
    "find",
    "find_in",
    "list_branches",
    "list_changes",
    "list_page",
    "next_change",
    "remove",
]

# The server creates all ids. Other text is not looked up: PostgreSQL rejects some characters.
_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_FIRST_READ: Final = 16


class Change(NamedTuple):
    """The number and the instant of one change."""

    seq: int
    at: datetime


class Item(NamedTuple):
    """One version of a document."""

    id: str
    version: int
    # The app's fields as JSON text.
    document: str
    seq: int
    created_at: datetime
    updated_at: datetime
    # When the user acted, as the device says; without that, when the server created it.
    occurred_at: datetime
    is_deleted: bool

    def fields(self) -> dict[str, Any]:
        """Decode the app's fields; large ones stay encoded."""
        fields: dict[str, Any] = decode_document(self.document.encode())
        return fields

    def as_text(self) -> str:
        """Return the JSON text of a response, and of an entry in a list."""
        if self.is_deleted:
            return encode(self._server_fields())
        return response_text(self.document, self._server_fields())

    def _server_fields(self) -> dict[str, Any]:
        return server_fields(
            document_id=self.id,
            version=self.version,
            occurred_at=self.occurred_at,
            created_at=self.created_at,
            updated_at=self.updated_at,
            deleted=self.is_deleted,
        )


class ChangePage(NamedTuple):
    """Changes of all kinds, and the user's counter when they were read."""

    items: Sequence[tuple[Kind, Item]]
    # The number of the last change, 0 if there was none.
    last_seq: int
    # The current branch of the history; None before the first change.
    branch: str | None


def _sql() -> Queries:
    return load_queries("onceward_services.field")


async def next_change(tx: Transaction, tenant: str, now: datetime, epoch: str | None) -> Change:
    """Lock the user's counter and return the next change number.

    ``epoch`` is that of the database, None if it is unknown. In a new one a branch starts.
    """
    branch = _new_branch()
    values = {"tenant": tenant, "now": now, "epoch": _digest(epoch), "branch": branch}
    row = await tx.fetch_one(_sql()["next_change"], values)
    assert row is not None  # noqa: S101 - an upsert returns its row
    if row["branch"] == branch:
        start = {"tenant": tenant, "start": row["seq"] - 1, "branch": branch}
        await tx.execute(_sql()["add_branch"], start)
    return Change(row["seq"], _instant(row["changed_at"]))


async def add_next(
    tx: Transaction,
    tenant: str,
    kind: Kind,
    *,
    item_id: str,
    document: str,
    now: datetime,
    epoch: str | None,
    occurred_at: datetime | None,
    references: Sequence[tuple[str, Kind, str]] = (),
) -> Item | str:
    """Lock the user's counter and insert a document, on PostgreSQL.

    Returns the name of the first field that refers to a document that does not exist, if one does.
    """
    values = {
        "tenant": tenant,
        "kind": kind,
        "id": item_id,
        "document": document,
        "now": now,
        "occurred_at": occurred_at,
        "epoch": _digest(epoch),
        "branch": _new_branch(),
    }
    if references:
        values["kinds"] = [of_kind for _, of_kind, _ in references]
        values["ids"] = [_known_id(referred) for _, _, referred in references]
    row = await tx.fetch_one(_sql()["add_next_referring" if references else "add_next"], values)
    assert row is not None  # noqa: S101 - a function returns a row
    if references and row["missing"] is not None:
        missing: int = row["missing"]
        return references[missing - 1][0]
    at = _instant(row["change_at"])
    return Item(
        item_id, 1, document, row["change_seq"], at, at, occurred_at or at, is_deleted=False
    )


async def begin_change(
    tx: Transaction, tenant: str, kind: Kind, item_id: str, *, now: datetime, epoch: str | None
) -> tuple[Change, Item | None]:
    """Lock the user's counter and return the next change and a document, on PostgreSQL."""
    values = {
        "tenant": tenant,
        "kind": kind,
        "id": _known_id(item_id),
        "now": now,
        "epoch": _digest(epoch),
        "branch": _new_branch(),
    }
    row = await tx.fetch_one(_sql()["begin_change"], values)
    assert row is not None  # noqa: S101 - a function returns a row
    change = Change(row["change_seq"], _instant(row["change_at"]))
    return change, None if row["id"] is None else _not_deleted(row)


async def find(tx: Transaction, tenant: str, kind: Kind, item_id: str) -> Item | None:
    """Return a document that is not deleted, inside a transaction."""
    if _ID.fullmatch(item_id) is None:
        return None
    row = await tx.fetch_one(_sql()["find"], {"tenant": tenant, "kind": kind, "id": item_id})
    return _not_deleted(row)


async def find_in(store: Store, tenant: str, kind: Kind, item_id: str) -> Item | None:
    """Return a document that is not deleted, outside any transaction."""
    if _ID.fullmatch(item_id) is None:
        return None
    rows = await store.read(_sql()["find"], {"tenant": tenant, "kind": kind, "id": item_id})
    return _not_deleted(rows[0] if rows else None)


async def add(
    tx: Transaction,
    tenant: str,
    kind: Kind,
    *,
    item_id: str,
    document: str,
    at: Change,
    occurred_at: datetime | None = None,
) -> Item:
    """Insert a document. ``occurred_at`` is the change's time by default."""
    occurred_at = occurred_at or at.at
    await tx.execute(
        _sql()["add"],
        {
            "tenant": tenant,
            "kind": kind,
            "id": item_id,
            "document": document,
            "seq": at.seq,
            "now": at.at,
            "occurred_at": occurred_at,
        },
    )
    return Item(item_id, 1, document, at.seq, at.at, at.at, occurred_at, is_deleted=False)


async def change(
    tx: Transaction, tenant: str, kind: Kind, *, item: Item, document: str, at: Change
) -> Item:
    """Save the next version of a document."""
    await tx.execute(
        _sql()["change"],
        {
            "tenant": tenant,
            "kind": kind,
            "id": item.id,
            "document": document,
            "version": item.version + 1,
            "seq": at.seq,
            "now": at.at,
        },
    )
    return item._replace(version=item.version + 1, document=document, seq=at.seq, updated_at=at.at)


async def remove(tx: Transaction, tenant: str, kind: Kind, item: Item, at: Change) -> None:
    """Replace a document by a tombstone."""
    await tx.execute(
        _sql()["remove"],
        {
            "tenant": tenant,
            "kind": kind,
            "id": item.id,
            "version": item.version + 1,
            "seq": at.seq,
            "now": at.at,
        },
    )


class Page(NamedTuple):
    """Some entries of a list, as JSON texts, and whether there are more."""

    texts: list[str]
    last_seq: int
    has_more: bool


async def list_page(
    store: Store,
    tenant: str,
    kind: Kind,
    *,
    after: int,
    since: datetime | None,
    limit: int,
    max_bytes: int,
) -> Page:
    """Return documents by last change; with ``since``, tombstones of deleted ones too.

    A page has at least one document if there is one, and ends before ``max_bytes`` are exceeded. A
    few documents are read first: all of a page may be large.
    """
    values: dict[str, Any] = {"tenant": tenant, "kind": kind, "since": since}
    if since is None:
        del values["since"]
    sql = _sql()["list" if since is None else "list_changes"]
    texts: list[str] = []
    size, last_seq, count = 0, after, _FIRST_READ
    while True:
        # One more than fits, to know whether there are more.
        count = min(count, limit + 1 - len(texts))
        rows = await store.read(sql, values | {"after": last_seq, "limit": count})
        for row in rows:
            item = _item(row)
            text = item.as_text()
            size += len(text) if text.isascii() else len(text.encode())
            if texts and (size > max_bytes or len(texts) == limit):
                return Page(texts, last_seq, has_more=True)
            texts.append(text)
            last_seq = item.seq
        if len(rows) < count:
            return Page(texts, last_seq, has_more=False)
        # As many as the rest of the page has space for, if the others are like these.
        count = max(_FIRST_READ, (max_bytes - size) * len(texts) // max(size, 1))


async def list_changes(
    store: Store, tenant: str, *, after: int, limit: int, most_bytes: int
) -> ChangePage:
    """Return documents and tombstones of all kinds changed after a number, in order of commits.

    At most ``limit``; fewer if they exceed ``most_bytes``, at least one if there are any.
    """
    values = {"tenant": tenant, "after": after, "limit": limit, "most_bytes": most_bytes}
    rows = await store.read(_sql()["changes"], values)
    if not rows:
        return ChangePage((), 0, None)
    items = [(row["kind"], _item(row)) for row in rows if row["seq"] is not None]
    return ChangePage(items, rows[0]["last_seq"], rows[0]["branch"])


async def list_branches(store: Store, tenant: str) -> Sequence[tuple[int, str]]:
    """Return start and name of each branch of a user's history, oldest first."""
    rows = await store.read(_sql()["branches"], {"tenant": tenant})
    return [(row["start"], row["branch"]) for row in rows]


def _new_branch() -> str:
    """Return a random name of a branch, in case that one begins: 12 hexadecimal digits."""
    return new_request_id()[:12]


def _known_id(item_id: str) -> str:
    """Return an id, or one that no document has in place of text that is not looked up."""
    return item_id if _ID.fullmatch(item_id) else ""


@lru_cache(maxsize=16)
def _digest(epoch: str | None) -> str:
    """Return a short digest: an epoch names details of the database server."""
    return "" if epoch is None else hashlib.blake2b(epoch.encode(), digest_size=8).hexdigest()


def _not_deleted(row: Row | None) -> Item | None:
    return None if row is None or row["deleted_at"] is not None else _item(row)


def _item(row: Row) -> Item:
    occurred_at = row["occurred_at"]
    return Item(
        row["id"],
        row["version"],
        row["document"],
        row["seq"],
        _instant(row["created_at"]),
        _instant(row["updated_at"]),
        _instant(row["created_at"] if occurred_at is None else occurred_at),
        row["deleted_at"] is not None,
    )


def _instant(value: Any) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value).astimezone(UTC)
