"""Optimistic locking for any row with a version: the first valid write wins."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from onceward.errors import NotFoundError, RequestError
from onceward.ports import Row
from onceward_protocol.versions import AnyVersion, check_version, expected_version

__all__ = ["Current", "Write", "update_with_version"]

# Reads the row: a mapping with its ``version``, or None if it does not exist.
Current = Callable[[], Awaitable[Row | None]]
# Updates the row if it has this version and returns the new row; None if it has another.
Write = Callable[[int], Awaitable[Row | None]]


async def update_with_version(
    *,
    current: Current,
    write: Write,
    if_match: Sequence[str] = (),
    in_body: Any = None,
    allow_any: bool = False,
    what: str = "resource",
) -> Row:
    """Update the version the caller has seen, and return the new row.

    ``write`` checks and updates in one statement (``UPDATE … WHERE version = …``). If it updates
    nothing, ``current`` is called to distinguish a missing row (404) from a newer version (409).
    ``if_match`` are all values of that header, ``in_body`` is the body's ``version``; without
    either it is 428.
    """
    try:
        expected = expected_version(if_match=if_match, in_body=in_body, allow_any=allow_any)
    except RequestError:
        # A missing row is 404, whatever is wrong with the version.
        await _existing(current, what)
        raise
    version = None
    if not isinstance(expected, AnyVersion) and len(expected) == 1:
        (version,) = expected
    while True:
        if version is not None:
            row = await write(version)
            if row is not None:
                return row
        row = await _existing(current, what)
        check_version(expected, row["version"])
        # Any version, one of several, or one written since: try again with the current one.
        version = row["version"]


async def _existing(current: Current, what: str) -> Row:
    row = await current()
    if row is None:
        raise NotFoundError(f"there is no such {what}")
    return row
