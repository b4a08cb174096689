"""JSON bodies that are expensive to read, each close to a given size."""

from typing import Final

__all__ = ["EXPENSIVE", "fill"]

# One element of an array each; the worst that were found, by what is slow about them.
EXPENSIVE: Final = {
    "whole doubles": b"1.0",
    "doubles near the largest": b"1e300",
    "doubles near the smallest": b"5e-324",
    "strings that look like numbers": b'1.0,"x.0,"',
    "deep arrays": b"[" * 100 + b"]" * 100,
    "long integers": b"9" * 4300,
    "escaped quotes": b'{"a\\\\u0022":1}',
}


def fill(element: bytes, size: int, *, field: str = "a") -> bytes:
    """Return an object of about ``size`` bytes: one field, an array of equal elements."""
    start, end = b'{"%s":[' % field.encode(), b"]}"
    count = max(1, (size - len(start) - len(end) + 1) // (len(element) + 1))
    return start + b",".join([element] * count) + end
