"""Migration of queued payloads to a new format, when the app is upgraded.

Entries that were never sent keep their key. Those that were sent and got a response get a new one,
because the server may know the old one with the old payload. Those sent without a response stay as
they are: only the same key and body can find out their outcome; they are migrated at a later
opening.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.core.outbox_entry import Entry, Reason, Status
from holdfast.errors import EntryInvalidError
from holdfast.ids import new_uuid4
from holdfast.outbox.dependencies import park_dependents
from holdfast.outbox.events import EventKind
from holdfast.outbox.sql import json_text
from holdfast.outbox.transaction import Transaction
from holdfast.outbox.validation import Request, check_request

__all__ = ["PayloadMigration", "Rewrite", "migrate_payloads"]

_BATCH: Final = 200


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """The new request of an entry. What is left out stays."""

    payload: Any = UNSET
    endpoint: str | UnsetType = UNSET
    headers: Mapping[str, str] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class PayloadMigration:
    """The app's format, and a function that migrates an older entry to it.

    ``migrate`` gets each entry whose ``payload_version`` is lower. If it raises, that entry becomes
    ``failed`` with reason ``migration``; the others are migrated.
    """

    version: int
    migrate: Callable[[Entry], Rewrite]
    max_payload_bytes: int = 1_048_576


def migrate_payloads(
    write: Callable[[str], AbstractContextManager[Transaction]], migration: PayloadMigration
) -> int:
    """Migrate all older entries; returns how many were read.

    Works in small transactions, and continues where it was interrupted.
    """
    count, after, more = 0, 0, True
    while more:
        with write("migrate_payloads") as tx:
            page = tx.entries(
                "outdated_payloads", after=after, version=migration.version, limit=_BATCH
            )
            for entry in page:
                _migrate(tx, entry, migration)
            if page:
                after = tx.rows("rowid_of", id=page[-1].id)[0][0]
            count += len(page)
            more = len(page) == _BATCH
    return count


def _migrate(tx: Transaction, entry: Entry, migration: PayloadMigration) -> None:
    try:
        rewrite = migration.migrate(entry)
        payload = rewrite.payload
        if payload is UNSET:
            payload = None if entry.payload is None else entry.payload.encode()
        request = check_request(
            tx.profiles.get(entry.profile),
            entry.endpoint if rewrite.endpoint is UNSET else rewrite.endpoint,
            payload,
            entry.headers if rewrite.headers is UNSET else rewrite.headers,
            migration.max_payload_bytes,
        )
        _check_references(request, entry)
    except Exception as error:  # noqa: BLE001 - the app's own code may raise anything
        _park(tx, entry, f"{type(error).__name__}: {error}")
        return
    tx.rows(
        "migrated_payload",
        id=entry.id,
        payload=request.payload,
        headers=json_text(request.headers),
        endpoint=request.endpoint,
        key=entry.idempotency_key if entry.claim_number == 0 else new_uuid4(),
        local_refs=json_text(entry.local_refs),
        version=migration.version,
    )


def _check_references(request: Request, entry: Entry) -> None:
    if request.refers_to.placeholders - set(entry.local_refs):
        raise EntryInvalidError(
            "dependency_ids_must_exist_in_queue",
            "a migrated payload cannot refer to other local ids than before",
        )


def _park(tx: Transaction, entry: Entry, error: str) -> None:
    if entry.status is Status.PENDING:
        parked = tx.changed("park", id=entry.id, reason=Reason.MIGRATION.value, error=error)
        tx.emit(EventKind.FAILED, parked)
        park_dependents(tx, parked)
