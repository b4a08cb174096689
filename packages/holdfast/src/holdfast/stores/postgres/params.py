"""Named parameters for asyncpg: ``:name`` becomes ``$1``, once per statement text."""

import re
from functools import lru_cache
from typing import Any

from holdfast.errors import UsageError
from holdfast.ports import Params

__all__ = ["positional"]

# Strings, quoted names, comments, dollar quotes and casts are passed over; the last group is ours.
_TOKEN = re.compile(
    r"(?<!\w)[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/"
    r"|\$(\w*)\$.*?\$\1\$|::|:([A-Za-z_]\w*)",
    re.DOTALL,
)
# What would end the transaction the record has to commit in. ROLLBACK TO a savepoint may pass.
_ENDS_TRANSACTION = re.compile(
    r"(?:\s|;|--[^\n]*\n|/\*.*?\*/)*"
    r"(?:BEGIN|START\s+TRANSACTION|COMMIT|END|PREPARE\s+TRANSACTION|(?:ROLLBACK|ABORT)(?!.*\bTO\b))\b",
    re.IGNORECASE | re.DOTALL,
)


@lru_cache(maxsize=2048)
def _compile(sql: str) -> tuple[str, tuple[str, ...]]:
    if _ENDS_TRANSACTION.match(sql):
        raise UsageError("the transaction is Holdfast's: it commits with the answer")
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        name = match.group(2)
        if name is None:
            return match.group(0)
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    return _TOKEN.sub(number, sql), tuple(names)


def positional(sql: str, params: Params) -> tuple[str, list[Any]]:
    """Return the statement with numbered parameters, and their values in order."""
    text, names = _compile(sql)
    if not names:
        return text, []
    given = params or {}
    try:
        return text, [given[name] for name in names]
    except KeyError as missing:
        raise UsageError(f"the statement needs :{missing.args[0]}, which was not given") from None
