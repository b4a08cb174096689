"""Bringing queued payloads into a new format of the app's, when the app is upgraded.

What was never sent keeps its key. What was sent and answered gets a new one, because a server may
remember the old one with the old payload. What was sent without an answer stays as it is: only the
same key and body can find out what became of it; once that is known, the next opening takes it.
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
from holdfast.outbox.rows import json_text
from holdfast.outbox.unit import Unit
from holdfast.outbox.validation import Request, check_request

__all__ = ["PayloadMigration", "Rewrite", "migrate_payloads"]

_BATCH: Final = 200


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry is to send from now on. What is left out stays."""

    payload: Any = UNSET
    endpoint: str | UnsetType = UNSET
    headers: Mapping[str, str] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class PayloadMigration:
    """The app's format, and how to bring an older entry into it.

    ``migrate`` gets each entry whose ``payload_version`` is lower. If it raises, that entry is
    ``failed`` with reason ``migration`` and shown to a person; the others go on.
    """

    version: int
    migrate: Callable[[Entry], Rewrite]
    max_payload_bytes: int = 1_048_576


def migrate_payloads(
    write: Callable[[str], AbstractContextManager[Unit]], migration: PayloadMigration
) -> int:
    """Bring every entry that can be into the app's format; returns how many were looked at.

    Works in small transactions, and goes on where it was interrupted.
    """
    looked_at, after, more = 0, 0, True
    while more:
        with write("migrate_payloads") as unit:
            page = unit.entries(
                "outdated_payloads", after=after, version=migration.version, limit=_BATCH
            )
            for entry in page:
                _migrate(unit, entry, migration)
            if page:
                after = unit.rows("rowid_of", id=page[-1].id)[0][0]
            looked_at += len(page)
            more = len(page) == _BATCH
    return looked_at


def _migrate(unit: Unit, entry: Entry, migration: PayloadMigration) -> None:
    try:
        rewrite = migration.migrate(entry)
        payload = rewrite.payload
        if payload is UNSET:
            payload = None if entry.payload is None else entry.payload.encode()
        request = check_request(
            unit.profiles.get(entry.profile),
            entry.endpoint if rewrite.endpoint is UNSET else rewrite.endpoint,
            payload,
            entry.headers if rewrite.headers is UNSET else rewrite.headers,
            migration.max_payload_bytes,
        )
        _check_references(request, entry)
    except Exception as error:  # noqa: BLE001 - the app's own code may raise anything
        _park(unit, entry, f"{type(error).__name__}: {error}")
        return
    unit.rows(
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


def _park(unit: Unit, entry: Entry, error: str) -> None:
    if entry.status is Status.PENDING:
        parked = unit.changed("park", id=entry.id, reason=Reason.MIGRATION.value, error=error)
        unit.tell(EventKind.FAILED, parked)
        park_dependents(unit, parked)
