"""Documents of field: fields of the app, which are not interpreted, and fields of the server."""

from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from onceward.errors import BodyInvalidError, BodyTooLargeError, FieldNotAllowedError
from onceward_protocol.fingerprint import MAX_DEPTH, split_object

__all__ = [
    "KINDS",
    "REFERENCES",
    "SERVER_FIELDS_BYTES",
    "Kind",
    "app_fields",
    "check_size",
    "encode",
    "merge_patch",
    "references",
    "response_text",
    "server_fields",
]

Kind = Literal["activities", "contacts", "expenses"]
KINDS: Final[tuple[Kind, ...]] = ("activities", "contacts", "expenses")

# Set by the server. A device that sends back a document may include them; they are ignored.
_SERVER_FIELDS: Final = frozenset(
    {"id", "version", "occurred_at", "created_at", "updated_at", "deleted"}
)

_NULL: Final = msgspec.Raw(b"null")

# An upper bound of what they add to a response: 225 bytes with the largest version.
SERVER_FIELDS_BYTES: Final = 256

# The fields that refer to another document of the same user, and its kind.
REFERENCES: Final[dict[Kind, dict[str, Kind]]] = {
    "activities": {},
    "contacts": {},
    "expenses": {"activity_id": "activities", "contact_id": "contacts"},
}


def app_fields(body: Any) -> dict[str, Any]:
    """Return the app's fields of a body; raises ``BodyInvalidError`` unless it is an object."""
    if not isinstance(body, dict):
        raise BodyInvalidError("the body should be a JSON object")
    return {name: value for name, value in body.items() if name not in _SERVER_FIELDS}


def encode(document: dict[str, Any]) -> str:
    """Encode a document, with the same size in the database and in responses."""
    # Ten times faster than json.dumps for a document of many numbers: other requests wait for it.
    return msgspec.json.encode(document).decode()


def check_size(document: str, max_bytes: int) -> None:
    """Raise ``BodyTooLargeError`` for an encoded document that would not fit into a response.

    It may be larger than the body: by a merge, or because ``1e9`` is encoded as ``1000000000.0``.
    """
    size = len(document) if document.isascii() else len(document.encode())
    if size > max_bytes:
        raise BodyTooLargeError(
            f"the document would have {size} bytes; the maximum is {max_bytes}",
            details={"documentBytes": size, "mostBytes": max_bytes},
        )


def merge_patch(old: dict[str, Any], patch: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """Apply a JSON merge patch (RFC 7396): null removes a field, objects are merged."""
    if depth > MAX_DEPTH:
        raise BodyInvalidError("the body is nested too deeply")
    result = dict(old)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif (members := _members(value)) is not None:
            result[name] = merge_patch(_members(result.get(name)) or {}, members, depth + 1)
        else:
            result[name] = value
    return result


def _members(value: Any) -> dict[str, Any] | None:
    """Return the members of an object; None for another value.

    Those of a large object, which is still encoded, are only decoded as far as a merge needs it.
    """
    if isinstance(value, msgspec.Raw):
        members = split_object(bytes(value))
        if members is None:
            return None
        return {name: None if raw == _NULL else raw for name, raw in members.items()}
    return value if isinstance(value, dict) else None


def references(kind: Kind, fields: dict[str, Any]) -> list[tuple[str, Kind, str]]:
    """Return the referenced documents as field, kind and id."""
    found = []
    for field, of_kind in REFERENCES[kind].items():
        value = fields.get(field)
        if value is None:
            continue
        if not isinstance(value, str):
            raise FieldNotAllowedError(f"{field} should be the id of one of your {of_kind}")
        found.append((field, of_kind, value))
    return found


def response_text(document: str, server_fields: dict[str, Any]) -> str:
    """Return the encoded document with the server's fields at its end, without decoding it."""
    start = document[:-1] + "," if len(document) > len("{}") else "{"
    return start + encode(server_fields)[1:]


def server_fields(
    *,
    document_id: str,
    version: int,
    occurred_at: datetime,
    created_at: datetime,
    updated_at: datetime,
    deleted: bool = False,
) -> dict[str, Any]:
    """Return the fields of the server; a deleted document is a tombstone of only these."""
    # One instant where a document is new.
    created = _instant(created_at)
    fields = {
        "id": document_id,
        "version": version,
        "occurred_at": created if occurred_at is created_at else _instant(occurred_at),
        "created_at": created,
        "updated_at": created if updated_at is created_at else _instant(updated_at),
    }
    return fields | {"deleted": True} if deleted else fields


def _instant(at: datetime) -> str:
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")
