"""Idempotency keys: reading them from headers and refusing what is not one. Never echoes a key."""

import re
from collections.abc import Sequence
from enum import StrEnum

from holdfast.errors import KeyInvalidError

__all__ = ["KeyFormat", "check_key", "parse_key"]

_UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_OPAQUE = re.compile(r"[\x21-\x7e]{1,128}")
# RFC 8941 section 3.3.3: printable ASCII, and a backslash only before a quote or a backslash.
_QUOTED = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_ESCAPE = re.compile(r'\\(["\\])')


class KeyFormat(StrEnum):
    """What an endpoint takes for a key."""

    UUID4 = "uuid4"
    OPAQUE = "opaque"


def parse_key(values: Sequence[bytes], key_format: KeyFormat) -> str | None:
    """Return the one key that these raw ``Idempotency-Key`` values mean; None if there are none.

    A bare token and the quoted string of it are the same key, and the same key sent twice is one
    key. A list joined by commas is refused, as the draft makes this header a single item: only
    ``opaque`` takes a comma at all, as a character of the key like any other.
    """
    if not values:
        return None
    key = _read(values[0], key_format)
    for other in values[1:]:
        if _read(other, key_format) != key:
            raise KeyInvalidError("Idempotency-Key was sent with two different values.")
    return key


def check_key(key: str, key_format: KeyFormat) -> str:
    """Return the key as it is, or raise if it is not in the endpoint's format.

    Nothing is repaired: an upper-case UUID made lower-case here would meet a client, a log or
    another service where the two are different keys.
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


def _read(value: bytes, key_format: KeyFormat) -> str:
    # Latin-1 maps each byte to one character: what is not ASCII then fails the format.
    text = value.decode("latin-1")
    # What nearly every request sends, before anything else is looked at.
    if key_format is KeyFormat.UUID4 and _UUID4.fullmatch(text) is not None:
        return text
    text = text.strip(" \t")
    if not text:
        raise KeyInvalidError("Idempotency-Key is empty.")
    if text[0] == '"':
        quoted = _QUOTED.fullmatch(text)
        if quoted is None:
            raise KeyInvalidError(
                "A quoted Idempotency-Key must be one complete string with nothing after it."
            )
        text = _ESCAPE.sub(r"\1", quoted[1])
    return check_key(text, key_format)
