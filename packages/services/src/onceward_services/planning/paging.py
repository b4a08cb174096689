"""Keyset pagination: a cursor is the encoded id of the last item of a page."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from fastapi import Query

from onceward.errors import BodyInvalidError
from onceward.ports import Row
from onceward_services.planning.model import row_view

__all__ = ["After", "Limit", "Listed", "page", "read_cursor"]

# A cursor of one list is invalid in another.
Listed = Literal[
    "projects",
    "archived projects",
    "missions",
    "assignments",
    "own assignments",
    "audit",
    "webhooks",
    "deliveries",
]

_PREFIXES: Final[dict[Listed, bytes]] = {
    "projects": b"p",
    "archived projects": b"q",
    "missions": b"m",
    "assignments": b"a",
    "own assignments": b"o",
    "audit": b"e",
    "webhooks": b"w",
    "deliveries": b"d",
}
_CURSOR_CHARS: Final = 23
_MAX_LIMIT: Final = 200

Limit = Annotated[int, Query(ge=1, le=_MAX_LIMIT, description="Maximum number of items.")]
After = Annotated[
    str | None, Query(max_length=100, description="`next` of the previous page; opaque.")
]


def page(
    rows: Sequence[Row],
    limit: int,
    listed: Listed,
    view: Callable[[Row], dict[str, Any]] = row_view,
) -> dict[str, Any]:
    """Return a page from up to ``limit`` + 1 rows; the extra row means that there are more."""
    items = rows[:limit]
    more = len(rows) > limit
    return {
        "items": [view(row) for row in items],
        "next": _write_cursor(items[-1]["id"], listed) if more else None,
    }


def read_cursor(text: str | None, listed: Listed) -> str | None:
    """Return the id after which a page begins; raises ``BodyInvalidError`` for other text."""
    if text is None:
        return None
    if len(text) == _CURSOR_CHARS and text.isascii():
        try:
            raw = urlsafe_b64decode(text + "=")
        except ValueError:
            raw = b""
        if raw[:1] == _PREFIXES[listed]:
            last = str(UUID(bytes=raw[1:]))
            if _write_cursor(last, listed) == text:  # Base64 has several encodings of some bytes
                return last
    raise BodyInvalidError("after should be the `next` of another page of this list")


def _write_cursor(last: str, listed: Listed) -> str:
    return urlsafe_b64encode(_PREFIXES[listed] + UUID(last).bytes).decode("ascii").rstrip("=")
