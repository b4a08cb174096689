"""Optimistic locking for any aggregate: the first valid write wins, in one step. See `core`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from holdfast.core.versions import AnyVersion, check_version, expected_version
from holdfast.errors import NotFoundError, RequestError
from holdfast.ports import Row

__all__ = ["Current", "Write", "update_with_version"]

# Looks at the row as it is now: a mapping with its ``version``, or None where there is none.
Current = Callable[[], Awaitable[Row | None]]
# Writes over the row if it has this version, and returns it as it is then; None where it has not.
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
    """Write over the version the caller has seen, and return the row as it is then.

    ``write`` checks and writes in one statement (``UPDATE … WHERE version = …``); only where it
    finds nothing is the row looked at, to tell gone (404) from moved on (409). ``if_match`` are all
    values of that header, ``in_body`` the body's ``version``; with neither it is 428.
    """
    try:
        expected = expected_version(if_match=if_match, in_body=in_body, allow_any=allow_any)
    except RequestError:
        # What is not there is not there, with a version and without.
        await _still_there(current, what)
        raise
    version = None
    if not isinstance(expected, AnyVersion) and len(expected) == 1:
        (version,) = expected
    while True:
        if version is not None:
            row = await write(version)
            if row is not None:
                return row
        row = await _still_there(current, what)
        check_version(expected, row["version"])
        # Any version, one of several, or one that was reached only just now: again, with that.
        version = row["version"]


async def _still_there(current: Current, what: str) -> Row:
    row = await current()
    if row is None:
        raise NotFoundError(f"there is no such {what}")
    return row
