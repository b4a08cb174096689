"""Optimistic locking: which version a write was made against, and whether it still holds. Pure.

Put it on any aggregate that has a ``version`` column::

    expected = expected_version(if_match=request.headers.getlist("if-match"), in_body=None)
    changed = await tx.execute(
        "UPDATE tasks SET …, version = version + 1 WHERE id = :id AND version = :version", …
    )

The check and the write have to be one step: either the row is locked and ``check_version`` decides,
or ``WHERE version = …`` does and no changed row means a mismatch. The first valid write wins.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from holdfast.errors import BodyInvalidError, VersionMismatchError, VersionRequiredError

__all__ = ["ANY_VERSION", "AnyVersion", "Expected", "check_version", "etag", "expected_version"]

# An entity tag of RFC 9110: quoted, visible characters without a quote.
_TAG: Final = re.compile(r'\s*"([\x21\x23-\x7e\x80-\xff]*)"\s*')
_OURS: Final = re.compile(r"[1-9][0-9]{0,18}")
_MOST: Final = 2**63 - 1
_LONGEST_HEADER: Final = 1000


class AnyVersion(msgspec.Struct, frozen=True):
    """``If-Match: *``: whatever the version is now, as long as there is one. A forced write."""


ANY_VERSION: Final = AnyVersion()

# The versions a write may meet. Empty: tags that no version of ours has, so it can meet none.
Expected = AnyVersion | frozenset[int]


def etag(version: int) -> str:
    """Return the strong entity tag of a version."""
    return f'"{version}"'


def expected_version(
    *, if_match: Sequence[str] = (), in_body: Any = None, allow_any: bool = False
) -> Expected:
    """Read which version the caller has seen, from ``If-Match`` or from the body's ``version``.

    Raises ``VersionRequiredError`` where neither says so, ``BodyInvalidError`` where they cannot be
    read or contradict each other. ``*`` counts as a version only where ``allow_any`` says so.
    """
    by_header = _read_if_match(if_match)
    by_body = None if in_body is None else _read_body(in_body)
    if by_header is None and by_body is None:
        raise VersionRequiredError(
            "say which version this was made against: If-Match with the ETag, or version"
        )
    if by_header is not None and by_body is not None and by_header != by_body:
        raise BodyInvalidError("If-Match and version name different versions")
    expected = by_header if by_header is not None else by_body
    assert expected is not None  # noqa: S101 - one of the two is there
    if isinstance(expected, AnyVersion) and not allow_any:
        raise VersionRequiredError("this write needs the version it was made against, not *")
    return expected


def check_version(expected: Expected, current: int) -> None:
    """Raise ``VersionMismatchError`` unless the aggregate is where the caller saw it."""
    if not isinstance(expected, AnyVersion) and current not in expected:
        raise VersionMismatchError(
            f"it has moved on: the current version is {current}",
            details={
                "currentVersion": current,
                "expectedVersion": min(expected) if expected else None,
            },
        )


def _read_if_match(values: Sequence[str]) -> Expected | None:
    if not values:
        return None
    if len(set(values)) > 1:
        raise BodyInvalidError("there are two different If-Match headers")
    text = values[0].strip()
    if text == "*":
        return ANY_VERSION
    if not text or len(text) > _LONGEST_HEADER:
        raise BodyInvalidError("If-Match is empty or too long")
    found = set()
    for part in text.split(","):
        if part.strip().startswith("W/"):
            raise BodyInvalidError("If-Match takes strong tags only, as ETag gives them")
        match = _TAG.fullmatch(part)
        if match is None:
            raise BodyInvalidError('If-Match should be a quoted tag such as "7"')
        # A tag that is no version of ours is lawful; it can only never match.
        if _OURS.fullmatch(match[1]) and int(match[1]) <= _MOST:
            found.add(int(match[1]))
    return frozenset(found)


def _read_body(value: Any) -> Expected:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BodyInvalidError("version should be a whole number")
    return frozenset({value} if 1 <= value <= _MOST else ())
