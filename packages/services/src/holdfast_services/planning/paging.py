"""Pages by key: a cursor is the last id seen, in a spelling that nobody is tempted to read."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from fastapi import Query

from holdfast.errors import BodyInvalidError
from holdfast.ports import Row
from holdfast_services.planning.model import row_view

__all__ = ["After", "Limit", "Listed", "page", "read_cursor"]

# What is listed: a cursor of one list means nothing in another.
Listed = Literal["projects", "missions", "assignments", "audit"]

_MARKS: Final[dict[Listed, bytes]] = {
    "projects": b"p",
    "missions": b"m",
    "assignments": b"a",
    "audit": b"e",
}
_CURSOR_CHARS: Final = 23
_MOST: Final = 200

Limit = Annotated[int, Query(ge=1, le=_MOST, description="How many at most.")]
After = Annotated[
    str | None, Query(max_length=100, description="`next` of the page before; opaque.")
]


def page(rows: Sequence[Row], limit: int, listed: Listed) -> dict[str, Any]:
    """Return a page of rows, of which one more than the limit was asked for."""
    kept = rows[:limit]
    more = len(rows) > limit
    return {
        "items": [row_view(row) for row in kept],
        "next": _write_cursor(kept[-1]["id"], listed) if more else None,
    }


def read_cursor(text: str | None, listed: Listed) -> str | None:
    """Return the id a page begins behind. Raises the caller's error for what was never given."""
    if text is None:
        return None
    if len(text) == _CURSOR_CHARS and text.isascii():
        try:
            raw = urlsafe_b64decode(text + "=")
        except ValueError:
            raw = b""
        if raw[:1] == _MARKS[listed]:
            last = str(UUID(bytes=raw[1:]))
            if _write_cursor(last, listed) == text:  # Base64 has several spellings of some bytes
                return last
    raise BodyInvalidError("after should be what next of another page of this list was")


def _write_cursor(last: str, listed: Listed) -> str:
    return urlsafe_b64encode(_MARKS[listed] + UUID(last).bytes).decode("ascii").rstrip("=")
