"""What field documents look like on the wire. The app's own fields are its own business."""

import json
from datetime import datetime
from typing import Any, Final, Literal

from holdfast.core.canonical_json import MAX_DEPTH
from holdfast.errors import BodyInvalidError, BodyTooLargeError, FieldNotAllowedError

__all__ = [
    "KINDS",
    "OURS_BYTES",
    "REFERENCES",
    "Kind",
    "check_size",
    "merged",
    "own_fields",
    "references",
    "shown",
    "written",
]

Kind = Literal["activities", "contacts", "expenses"]
KINDS: Final[tuple[Kind, ...]] = ("activities", "contacts", "expenses")

# Ours to give. A device that sends back what it once read may repeat them; they change nothing.
_GIVEN: Final = frozenset({"id", "version", "created_at", "updated_at", "deleted"})

# What they add to an answer, with the largest version there can be: 180 bytes, and some to spare.
OURS_BYTES: Final = 256

# Which fields name another document of the same user, and of which kind.
REFERENCES: Final[dict[Kind, dict[str, Kind]]] = {
    "activities": {},
    "contacts": {},
    "expenses": {"activity_id": "activities", "contact_id": "contacts"},
}


def own_fields(body: Any) -> dict[str, Any]:
    """Return the app's part of a body. Raises the caller's error for anything but an object."""
    if not isinstance(body, dict):
        raise BodyInvalidError("the body should be a JSON object")
    return {name: value for name, value in body.items() if name not in _GIVEN}


def written(document: dict[str, Any]) -> str:
    """Return a document as it is kept and as it is answered: so its size is the same in both."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def check_size(fields: dict[str, Any], most_bytes: int) -> None:
    """Refuse a document that could not be answered with, before it is kept.

    It may outgrow the body it came in: by a merge, or as ``1e9`` is written ``1000000000.0``.
    """
    size = len(written(fields).encode())
    if size > most_bytes:
        raise BodyTooLargeError(
            f"the document would have {size} bytes; it may have at most {most_bytes}",
            details={"documentBytes": size, "mostBytes": most_bytes},
        )


def merged(old: dict[str, Any], patch: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """Merge as RFC 7396 says: null removes a field, an object is merged, all else replaces."""
    if depth > MAX_DEPTH:
        raise BodyInvalidError("the body is nested too deeply")
    result = dict(old)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            before = result.get(name)
            result[name] = merged(before if isinstance(before, dict) else {}, value, depth + 1)
        else:
            result[name] = value
    return result


def references(kind: Kind, fields: dict[str, Any]) -> list[tuple[str, Kind, str]]:
    """Return which documents are named: field, kind and id. Null names none."""
    found = []
    for field, of_kind in REFERENCES[kind].items():
        value = fields.get(field)
        if value is None:
            continue
        if not isinstance(value, str):
            raise FieldNotAllowedError(f"{field} should be the id of one of your {of_kind}")
        found.append((field, of_kind, value))
    return found


def shown(
    *,
    document_id: str,
    version: int,
    fields: dict[str, Any],
    created_at: datetime,
    updated_at: datetime,
    deleted: bool = False,
) -> dict[str, Any]:
    """Return a document as it is answered; of a deleted one only the mark."""
    ours = {
        "id": document_id,
        "version": version,
        "created_at": _instant(created_at),
        "updated_at": _instant(updated_at),
    }
    return ours | {"deleted": True} if deleted else fields | ours


def _instant(at: datetime) -> str:
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")
