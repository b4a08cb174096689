"""The first valid write wins: one step that checks the version and writes, or an error."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request

from holdfast.core.versions import AnyVersion, Expected, check_version, expected_version
from holdfast.errors import NotFoundError, RequestError
from holdfast.ports import Row

__all__ = ["Current", "Write", "write_over"]

Current = Callable[[], Awaitable[Row | None]]
Write = Callable[[int], Awaitable[Row | None]]


async def write_over(
    request: Request, in_body: Any, what: str, *, current: Current, write: Write
) -> Row:
    """Write over the version the caller has seen, and return the row as it is then.

    ``write`` takes a version and returns None where the row does not have it: the check and the
    write are one statement. Only then is the row looked at, to tell gone from moved on.
    """
    try:
        expected: Expected = expected_version(
            if_match=request.headers.getlist("if-match"), in_body=in_body
        )
    except RequestError:
        # What is not there is not there, with a version and without.
        await _still_there(current, what)
        raise
    assert not isinstance(expected, AnyVersion)  # noqa: S101 - not without being allowed
    version = next(iter(expected)) if len(expected) == 1 else None
    while True:
        if version is not None:
            row = await write(version)
            if row is not None:
                return row
        row = await _still_there(current, what)
        check_version(expected, row["version"])
        # One of several tags, or a version that was reached only just now: once more, with that.
        version = row["version"]


async def _still_there(current: Current, what: str) -> Row:
    row = await current()
    if row is None:
        raise NotFoundError(f"there is no such {what}")
    return row
