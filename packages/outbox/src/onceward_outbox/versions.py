"""Versions of entities: what responses say about them, and what follows for the device's edits.

An edit is sent with ``If-Match``: the version it was made on, its base. If this device has changed
the entity since, the base is followed along its own successes, each from the version sent to the
version produced. So a person's edits do not conflict with each other, and a write of another client
in between breaks the chain: the server responds with a conflict.
"""

from typing import Any, Final

import msgspec

from onceward_outbox.entry import Claimed, Entry, json_text
from onceward_outbox.transaction import Transaction
from onceward_outbox.transport import Response
from onceward_protocol.operation import Operation
from onceward_protocol.versions import ANY_TAG

_UNKNOWN: Final = ""
_MAX_BODY_BYTES: Final = 256 * 1024
"""Larger entities are not kept as a base: a conflict about them is left to a person."""


class Produced(msgspec.Struct, frozen=True):
    """The entity's version and body, by the response to a success."""

    # As ``If-Match`` takes it; None if the response names none.
    version: str | None = None
    # The entity as a JSON text; None if the response does not contain it.
    body: str | None = None


def version_of(response: Response) -> str | None:
    """Return the version of an entity as ``If-Match`` takes it, from its ETag or its body."""
    tag = response.headers.get("etag")
    if tag is not None and not tag.startswith("W/"):  # a weak tag does not identify a version
        return tag
    body = response.json()
    return _tag(body.get("version")) if isinstance(body, dict) else None


def current_version(refusal: Response) -> str | None:
    """Return the version that ``concurrency.version_mismatch`` names in its details."""
    body = refusal.json()
    details = body.get("details") if isinstance(body, dict) else None
    return _tag(details.get("currentVersion")) if isinstance(details, dict) else None


def produced_by(response: Response) -> Produced:
    """Return the facts of a successful response about the entity."""
    version = version_of(response)
    if version is None:
        return Produced()
    body = response.body
    is_object = isinstance(response.json(), dict) and len(body) <= _MAX_BODY_BYTES
    return Produced(version, body.decode() if is_object else None)


def follow(behind: Claimed, done: Claimed, produced: Produced) -> Claimed:
    """Return a claimed entry with its version after an earlier entry of the drain succeeded."""
    if not is_next_of(behind, done):
        return behind
    if done.entry.operation is Operation.DELETE:
        produced = Produced()
    return msgspec.structs.replace(behind, version=produced.version, base=produced.body)


def is_next_of(behind: Claimed, done: Claimed) -> bool:
    """Return whether an edit is sent with the version that an earlier entry produces."""
    entry = behind.entry
    return (
        entry.entity is not None
        and entry.entity == _entity_of(done.entry)
        and entry.sent_version is None
        and behind.version in (done.version, None)
    )


def _entity_of(entry: Entry) -> str | None:
    """Return the entity that an entry creates or changes."""
    if entry.operation is not Operation.CREATE:
        return entry.entity
    made = entry.local_id or entry.server_id
    return None if made is None else f"{entry.entity_type}/{made}"


def record_success(tx: Transaction, claimed: Claimed, entry: Entry, produced: Produced) -> None:
    """Store the version that a success produced; ``entry`` is as it is afterwards."""
    user_id, sent = entry.user_id, claimed.version
    if entry.operation is Operation.DELETE:
        # What is made there again has no version yet, and must not be checked against the old one.
        produced = Produced()
    entity = _entity_of(entry)
    # Nothing to store for a server without versions.
    if entity is None or (produced.version is None and sent is None):
        return
    chain = [version for version in (sent, produced.version) if version not in (None, ANY_TAG)]
    tx.rows(
        "saw_success",
        user_id=user_id,
        entity=entity,
        sent=sent,
        version=produced.version or _UNKNOWN,
        own=json_text(chain) or "[]",
        body=produced.body,
        ms=tx.ms,
    )


def record_read(tx: Transaction, entry: Entry, version: str | None) -> None:
    """Store a version of another client: the base of later edits."""
    if entry.entity is not None and version is not None:
        tx.rows(
            "saw_version", user_id=entry.user_id, entity=entry.entity, version=version, ms=tx.ms
        )


def record_adopted(tx: Transaction, entry: Entry) -> None:
    """Continue the device's chain with the server's side of a conflict that a person has seen.

    Edits queued behind the conflict are then based on it, and are not conflicts once more.
    """
    if entry.entity is None or entry.theirs_version is None:
        return
    sent = entry.sent_version or None
    chain = [version for version in (sent, entry.theirs_version) if version != ANY_TAG]
    tx.rows(
        "saw_success",
        user_id=entry.user_id,
        entity=entry.entity,
        sent=sent,
        version=entry.theirs_version,
        own=json_text([version for version in chain if version is not None]) or "[]",
        body=entry.theirs,
        ms=tx.ms,
    )


def base_later_edits_on(tx: Transaction, entry: Entry) -> None:
    """Make what the device had with a merged edit the base of the edits queued behind it.

    No person has seen the server's side yet, so each of them is checked against it; but none may
    conflict with this one.
    """
    base = None if entry.base is None else msgspec.json.decode(entry.base)
    mine = entry.decoded()
    if entry.entity is None or not isinstance(base, dict) or not isinstance(mine, dict):
        return
    local = mine if entry.operation is Operation.UPDATE else base | mine
    tx.rows(
        "base_later_edits",
        user_id=entry.user_id,
        entity=entry.entity,
        sequence_number=entry.sequence_number,
        theirs_version=entry.theirs_version,
        base=msgspec.json.encode(local).decode(),
    )


def _tag(version: Any) -> str | None:
    is_usable = isinstance(version, int | str) and not isinstance(version, bool)
    return f'"{version}"' if is_usable else None
