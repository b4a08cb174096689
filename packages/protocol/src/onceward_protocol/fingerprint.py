r"""Hashes that identify requests, keys and locks, and the canonical JSON (RFC 8785) they are of.

A retry may format the same body differently, so the canonical form is hashed. Where RFC 8785
would lose information, this is stricter: an integer keeps all its digits instead of becoming a
double, and texts that two parsers could read differently (duplicate keys, lone surrogates) are
refused.

Most of the work is one decode and one encode in C (msgspec). The differences between msgspec and
the RFC are found by searching for bytes, which is fast too:

- *Numbers.* msgspec prints the shortest digits of a double, as ECMAScript does, but formats whole
  numbers and exponents differently. Only if the output contains one of these (or a string that
  looks like one), it is edited here: by replacing bytes where no string looks like a number, else
  token by token. A body of a million numbers takes milliseconds, not a second.
- *Duplicate keys.* msgspec silently keeps the last one. A dropped member takes at least the two
  quotes of its name with it, and nothing else changes the number of quotes, except that each
  escape ``\u0022`` becomes one. If that cannot be distinguished from an escaped backslash before
  ``u0022``, a slower exact check runs.
- *Depth.* At most the number of opening brackets.
- *Order.* msgspec sorts by code points, the RFC by UTF-16 code units; these differ only for
  characters beyond U+FFFF.

A call into C holds the interpreter's lock, and other threads wait. So a large text is split where
its arrays and objects are, and each piece is decoded and encoded by itself.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, sha256
from itertools import accumulate
from math import isinf
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec

from onceward_protocol.errors import BodyInvalidError

__all__ = [
    "MAX_DEPTH",
    "FingerprintInput",
    "body_hash",
    "canonical_json",
    "decode_json",
    "encode_again",
    "lock_number",
    "request_fingerprint",
    "short_hash",
    "split_object",
]

T = TypeVar("T")

MAX_DEPTH = 128
"""Levels of arrays and objects a body may have; part of the protocol."""

_BOM = b"\xef\xbb\xbf"
# A text of this size takes 1 to 4 ms. Larger ones are split into pieces of up to twice the size.
_PIECE_BYTES = 32 * 1024
_SPACE = b" \t\r\n"
# Positions in a piece say nothing about the text.
_POSITION = re.compile(r" \(byte [0-9]+\)")
_QUOTE, _MINUS = b'"-'
# The last quote is optional; else a text without it would be searched again from every quote.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
# An opening bracket adds one level, a closing one removes one (as signed bytes).
_LEVELS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")
# All bytes except opening brackets and quotes: one pass instead of three counts.
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[{"'))
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# How msgspec prints a whole double, and one with an exponent. Two patterns, as each starts with a
# fixed byte, which makes them several times faster than one.
_WHOLE_DOUBLE = re.compile(rb"\.0(?:[,\]}]|\Z)")
_EXPONENT = re.compile(rb"e[-0-9][0-9]*(?:[,\]}]|\Z)")
_NEGATIVE_ZERO = re.compile(rb"-0\.0(?=[,\]}]|\Z)")
# msgspec writes exponents from 16 up and from -6 down, ECMAScript from 21 up and from -7 down.
_FULL_IN_ECMASCRIPT = re.compile(rb"-?[0-9](?:\.[0-9]+)?e(?:1[6-9]|20|-6)(?=[,\]}]|\Z)")
# msgspec takes 8 µs for each double near the limits of the exponent, and holds the interpreter's
# lock: a second for a body of 1 MiB. Python's own float() takes a quarter of a microsecond.
_LONG_EXPONENT = re.compile(rb"[eE][-+]?[0-9]{3}")
_SMALL = 4096
_POSITIVE_EXPONENT = re.compile(rb"e(?=[0-9])")
_STRING_OR_NUMBER = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|-?[0-9]++(?:\.[0-9]++)?(?:e-?[0-9]++)?', re.DOTALL
)
_HIGH_SURROGATE_ALONE = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
)

_SHORT = 12
"""Hex digits of a short hash: 48 bits distinguish keys in a log and reveal none."""


@dataclass(frozen=True, slots=True)
class FingerprintInput:
    """One request, as ``Policy.fingerprint`` gets it."""

    # In upper case.
    method: str
    # Decoded, without the query.
    path: str
    # As it was sent.
    query: bytes
    # Names in lower case, and values.
    headers: Iterable[tuple[bytes, bytes]]
    # As it was sent.
    body: bytes

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None."""
        wanted = name.lower().encode("latin-1")
        for key, value in self.headers:
            if key == wanted:
                return value.decode("latin-1")
        return None


def body_hash(
    body: bytes, content_type: str | None, *, volatile: frozenset[str] = frozenset()
) -> str:
    """Return the SHA-256 of a body, in lowercase hex.

    JSON (``application/json`` or ``…+json``, with any parameters) is hashed in canonical form,
    without the volatile fields. Any other body, including an empty one, is hashed as sent, after
    its content type and a newline: the media type in lower case, as it is case-insensitive, and
    the parameters as sent, as they may not be (the boundary of a multipart body). Canonical JSON
    contains no newline, so the two kinds never collide.
    """
    if body and content_type == "application/json":
        return sha256(canonical_json(body, volatile=volatile)).hexdigest()
    media_type, semicolon, parameters = (content_type or "").strip().partition(";")
    media_type = media_type.rstrip().lower()
    if body and (media_type == "application/json" or media_type.endswith("+json")):
        return sha256(canonical_json(body, volatile=volatile)).hexdigest()
    kind = f"{media_type}{semicolon}{parameters}\n".encode("utf-8", "surrogatepass")
    return sha256(kind + body).hexdigest()


def request_fingerprint(
    *, method: str, endpoint: str, path_params: Mapping[str, str], query: bytes, body_hash: str
) -> str:
    """Return the SHA-256 of method, endpoint, path parameters, query and body, in lowercase hex.

    The order of path parameters does not matter, nor do the order of query parameters with
    different names and their percent-encoding. The order of equal names does (``?sort=a&sort=b``).
    """
    if not path_params and not query:
        text = f"{_operation(method, endpoint)}{len(body_hash)}:{body_hash}"
        return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    parts = [method, endpoint, body_hash]
    if path_params:
        parts.append(f"path {len(path_params)}")
        for name in sorted(path_params):
            parts += (name, path_params[name])
    if query:
        # Latin-1 keeps every byte distinct; decoding as UTF-8 would make all invalid bytes equal.
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
        pairs.sort(key=_name)
        parts.append(f"query {len(pairs)}")
        for pair in pairs:
            parts += pair
    return sha256(_joined(parts)).hexdigest()


def lock_number(tenant: str, endpoint: str, key: str) -> int:
    """Return a signed 64-bit number for a record, for PostgreSQL's advisory locks.

    Two records may share a number, which costs a wait and nothing else: the lock only serializes
    requests, the record decides.
    """
    # As ``_joined``, in one step: this runs for every request.
    text = f"{len(tenant)}:{tenant}{len(endpoint)}:{endpoint}{len(key)}:{key}"
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def short_hash(key: str) -> str:
    """Return the twelve hex digits that identify a key in logs, metrics and traces."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:_SHORT]


def _name(pair: tuple[str, str]) -> str:
    return pair[0]


@lru_cache(maxsize=1024)
def _operation(method: str, endpoint: str) -> str:
    """Return the beginning of the text that is hashed, which an operation's requests share."""
    return f"{len(method)}:{method}{len(endpoint)}:{endpoint}"


def _joined(parts: list[str]) -> bytes:
    """Join strings unambiguously: each is preceded by its length."""
    text = "".join([f"{len(part)}:{part}" for part in parts])
    # A path decoded by a lenient server may contain a lone surrogate.
    return text.encode("utf-8", "surrogatepass")


# -- canonical JSON ------------------------------------------------------------------------------


def canonical_json(raw: bytes, *, volatile: frozenset[str] = frozenset()) -> bytes:
    """Return the canonical form of a JSON text, without the top-level fields in ``volatile``.

    Raises ``BodyInvalidError``, with a one-line reason, unless the text is one unambiguous JSON
    value.
    """
    if len(raw) > 2 * _PIECE_BYTES:
        return _canonical_large(raw, volatile)
    try:
        value = _decode_any(raw) if len(raw) <= _SMALL else decode_json(raw)
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets one line
        raise _decode_error(raw, error) from None
    # As ``_check_depth``. Calls cost more than what they do for a small text.
    structure = raw.translate(None, _NOT_STRUCTURE)
    quotes = structure.count(b'"')
    if len(structure) - quotes > MAX_DEPTH and _is_too_deep(raw):
        raise _too_deep()
    removed_quotes = 0
    if isinstance(value, dict):
        for name in volatile:
            if name in value:
                removed_quotes = _remove(value, volatile).count(b'"')
                break
    out = _encode_sorted(value)
    encoded_quotes = out.count(b'"') + removed_quotes
    if quotes != encoded_quotes or b"\\" in raw:
        _check_duplicates(raw, quotes, encoded_quotes)
    return _with_ecmascript_numbers(out) if out.isascii() else _finished(out, value)


def _check_depth(raw: bytes) -> int:
    """Raise if a text is nested too deeply; return how many quotes it has."""
    structure = raw.translate(None, _NOT_STRUCTURE)
    quotes = structure.count(b'"')
    if len(structure) - quotes > MAX_DEPTH and _is_too_deep(raw):
        raise _too_deep()
    return quotes


def _check_duplicates(raw: bytes, quotes: int, encoded_quotes: int) -> None:
    """Raise if an object has a key twice: then quotes were lost."""
    escaped = raw.count(b"\\u0022") if b"\\" in raw else 0
    if escaped and b"\\\\u0022" in raw:
        _refuse_duplicates(raw)
    elif quotes + escaped != encoded_quotes:
        raise _duplicate()


def _finished(out: bytes, value: Any) -> bytes:
    """Return the canonical form of a value, of which ``out`` is the sorted encoding."""
    if not out.isascii() and _has_supplementary(out):
        out = _encode_as_is(_in_utf16_order(value))
    return _with_ecmascript_numbers(out)


def _canonical_large(raw: bytes, volatile: frozenset[str]) -> bytes:
    """As ``canonical_json``, in pieces."""
    try:
        parts = _split(raw)
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets one line
        raise _decode_error(raw, error) from None
    quotes = _check_depth(raw)
    removed = 0
    try:
        if isinstance(parts, dict):
            taken = {name: parts.pop(name) for name in volatile if name in parts}
            removed = _members_in(_CANONICAL, taken).count(b'"') if taken else 0
        out = _parts_in(_CANONICAL, parts, raw)
    except BodyInvalidError:
        raise
    except Exception as error:  # noqa: BLE001
        raise _decode_error(raw, error, in_piece=True) from None
    _check_duplicates(raw, quotes, out.count(b'"') + removed)
    return out


def _split(raw: bytes) -> dict[str, msgspec.Raw] | list[msgspec.Raw] | None:
    """Return the members of an array or an object, not decoded; None for another value."""
    first = raw[:1] if raw[:1] not in _SPACE else raw.lstrip(_SPACE)[:1]
    if first == b"{":
        return _decode_members(raw)
    return _decode_items(raw) if first == b"[" else None


class _Form(NamedTuple):
    """How the pieces of a text are written."""

    piece: Callable[[bytes], bytes]
    names: Callable[[Iterable[str]], list[str]]


def _canonical_piece(raw: bytes) -> bytes:
    value = decode_json(raw)
    return _finished(_encode_sorted(value), value)


def _sorted_names(names: Iterable[str]) -> list[str]:
    found = sorted(names)
    if any(not name.isascii() and max(name) > "\uffff" for name in found):
        found.sort(key=_utf16)
    return found


def _plain_piece(raw: bytes) -> bytes:
    return _encode_as_is(decode_json(raw))


_CANONICAL = _Form(_canonical_piece, _sorted_names)
_PLAIN = _Form(_plain_piece, list)


def _piece_in(form: _Form, raw: bytes) -> bytes:
    return _parts_in(form, _split(raw), raw) if len(raw) > 2 * _PIECE_BYTES else form.piece(raw)


def _parts_in(
    form: _Form, parts: dict[str, msgspec.Raw] | list[msgspec.Raw] | None, raw: bytes
) -> bytes:
    if isinstance(parts, dict):
        return b"{" + _members_in(form, parts) + b"}"
    if isinstance(parts, list):
        return b"[" + _items_in(form, parts) + b"]"
    return form.piece(raw)


def _items_in(form: _Form, items: list[msgspec.Raw]) -> bytes:
    """Write the items of an array, separated by commas."""
    text = _encode_as_is(items)
    if len(text) <= 2 * _PIECE_BYTES:
        return form.piece(text)[1:-1]
    if len(items) == 1:
        return _piece_in(form, bytes(items[0]))
    return b",".join([_items_in(form, part) for part in _slices(items, len(text))])


def _members_in(
    form: _Form, members: dict[str, msgspec.Raw], names: list[str] | None = None
) -> bytes:
    """Write the members of an object, separated by commas; ``names`` are some in their order."""
    if names is None:
        names = form.names(members)
    text = _encode_as_is({name: members[name] for name in names})
    if len(text) <= 2 * _PIECE_BYTES:
        return form.piece(text)[1:-1]
    if len(names) == 1:
        value = _piece_in(form, bytes(members[names[0]]))
        return _encode_as_is(names[0]) + b":" + value
    return b",".join([_members_in(form, members, part) for part in _slices(names, len(text))])


def _slices(items: list[T], size: int) -> Iterator[list[T]]:
    """Cut a list whose text has so many bytes into slices for pieces, if they are alike."""
    pieces = -(-size // _PIECE_BYTES)
    step = -(-len(items) // pieces)
    for start in range(0, len(items), step):
        yield items[start : start + step]


def encode_again(raw: bytes) -> bytes:
    """Return a JSON text as msgspec encodes its value, in pieces. Members keep their order.

    For a text that has a canonical form. Raises what msgspec raises.
    """
    return _piece_in(_PLAIN, raw)


def split_object(raw: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the members of a JSON object, not decoded; None if it is no object.

    For a text that has a canonical form. Raises what msgspec raises.
    """
    parts = _split(raw) if raw.lstrip(_SPACE)[:1] == b"{" else None
    return parts if isinstance(parts, dict) else None


def decode_json(raw: bytes) -> Any:
    """Decode a JSON text in a short time, whatever its numbers are.

    Does not check what ``canonical_json`` checks besides the syntax. Raises what msgspec raises.
    """
    is_slow = len(raw) > _SMALL and _LONG_EXPONENT.search(raw) is not None
    return _decode_long_exponents(raw) if is_slow else _decode_any(raw)


def _has_supplementary(text: bytes) -> bool:
    """Return whether there is a character that UTF-16 encodes as a surrogate pair.

    Searches for its first byte in UTF-8; each search is one call into C.
    """
    return (
        b"\xf0" in text or b"\xf1" in text or b"\xf2" in text or b"\xf3" in text or b"\xf4" in text
    )


def _remove(value: dict[str, Any], names: frozenset[str]) -> bytes:
    """Remove the named fields from an object and return them encoded; b"" if it has none."""
    taken = {name: value.pop(name) for name in names if name in value}
    return _encode_as_is(taken) if taken else b""


def _with_ecmascript_numbers(out: bytes) -> bytes:
    """Format the doubles in msgspec's output by ECMAScript's Number::toString (RFC 8785)."""
    has_whole = b".0" in out and _WHOLE_DOUBLE.search(out) is not None
    has_exponent = _EXPONENT.search(out) is not None
    if not has_whole and not has_exponent:
        return out
    if b'"' in out:
        strings_look_like_numbers = has_exponent or (
            _count_whole(_STRING.sub(b"", out)) != _count_whole(out)
        )
        if strings_look_like_numbers:
            return _STRING_OR_NUMBER.sub(_format_token, out)
    if has_exponent:
        out = _FULL_IN_ECMASCRIPT.sub(_format_in_full, out)
        # The e of true and false is followed by no digit.
        out = _POSITIVE_EXPONENT.sub(b"e+", out)
    if b"-0.0" in out:
        out = _NEGATIVE_ZERO.sub(b"0", out)
    if out.endswith(b".0"):
        return out[:-2]
    return out.replace(b".0,", b",").replace(b".0]", b"]").replace(b".0}", b"}")


def _count_whole(text: bytes) -> int:
    """Count what looks like a whole double in an array or an object."""
    return text.count(b".0,") + text.count(b".0]") + text.count(b".0}")


def _format_token(match: re.Match[bytes]) -> bytes:
    """Format one number; a string stays as it is."""
    token = match[0]
    if token[0] == _QUOTE:
        return token
    if b"e" in token:
        if _FULL_IN_ECMASCRIPT.fullmatch(token):
            return _format_in_full(match)
        return token if b"e-" in token else token.replace(b"e", b"e+")
    if token == b"-0.0":
        return b"0"
    return token[:-2] if token.endswith(b".0") else token


def _format_in_full(match: re.Match[bytes]) -> bytes:
    """Write a double that msgspec printed with an exponent without one."""
    mantissa, _, exponent = match[0].partition(b"e")
    whole, _, fraction = mantissa.partition(b".")
    if exponent == b"-6":
        sign = b"-" if whole[0] == _MINUS else b""
        return b"".join((sign, b"0.00000", whole.lstrip(b"-"), fraction))
    # A double has at most 17 digits, so none is left after the point.
    return whole + fraction.ljust(int(exponent), b"0")


def _double(literal: str) -> float:
    number = float(literal)
    if isinf(number):
        raise _too_large()
    return number


_decode_any = msgspec.json.Decoder().decode
_decode_long_exponents = msgspec.json.Decoder(float_hook=_double).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_encode_as_is = msgspec.json.Encoder().encode


def _decode_error(raw: bytes, error: Exception, *, in_piece: bool = False) -> Exception:
    """Return the error to raise for a body that msgspec cannot decode."""
    if isinstance(error, UnicodeDecodeError):
        return BodyInvalidError("The body is not valid UTF-8.")
    if isinstance(error, msgspec.ValidationError):
        # Without a schema, only a number can be well formed and still be invalid.
        if "Integer" in str(error):
            return BodyInvalidError(
                "The body has a whole number too long to be read (at most 4300 characters)."
            )
        return _too_large()
    if isinstance(error, msgspec.DecodeError):
        reason = _what_is_wrong(raw, error)
        return BodyInvalidError(_POSITION.sub("", reason) if in_piece else reason)
    # RecursionError is also raised when the caller is deep in the stack; then the body is not
    # the cause.
    if isinstance(error, RecursionError) and _is_too_deep(raw):
        return _too_deep()
    return error


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
    """Measure exactly: the sum of the brackets outside strings, up to each of them."""
    levels = array("b", _STRING.sub(b"", raw).translate(_LEVELS, _NOT_BRACKETS))
    depth = 0
    for start in range(0, len(levels), _PIECE_BYTES):
        piece = levels[start : start + _PIECE_BYTES]
        if depth + max(accumulate(piece)) > MAX_DEPTH:
            return True
        depth += sum(piece)
    return False


def _refuse_duplicates(raw: bytes) -> None:
    """Compare the names of every object: slow, but correct for every escape."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) != len(pairs):
            raise _duplicate()

    # Numbers stay strings: they have been checked already.
    json.loads(raw, object_pairs_hook=check, parse_int=str, parse_float=str)


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be")


def _in_utf16_order(value: Any) -> Any:
    """Copy a value with the members of every object in the order of UTF-16 code units."""
    if isinstance(value, dict):
        names = sorted(value, key=_utf16)
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
