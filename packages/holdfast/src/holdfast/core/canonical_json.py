r"""The canonical form of a JSON text (RFC 8785): one spelling per value.

A retry may format the same body differently, so the canonical form is hashed. Where RFC 8785
would lose information, this is stricter: an integer keeps all its digits instead of becoming a
double, and texts that two parsers could read differently (duplicate keys, lone surrogates) are
refused.

Most of the work is one decode and one encode in C (msgspec). The differences between msgspec and
the RFC are found by searching for bytes, which is fast too:

- *Numbers.* msgspec prints the shortest digits of a double, as ECMAScript does, but formats whole
  numbers and exponents differently. Only if the output contains one of these (or a string that
  looks like one), the numbers are formatted here, one by one.
- *Duplicate keys.* msgspec silently keeps the last one. A dropped member takes at least the two
  quotes of its name with it, and nothing else changes the number of quotes, except that each
  escape ``\u0022`` becomes one. If that cannot be distinguished from an escaped backslash before
  ``u0022``, a slower exact check runs.
- *Depth.* At most the number of opening brackets.
- *Order.* msgspec sorts by code points, the RFC by UTF-16 code units; these differ only for
  characters beyond U+FFFF.
"""

import json
import re
from math import isinf
from typing import Any

import msgspec
from msgspec import Raw

from holdfast.errors import BodyInvalidError

__all__ = ["MAX_DEPTH", "canonical_json"]

MAX_DEPTH = 128
"""Levels of arrays and objects a body may have; part of the protocol."""

_BOM = b"\xef\xbb\xbf"
# The last quote is optional; else a text without it would be searched again from every quote.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_DEEP = b"[" * (MAX_DEPTH + 1)
# All bytes except opening brackets and quotes: one pass instead of three counts.
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[{"'))
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# How msgspec prints a whole double, and one with an exponent. Two patterns, as each starts with a
# fixed byte, which makes them several times faster than one.
_WHOLE_DOUBLE = re.compile(rb"\.0(?:[,\]}]|\Z)")
_EXPONENT = re.compile(rb"e[-0-9][0-9]*(?:[,\]}]|\Z)")
_HIGH_SURROGATE_ALONE = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
)

# A literal this short has at most 15 digits, and two decimals of at most 15 digits never share a
# double: without zeros to drop or an exponent it is the shortest spelling of its double.
_PLAIN_LENGTH = 16
# Exponents between which ECMAScript writes a number out in full.
_FULL_ABOVE, _FULL_UP_TO = -7, 21


def canonical_json(raw: bytes, *, volatile: frozenset[str] = frozenset()) -> bytes:
    """Return the canonical form of a JSON text, without the top-level fields in ``volatile``.

    Raises ``BodyInvalidError``, with a one-line reason, unless the text is one unambiguous JSON
    value.
    """
    # A client that writes 5.0 is recognized here; finding out later would decode twice.
    spell = b".0" in raw and _WHOLE_DOUBLE.search(raw) is not None
    try:
        value = _decode_spelled(raw) if spell else _decode_doubles(raw)
    except Exception:  # noqa: BLE001 - decoded once more, slowly, to say what is wrong
        value = _decode(raw, spell=spell)
    structure = raw.translate(None, _NOT_STRUCTURE)
    quotes = structure.count(b'"')
    if len(structure) - quotes > MAX_DEPTH and _is_too_deep(raw):
        raise _too_deep()
    removed = _remove(value, volatile) if volatile else b""
    out = _encode_sorted(value)
    if not spell and (
        (b".0" in out and _WHOLE_DOUBLE.search(out) is not None)
        or _EXPONENT.search(out) is not None
    ):
        value = _decode(raw, spell=True)
        removed = _remove(value, volatile)
        out = _encode_sorted(value)
    escaped = raw.count(b"\\u0022") if b"\\" in raw else 0
    if escaped and b"\\\\u0022" in raw:
        _refuse_duplicates(raw)
    elif quotes + escaped != out.count(b'"') + (removed.count(b'"') if removed else 0):
        raise _duplicate()
    if out.isascii() or not _has_supplementary(out):
        return out
    return _encode_as_is(_in_utf16_order(value))


def _has_supplementary(text: bytes) -> bool:
    """Return whether there is a character that UTF-16 encodes as a surrogate pair.

    Searches for its first byte in UTF-8; each search is one call into C.
    """
    return (
        b"\xf0" in text or b"\xf1" in text or b"\xf2" in text or b"\xf3" in text or b"\xf4" in text
    )


def _remove(value: Any, names: frozenset[str]) -> bytes:
    """Remove the named fields from an object and return them encoded; b"" if it is not one."""
    if not names or not isinstance(value, dict):
        return b""
    taken = {name: value.pop(name) for name in names if name in value}
    return _encode_as_is(taken) if taken else b""


def _canonical_number(literal: str) -> Raw:
    """Format a number that is not an integer literal as ECMAScript does."""
    if (
        len(literal) <= _PLAIN_LENGTH
        and literal[-1] != "0"
        and "e" not in literal
        and "E" not in literal
        and "0.000000" not in literal
    ):
        return Raw(literal)
    number = float(literal)
    if isinf(number):
        raise _too_large()
    text = repr(number)
    if "e" not in text and not text.endswith(".0"):
        return Raw(text)
    return Raw(_format_double(number))


def _format_double(number: float) -> str:
    """Format a double by ECMAScript's Number::toString (RFC 8785 section 3.2.2.3)."""
    if number == 0:
        return "0"
    sign = "-" if number < 0 else ""
    # repr() gives the same digits as ECMAScript, the shortest that round-trip; only the layout
    # differs. The value is 0.DIGITS times ten to the power of `point`.
    mantissa, _, exponent = repr(abs(number)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = int(exponent or "0") + len(digits) - len(fraction)
    digits = digits.rstrip("0")
    if _FULL_ABOVE < point - 1 < _FULL_UP_TO:
        if point <= 0:
            return f"{sign}0.{'0' * -point}{digits}"
        if len(digits) <= point:
            return f"{sign}{digits}{'0' * (point - len(digits))}"
        return f"{sign}{digits[:point]}.{digits[point:]}"
    rest = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{rest}e{point - 1:+d}"


_decode_doubles = msgspec.json.Decoder().decode
_decode_spelled = msgspec.json.Decoder(float_hook=_canonical_number).decode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_encode_as_is = msgspec.json.Encoder().encode


def _decode(raw: bytes, *, spell: bool) -> Any:
    """Decode, with doubles as doubles or in their canonical format."""
    try:
        return _decode_spelled(raw) if spell else _decode_doubles(raw)
    except UnicodeDecodeError:
        raise BodyInvalidError("The body is not valid UTF-8.") from None
    except msgspec.ValidationError as error:
        # Without a schema, only a number can be well formed and still be invalid.
        if "Integer" in str(error):
            raise BodyInvalidError(
                "The body has a whole number too long to be read (at most 4300 characters)."
            ) from None
        raise _too_large() from None
    except msgspec.DecodeError as error:
        raise BodyInvalidError(_what_is_wrong(raw, error)) from None
    except RecursionError:
        # Also raised when the caller is deep in the stack; then the body is not the cause.
        if _is_too_deep(raw):
            raise _too_deep() from None
        raise


def _what_is_wrong(raw: bytes, error: msgspec.DecodeError) -> str:
    """Return a one-line reason why a text is not JSON, where the decoder's is misleading."""
    if not raw.strip(b" \t\r\n"):
        return "The body is empty where JSON was expected."
    if raw.startswith(_BOM):
        return "The body starts with a byte order mark; JSON is sent without one."
    if "surrogate" in str(error) or _HIGH_SURROGATE_ALONE.search(raw) is not None:
        return "The body has half of a surrogate pair in a string; that is not a character."
    reason = str(error).removeprefix("JSON is malformed: ")
    if "truncated" in reason:
        reason = "it ends too early"
    return f"The body is not JSON: {reason}."


def _is_too_deep(raw: bytes) -> bool:
    """Measure exactly: keep the brackets outside strings, then remove one level at a time."""
    brackets = _STRING.sub(b"", raw).translate(_BRACKETS, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets or _DEEP in brackets:
            break
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _refuse_duplicates(raw: bytes) -> None:
    """Compare the names of every object: slow, but correct for every escape."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) != len(pairs):
            raise _duplicate()

    # Numbers stay strings: they have been checked already.
    json.loads(raw, object_pairs_hook=check, parse_int=str, parse_float=str)


def _in_utf16_order(value: Any) -> Any:
    """Copy a value with the members of every object in the order of UTF-16 code units."""
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        return {name: _in_utf16_order(value[name]) for name in names}
    if isinstance(value, list):
        return [_in_utf16_order(item) for item in value]
    return value


def _duplicate() -> BodyInvalidError:
    # Without the name: names come from the caller, and messages end up in logs.
    return BodyInvalidError("The body has an object with the same key twice.")


def _too_deep() -> BodyInvalidError:
    return BodyInvalidError(f"The body is nested deeper than {MAX_DEPTH} levels.")


def _too_large() -> BodyInvalidError:
    return BodyInvalidError("The body has a number too large for a double.")
