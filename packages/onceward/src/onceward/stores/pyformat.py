"""Convert numbered parameters (``$1``) to the ones of DB-API drivers (``%(p1)s``)."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

__all__ = ["to_pyformat"]

# Strings, quoted names, comments and dollar quotes keep their text; the last group is a parameter.
_TOKEN: Final = re.compile(
    r"(?<!\w)[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/"
    r"|\$(?P<tag>[A-Za-z_]\w*|)\$.*?\$(?P=tag)\$|%|\$(?P<number>\d+)",
    re.DOTALL,
)


@lru_cache(maxsize=2048)
def _convert(sql: str) -> str:
    def replace(match: re.Match[str]) -> str:
        number = match.group("number")
        # Drivers look for "%" everywhere, in strings too.
        return f"%(p{number})s" if number else match.group(0).replace("%", "%%")

    return _TOKEN.sub(replace, sql)


def to_pyformat(sql: str, values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Return a statement with ``$1`` and its values as ``cursor.execute`` takes them."""
    return _convert(sql), {f"p{number}": value for number, value in enumerate(values, 1)}
