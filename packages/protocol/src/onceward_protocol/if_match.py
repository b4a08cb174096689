"""``If-Match`` among the headers of a request: the version that an edit is based on. Pure."""

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["ANY_TAG", "as_tag", "if_match_in", "is_weak", "without_if_match"]

_WEAK: Final = re.compile(r'(?:^|,)\s*W/"', re.IGNORECASE)

ANY_TAG: Final = "*"
"""Any version that the server has: no check."""


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
