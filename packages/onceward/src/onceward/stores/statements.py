"""Checks and conversions of a statement before a driver sees it.

Handlers that begin or end the transaction are refused: Onceward commits a handler's rows together
with the record. After a COMMIT of the handler its rows would stay without the record, so a retry
would write them again; after a ROLLBACK the record would stay without the rows.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from onceward.errors import UsageError
from onceward.ports import Params

TRANSACTION_CONTROL: Final = (
    "a handler must not begin or end the transaction: Onceward commits its rows together with the "
    "record. To undo a part, use a savepoint"
)

# The first word of a statement that begins with no comment in /* */.
_FIRST: Final = re.compile(r"(?:\s|--[^\n]*\n)*([^\W\d]\w*)")
# Strings, quoted names, dollar quotes and line comments; the start of a comment, which nests on
# PostgreSQL; words; the ends of statements.
_TOKEN: Final = re.compile(
    r"(?<!\w)[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`|--[^\n]*"
    r"|(?<!\w)\$(?P<tag>\w*)\$.*?\$(?P=tag)\$"
    r"|(?P<comment>/\*)|(?P<word>[^\W\d]\w*)|(?P<end>;)",
    re.DOTALL,
)
_COMMENT_EDGE: Final = re.compile(r"/\*|\*/")

_CONTROL: Final = frozenset({"BEGIN", "START", "COMMIT", "END", "ABORT"})
_SUSPECT: Final = _CONTROL | {"ROLLBACK", "PREPARE"}
# "ROLLBACK WORK TO SAVEPOINT a" undoes a part of the transaction.
_NOISE: Final = frozenset({"WORK", "TRANSACTION"})

# Longer texts are rare and different every time: they are not cached.
_CACHED_CHARACTERS: Final = 8192


def refuse_transaction_control(sql: str) -> None:
    """Raise ``UsageError`` if a statement of the text begins or ends the transaction."""
    if _controls_cached(sql) if len(sql) <= _CACHED_CHARACTERS else _controls_transaction(sql):
        raise UsageError(TRANSACTION_CONTROL)


def _controls_transaction(sql: str) -> bool:
    first = _FIRST.match(sql)
    if first is not None and first[1].upper() not in _SUSPECT and ";" not in sql:
        return False
    return any(map(_is_control, _statements(sql)))


_controls_cached = lru_cache(maxsize=2048)(_controls_transaction)


def _is_control(words: list[str]) -> bool:
    first = words[0]
    if first == "ROLLBACK":
        return next((word for word in words[1:] if word not in _NOISE), "") != "TO"
    return first in _CONTROL or words[:2] == ["PREPARE", "TRANSACTION"]


def _statements(sql: str) -> list[list[str]]:
    """Return the words of each statement, in capitals, without quoted text and comments.

    A body between BEGIN and END, of a function or of SQLite's triggers, belongs to its CREATE.
    """
    found: list[list[str]] = []
    words: list[str] = []
    has_body = False
    at = 0
    while (token := _TOKEN.search(sql, at)) is not None:
        at = token.end()
        if token["comment"]:
            at = _end_of_comment(sql, at)
        elif token["word"]:
            word = token["word"].upper()
            if has_body and not words and word == "END":
                has_body = False
                words = ["CREATE"]
                continue
            has_body |= word == "BEGIN" and words[:1] == ["CREATE"]
            words.append(word)
        elif token["end"] and words:
            found.append(words)
            words = []
    return [*found, words] if words else found


def _end_of_comment(sql: str, at: int) -> int:
    """Return where a comment ends that has begun before ``at``."""
    depth, found = 1, at
    while depth and (edge := _COMMENT_EDGE.search(sql, found)) is not None:
        depth += 1 if edge[0] == "/*" else -1
        found = edge.end()
    if depth == 0:
        return found
    # SQLite's comments do not nest: the first end counts.
    first = sql.find("*/", at)
    return first + 2 if first >= 0 else len(sql)


_NONE: Mapping[str, Any] = {}


def named_parameters(params: Params) -> Mapping[str, Any]:
    """Return the parameters by name. Raises ``UsageError`` for a list, a tuple or one value."""
    if params is None:
        return _NONE
    if type(params) is not dict and not isinstance(params, Mapping):
        raise UsageError(
            f"parameters have names, but a {type(params).__name__} was given: write :name in the "
            'statement and pass {"name": value}'
        )
    return params


# Strings, quoted names, comments and dollar quotes keep their text; the last group is a parameter.
_NUMBERED: Final = re.compile(
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

    return _NUMBERED.sub(replace, sql)


def to_pyformat(sql: str, values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Return a statement with ``$1`` and its values as ``cursor.execute`` takes them."""
    return _convert(sql), {f"p{number}": value for number, value in enumerate(values, 1)}
