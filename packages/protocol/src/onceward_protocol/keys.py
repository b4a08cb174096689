"""Parses and validates idempotency keys. No error message contains the key."""

import re
from collections.abc import Sequence
from enum import StrEnum

from onceward_protocol.errors import KeyInvalidError

__all__ = ["KEY_HEADER", "KeyFormat", "check_key", "parse_key", "split_joined_keys"]

# The header that carries the key, unless a policy names another.
KEY_HEADER = "Idempotency-Key"

_UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_OPAQUE = re.compile(r"[\x21-\x7e]{1,128}")
# RFC 8941 section 3.3.3: printable ASCII, and a backslash only before a quote or a backslash.
_STRING = r'"(?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"'
# Section 3.1.2: ``;name`` or ``;name=item``, where an item is a number, string, token, byte
# sequence or boolean.
_ITEM = (
    rf"(?:-?[0-9]{{1,15}}(?:\.[0-9]{{1,3}})?|{_STRING}|[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*"
    r"|:[A-Za-z0-9+/=]*:|\?[01])"
)
_PARAMETERS = rf"(?:;[ ]*[a-z*][a-z0-9_.*-]*(?:={_ITEM})?)*"
_QUOTED = re.compile(rf"({_STRING}){_PARAMETERS}")
_ESCAPE = re.compile(r'\\(["\\])')


class KeyFormat(StrEnum):
    """The formats of keys: lowercase UUID version 4, or 1 to 128 visible ASCII characters."""

    # A UUID version 4 in lower case.
    UUID4 = "uuid4"
    # 1 to 128 visible ASCII characters.
    OPAQUE = "opaque"


def parse_key(values: Sequence[bytes], key_format: KeyFormat) -> str | None:
    """Return the key of these raw ``Idempotency-Key`` values, or None if there are none.

    A bare token and the same token as a quoted string are the same key, and a key sent twice is
    one key. Parameters after the quoted string (RFC 8941, section 3.1.2) are ignored, as
    structured fields require; a semicolon in a bare ``opaque`` key is part of it. A comma-separated
    list is refused, as the IETF draft makes the header a single item; in an ``opaque`` key a comma
    is a character like any other.
    """
    if not values:
        return None
    key = _read(values[0], key_format)
    for other in values[1:]:
        if _read(other, key_format) != key:
            raise KeyInvalidError("Idempotency-Key was sent with two different values.")
    return key


def check_key(key: str, key_format: KeyFormat) -> str:
    """Return the key unchanged. Raises ``KeyInvalidError`` if it does not have the format.

    An upper-case UUID is not made lower-case: clients, logs and other services treat the two as
    different keys.
    """
    if key_format is KeyFormat.UUID4:
        if _UUID4.fullmatch(key) is None:
            raise KeyInvalidError(
                "The idempotency key must be one lowercase UUID version 4 (36 characters)."
            )
    elif _OPAQUE.fullmatch(key) is None:
        raise KeyInvalidError(
            "The idempotency key must be 1 to 128 visible ASCII characters, without spaces."
        )
    return key


def split_joined_keys(value: bytes) -> list[bytes]:
    """Split keys that a server has joined with a comma: two keys must not become a third.

    So a bare key cannot contain a comma where servers join headers; a quoted one can.
    """
    if value.lstrip().startswith(b'"'):
        return [value]
    return [part.strip() for part in value.split(b",")]


def _read(value: bytes, key_format: KeyFormat) -> str:
    # Latin-1 maps each byte to one character; a character beyond ASCII then fails the format.
    text = value.decode("latin-1")
    # The most common case first.
    if key_format is KeyFormat.UUID4 and _UUID4.fullmatch(text) is not None:
        return text
    text = text.strip(" \t")
    if not text:
        raise KeyInvalidError("Idempotency-Key is empty.")
    if text[0] == '"':
        quoted = _QUOTED.fullmatch(text)
        if quoted is None:
            raise KeyInvalidError(
                "A quoted Idempotency-Key must be one complete string, with nothing but parameters "
                "after it."
            )
        text = _ESCAPE.sub(r"\1", quoted[1][1:-1])
    return check_key(text, key_format)
