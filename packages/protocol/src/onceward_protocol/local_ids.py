"""Local ids: find ids made offline in a request, and replace them by the server's. Pure.

There are two forms. ``{local:UUID}`` inside any string of the body, in a header or in the path is
replaced by the server's id of that entity. So is a string of the body, a whole header or a whole
path segment that equals the UUID of a known local id. Names of members are not replaced.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from onceward_protocol.endpoint_validation import check_endpoint
from onceward_protocol.errors import EntryInvalidError

__all__ = [
    "RULE",
    "UUID_TEXT",
    "References",
    "is_local_id",
    "references",
    "replace_in_body",
    "replace_in_headers",
    "replace_in_path",
    "strings_in",
    "with_strings",
]

RULE: Final = "local_id_must_be_lowercase_uuid"

ServerId = str | int

# The only format of a local id.
UUID_TEXT: Final = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_UUID: Final = re.compile(UUID_TEXT)
_PLACEHOLDER: Final = re.compile(rf"\{{local:({UUID_TEXT})\}}")
_OPENING: Final = "{local:"


class References(NamedTuple):
    """References in a request."""

    # Written as placeholders: always replaced.
    placeholders: frozenset[str]
    # Whole values that are UUIDs: replaced if they are known local ids.
    candidates: frozenset[str]


def is_local_id(text: str) -> bool:
    """Return whether this is a lowercase UUID."""
    return _UUID.fullmatch(text) is not None


def references(body: Any, headers: Mapping[str, str], path: str) -> References:
    """Find all references in a request; ``body`` is a JSON value.

    A placeholder that does not hold a lowercase UUID raises ``EntryInvalidError``: it would reach
    the server as text.
    """
    placeholders: set[str] = set()
    candidates: set[str] = set()
    for text in _strings(body, headers, path):
        if _OPENING in text:
            found = _PLACEHOLDER.findall(text)
            if len(found) != text.count(_OPENING):
                raise EntryInvalidError(
                    RULE, "{local:…} must hold a lowercase UUID, such as the local_id of an entry"
                )
            placeholders.update(found)
        elif len(text) == 36 and _UUID.fullmatch(text) is not None:  # noqa: PLR2004
            candidates.add(text)
    return References(frozenset(placeholders), frozenset(candidates))


def replace_in_body(body: Any, ids: Mapping[str, ServerId]) -> Any:
    """Return the JSON value with the server's ids in it.

    A whole value becomes the server's id as it is: a number stays a number.
    """
    return with_strings(body, lambda text: _replaced(text, ids))


def replace_in_headers(headers: Mapping[str, str], ids: Mapping[str, ServerId]) -> dict[str, str]:
    """Return the headers with the server's ids in them."""
    replaced = {name: str(_replaced(value, ids)) for name, value in headers.items()}
    for value in replaced.values():
        if not value.isascii() or not value.isprintable():
            raise EntryInvalidError(RULE, "a server's id cannot be written in a header")
    return replaced


def replace_in_path(path: str, ids: Mapping[str, ServerId]) -> str:
    """Return the path with the server's ids in it, encoded.

    Raises ``EntryInvalidError`` if an id of the server would change the path's meaning.
    """
    route, mark, query = path.partition("?")
    parts = [
        quote(str(ids[part]), safe="") if part in ids else _placed(part, ids)
        for part in route.split("/")
    ]
    return check_endpoint("/".join(parts) + mark + _placed(query, ids))


def _placed(text: str, ids: Mapping[str, ServerId]) -> str:
    return _PLACEHOLDER.sub(lambda found: quote(str(ids.get(found[1], found[0])), safe="{:}"), text)


def _replaced(text: str, ids: Mapping[str, ServerId]) -> ServerId:
    if text in ids:
        return ids[text]
    if _OPENING not in text:
        return text
    whole = _PLACEHOLDER.fullmatch(text)
    if whole is not None:
        return ids.get(whole[1], text)
    return _PLACEHOLDER.sub(lambda found: str(ids.get(found[1], found[0])), text)


def _strings(body: Any, headers: Mapping[str, str], path: str) -> Iterable[str]:
    yield from headers.values()
    route, _, query = path.partition("?")
    yield from route.split("/")
    yield query
    yield from strings_in(body)


def strings_in(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, without the names of members."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)


def with_strings(value: Any, replace: Callable[[str], Any]) -> Any:
    """Return a JSON value with its strings replaced, but not the names of members."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, dict):
        return {name: with_strings(each, replace) for name, each in value.items()}
    if isinstance(value, list):
        return [with_strings(each, replace) for each in value]
    return value
