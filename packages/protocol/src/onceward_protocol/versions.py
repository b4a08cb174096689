"""Optimistic locking: the version a request is based on, and whether it is still current.

For any row that has a ``version`` column::

    expected = expected_version(if_match=request.headers.getlist("if-match"), in_body=None)
    changed = await tx.execute(
        "UPDATE tasks SET …, version = version + 1 WHERE id = :id AND version = :version", …
    )

The check and the write have to be atomic: either lock the row and call ``check_version``, or use
``WHERE version = …``, where no changed row means a mismatch. The first valid write wins.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from onceward_protocol.errors import BodyInvalidError, VersionMismatchError, VersionRequiredError

__all__ = [
    "ANY_TAG",
    "ANY_VERSION",
    "AnyVersion",
    "Expected",
    "as_tag",
    "check_version",
    "etag",
    "expected_version",
    "if_match_in",
    "is_weak",
    "without_if_match",
]

# An entity tag of RFC 9110: quoted, visible characters without a quote.
_TAG: Final = re.compile(r'\s*"([\x21\x23-\x7e\x80-\xff]*)"\s*')
_WEAK: Final = re.compile(r'(?:^|,)\s*W/"', re.IGNORECASE)
_VERSION: Final = re.compile(r"[1-9][0-9]{0,18}")
_MAX: Final = 2**63 - 1
_MAX_HEADER_CHARS: Final = 1000

ANY_TAG: Final = "*"
"""``If-Match: *``: any version that the server has, so that nothing is checked."""


class AnyVersion(msgspec.Struct, frozen=True):
    """``If-Match: *``: any version, as long as the resource exists. A forced write."""


# Matches every version, as ``If-Match: *`` does.
ANY_VERSION: Final = AnyVersion()

# The versions that match. Empty: the tags are none of ours, so no version matches.
Expected = AnyVersion | frozenset[int]


def etag(version: int) -> str:
    """Return the strong entity tag of a version."""
    return f'"{version}"'


def expected_version(
    *, if_match: Sequence[str] = (), in_body: Any = None, allow_any: bool = False
) -> Expected:
    """Return the version the caller has seen, from ``If-Match`` or the body's ``version``.

    Raises ``VersionRequiredError`` if both are missing, ``BodyInvalidError`` if they are malformed
    or differ. ``*`` is accepted only with ``allow_any``.
    """
    by_header = _read_if_match(if_match)
    by_body = None if in_body is None else _read_body(in_body)
    if by_header is None and by_body is None:
        raise VersionRequiredError(
            "name the version this is based on: If-Match with the ETag, or version in the body"
        )
    if by_header is not None and by_body is not None and by_header != by_body:
        raise BodyInvalidError("If-Match and version name different versions")
    expected = by_header if by_header is not None else by_body
    assert expected is not None  # noqa: S101 - one of the two is there
    if isinstance(expected, AnyVersion) and not allow_any:
        raise VersionRequiredError("this operation needs the version it is based on, not *")
    return expected


def check_version(expected: Expected, current: int) -> None:
    """Raise ``VersionMismatchError`` unless the current version is an expected one."""
    if not isinstance(expected, AnyVersion) and current not in expected:
        raise VersionMismatchError(
            f"the resource has changed: its current version is {current}",
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
    if text == ANY_TAG:
        return ANY_VERSION
    if not text or len(text) > _MAX_HEADER_CHARS:
        raise BodyInvalidError("If-Match is empty or too long")
    found = set()
    for part in text.split(","):
        if part.strip().startswith("W/"):
            raise BodyInvalidError("If-Match must be a strong tag, as sent in ETag")
        match = _TAG.fullmatch(part)
        if match is None:
            raise BodyInvalidError('If-Match must be a quoted tag such as "7"')
        # A tag that is none of our versions is valid, but never matches.
        if _VERSION.fullmatch(match[1]) and int(match[1]) <= _MAX:
            found.add(int(match[1]))
    return frozenset(found)


def _read_body(value: Any) -> Expected:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BodyInvalidError("version must be an integer")
    return frozenset({value} if 1 <= value <= _MAX else ())


# -- the headers of a client -------------------------------------------------------------------


def is_weak(version: str) -> bool:
    """Return whether a tag, or one of a list of tags, is weak: ``If-Match`` never matches it."""
    return _WEAK.search(version) is not None


def as_tag(version: str) -> str | None:
    """Return a version as ``If-Match`` takes it: ``3`` becomes ``"3"``. None for a weak tag."""
    if is_weak(version):
        return None
    return version if version.startswith('"') or version == ANY_TAG else f'"{version}"'


def if_match_in(headers: Mapping[str, str]) -> str | None:
    """Return the tag in ``If-Match``; None without the header, or if it is weak."""
    for name, value in headers.items():
        if name.lower() == "if-match":
            return as_tag(value)
    return None


def without_if_match(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the other headers."""
    return {name: value for name, value in headers.items() if name.lower() != "if-match"}
