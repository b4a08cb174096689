"""Values of SQLite as values of PostgreSQL, and hashes of rows that are equal on both sides.

SQLite keeps what it is given: a time is text or a number, a boolean is 0 or 1. The type of the
column in PostgreSQL decides what a value means. A value that does not fit, or that PostgreSQL would
round, cut or pad, raises ``ValueError`` with a reason for a person; nothing is guessed.
"""

import json
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal
from hashlib import sha256
from math import isnan
from typing import Any, Final
from uuid import UUID

__all__ = ["INFINITY", "RowHash", "converter_for", "milliseconds"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# How asyncpg represents the timestamp "infinity".
INFINITY: Final = datetime.max.replace(tzinfo=UTC)
# Jobs that wait for another one are visible at this time on SQLite, "infinity" on PostgreSQL.
_NEVER_MS: Final = 9_000_000_000_000_000

# The numbers in "numeric(10,2)", "character varying(20)", "timestamp(3) with time zone".
_MODIFIERS: Final = re.compile(r"\((-?\d+)(?:,(-?\d+))?\)")
_INTEGER: Final = re.compile(r"\s*[+-]?[0-9]+\s*")
_NUMBER: Final = re.compile(
    r"\s*[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|nan|inf(?:inity)?)\s*", re.IGNORECASE
)
# The digits of a fraction that datetime and PostgreSQL do not keep.
_BELOW_MICROSECONDS: Final = re.compile(r"[.,][0-9]{6}[0-9]*[1-9]")
_INTEGER_BITS: Final = {"int2": 15, "int4": 31, "int8": 63}
# Doubles have at least this many decimal digits; the further ones come from binary arithmetic.
_DOUBLE_DIGITS: Final = 15
_SHOWN: Final = 40

Converter = Callable[[Any], Any]


def converter_for(type_name: str, stored_type: str = "") -> Converter | None:
    """Return the function that converts a value for a column of this type (``pg_type.typname``).

    ``stored_type`` is the type with its length, precision or scale. None if values of that type
    cannot be converted. The function passes None through; it raises only ``ValueError``.
    """
    convert = _CONVERTERS.get(type_name)
    if convert is None:
        return None
    found = _MODIFIERS.search(stored_type)
    if found is not None:
        convert = _limited(type_name, convert, int(found[1]), int(found[2] or 0))
    return lambda value: None if value is None else convert(value)


def _limited(type_name: str, convert: Converter, first: int, second: int) -> Converter:
    """Return the converter of a type with modifiers."""
    match type_name:
        case "numeric":
            return _decimal_with(first, second)
        case "varchar":
            return _text_up_to(first)
        case "bpchar":
            return _padded_text(first)
        case "timestamptz" | "timestamp" | "time":
            return _time_with(convert, digits=first)
        case _:
            return convert


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def milliseconds(value: Any) -> datetime | None:
    """Convert a time of the job tables: whole milliseconds since 1970."""
    if value is None:
        return None
    if not isinstance(value, int):
        raise ValueError(f"{_shown(value)} is not a number of milliseconds")  # noqa: TRY004 - the data
    try:
        return INFINITY if value >= _NEVER_MS else _EPOCH + timedelta(milliseconds=value)
    except OverflowError:
        raise ValueError(f"{_shown(value)} is not a time before the year 10000") from None


def _boolean(value: Any) -> bool:
    known = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True}
    found = known.get(value.lower() if isinstance(value, str) else value)
    if found is None:
        raise ValueError(f"{_shown(value)} is not a boolean: expected 0, 1, false or true")
    return found


def _integer_of(bits: int) -> Converter:
    def convert(value: Any) -> int:
        is_text = isinstance(value, str) and _INTEGER.fullmatch(value)
        is_whole = isinstance(value, float) and value.is_integer()
        if not (isinstance(value, int) or is_text or is_whole):
            raise ValueError(f"{_shown(value)} is not an integer")
        if is_text and len(value) > _SHOWN:
            raise ValueError(f"{_shown(value)} is too large")
        number = int(value)
        if not -(1 << bits) <= number < 1 << bits:
            raise ValueError(f"{_shown(value)} is too large")
        return number

    return convert


def _decimal(value: Any) -> Decimal:
    if isinstance(value, bytes) or (isinstance(value, str) and not _NUMBER.fullmatch(value)):
        raise ValueError(f"{_shown(value)} is not a number")
    return Decimal(str(value).strip())


def _decimal_with(precision: int, scale: int) -> Converter:
    """Return a converter for ``numeric(precision, scale)``.

    SQLite keeps decimals as doubles: 0.1 + 0.2 is 0.30000000000000004 there, and fits as 0.3.
    """
    step = Decimal(1).scaleb(-scale)
    # PostgreSQL allows up to 1000 digits.
    context = Context(prec=2 * precision + abs(scale) + _DOUBLE_DIGITS)

    def fitting(number: Decimal) -> Decimal | None:
        # The first comparison keeps quantize from numbers with more digits than the context has.
        if number and number.adjusted() >= precision - scale:
            return None
        rounded = number.quantize(step, context=context)
        return rounded if rounded == number else None

    def convert(value: Any) -> Decimal:
        exact = _decimal(value)
        if not exact.is_finite():
            raise ValueError(f"{_shown(value)} is not a finite number")
        found = fitting(exact)
        if found is None and isinstance(value, float):
            found = fitting(Decimal(f"{value:.{_DOUBLE_DIGITS}g}"))
        if found is None:
            raise ValueError(
                f"{_shown(value)} has more digits than {precision}, of which {scale} after the "
                "decimal point"
            )
        return found

    return convert


def _double(value: Any) -> float:
    exact = _decimal(value)
    number = float(exact)
    # Compared with the shortest decimal that is read as this double: 0.1 fits, 2^53 + 1 does not.
    if exact.is_finite() and Decimal(repr(number)) != exact:
        raise ValueError(f"{_shown(value)} has more digits than double precision keeps")
    return number


def _single(value: Any) -> float:
    number = _double(value)
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    except OverflowError:
        raise ValueError(f"{_shown(value)} is too large") from None
    if rounded != number and not isnan(number):
        raise ValueError(
            f"{_shown(value)} would be rounded to {rounded!r}: use double precision, which keeps "
            "SQLite's numbers"
        )
    return number


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        raise ValueError("it has bytes in a column of text")  # noqa: TRY004 - about the data
    text = value if isinstance(value, str) else str(value)
    if "\x00" in text:
        raise ValueError("it contains the character U+0000, which PostgreSQL does not store")
    return text


def _text_up_to(length: int) -> Converter:
    """Return a converter for ``varchar(length)``, which cuts spaces at the end without an error."""

    def convert(value: Any) -> str:
        text = _text(value)
        if len(text) > length:
            raise ValueError(f"{_shown(text)} has {len(text)} characters, more than {length}")
        return text

    return convert


def _padded_text(length: int) -> Converter:
    """Return a converter for ``char(length)``, which does not keep the spaces at the end."""
    limited = _text_up_to(length)

    def convert(value: Any) -> str:
        text = str(limited(value))
        if text.endswith(" ") and len(text) < length:
            raise ValueError(f"{_shown(text)} ends with spaces, which this type does not keep")
        return text

    return convert


def _bytes(value: Any) -> bytes:
    if isinstance(value, int | float):
        raise ValueError(f"{_shown(value)} is a number in a column of bytes")  # noqa: TRY004
    return value.encode() if isinstance(value, str) else bytes(value)


def _uuid(value: Any) -> UUID:
    try:
        return UUID(bytes=value) if isinstance(value, bytes) else UUID(str(value))
    except ValueError:
        raise ValueError(f"{_shown(value)} is not a UUID") from None


def _iso(value: Any, parse: Callable[[str], Any], example: str) -> Any:
    if not isinstance(value, str):
        raise ValueError(  # noqa: TRY004 - about the data
            f"{_shown(value)} is not text such as {example}: its unit is unknown"
        )
    try:
        found = parse(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{_shown(value)} is not of the form {example}") from None
    if _BELOW_MICROSECONDS.search(value):
        raise ValueError(f"{_shown(value)} has more digits than microseconds, which are kept")
    return found


def _instant(value: Any) -> datetime:
    def parse(text: str) -> datetime:
        instant = datetime.fromisoformat(text)
        return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)

    found: datetime = _iso(value, parse, "2026-01-31 09:30:00")
    return found


def _local_time(value: Any) -> datetime:
    return _instant(value).replace(tzinfo=None)


def _date(value: Any) -> date:
    found: datetime = _iso(value, datetime.fromisoformat, "2026-01-31")
    if found.timetz().replace(tzinfo=None) != time():
        raise ValueError(f"{_shown(value)} has a time of day, which a date does not keep")
    return found.date()


def _time_of_day(value: Any) -> time:
    found: time = _iso(value, time.fromisoformat, "09:30:00")
    if found.tzinfo is not None:
        raise ValueError(f"{_shown(value)} has a zone, which this type does not keep")
    return found


def _time_with(convert: Converter, *, digits: int) -> Converter:
    """Return a converter for times with fewer digits than microseconds: ``timestamp(3)``."""

    def limited(value: Any) -> Any:
        found = convert(value)
        if found.microsecond % 10 ** (6 - digits):
            raise ValueError(f"{_shown(value)} has more than {digits} digits after the seconds")
        return found

    return limited


def _json(value: Any) -> str:
    return _checked_json(value, dict)


def _jsonb(value: Any) -> str:
    return _checked_json(value, _unique)


def _checked_json(value: Any, to_object: Callable[[list[tuple[str, Any]]], Any]) -> str:
    try:
        text = value.decode() if isinstance(value, bytes) else _text(value)
        json.loads(text, object_pairs_hook=to_object, parse_constant=_no_constant)
    except _DuplicateError as error:
        raise ValueError(f"the key {_shown(str(error))} is twice in an object") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{_shown(value)} is not JSON") from None
    return text


class _DuplicateError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. ``jsonb`` would keep the last one of two equal keys."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateError(key)
        found[key] = value
    return found


def _no_constant(name: str) -> None:
    raise ValueError(name)


_CONVERTERS: Final[dict[str, Converter]] = {
    "bool": _boolean,
    "int2": _integer_of(_INTEGER_BITS["int2"]),
    "int4": _integer_of(_INTEGER_BITS["int4"]),
    "int8": _integer_of(_INTEGER_BITS["int8"]),
    "float4": _single,
    "float8": _double,
    "numeric": _decimal,
    "text": _text,
    "varchar": _text,
    "bpchar": _text,
    "citext": _text,
    "bytea": _bytes,
    "uuid": _uuid,
    "timestamptz": _instant,
    "timestamp": _local_time,
    "date": _date,
    "time": _time_of_day,
    "json": _json,
    "jsonb": _jsonb,
}


class RowHash:
    """A hash of a set of rows, whatever their order: the sum of the hashes of the rows.

    The order matters to neither side, and collations sort text differently in both databases.
    """

    def __init__(self, type_names: Sequence[str]) -> None:
        """``type_names`` are the PostgreSQL types of the columns."""
        self._encoders = [_encoder(name) for name in type_names]
        self._sum = 0
        self.rows = 0

    def add(self, row: Iterable[Any]) -> None:
        """Add a row of values as PostgreSQL's driver takes and returns them."""
        digest = sha256()
        for encode, value in zip(self._encoders, row, strict=True):
            encoded = b"" if value is None else encode(value)
            # The length separates columns; null and empty have different ones.
            digest.update((0 if value is None else len(encoded) + 1).to_bytes(8, "big"))
            digest.update(encoded)
        self._sum += int.from_bytes(digest.digest(), "big")
        self.rows += 1

    def hexdigest(self) -> str:
        """Return 64 hexadecimal digits."""
        return f"{self._sum % (1 << 256):064x}"


def _encoder(type_name: str) -> Callable[[Any], bytes]:
    if type_name in ("json", "jsonb"):
        return _encode_json
    if type_name == "bpchar":  # PostgreSQL pads it with spaces
        return lambda value: str(value).rstrip(" ").encode()
    return _encode


def _encode(value: Any) -> bytes:
    match value:
        case bytes():
            return value
        case datetime():
            # Not as text: the same instant may be in another zone.
            aware = value.replace(tzinfo=UTC) if value.tzinfo is None else value
            return str((aware - _EPOCH) // _MICROSECOND).encode()
        case Decimal():
            return _plain(value).encode()
        case bool():
            return b"true" if value else b"false"
        case _:
            return str(value).encode()


def _encode_json(value: str) -> bytes:
    parsed = json.loads(value, parse_float=_number, parse_int=_number)
    return json.dumps(parsed, sort_keys=True).encode()


def _number(text: str) -> str:
    """Return one spelling for equal numbers: jsonb does not keep the other ones."""
    return f"number {_plain(Decimal(text))}"


def _plain(number: Decimal) -> str:
    """Return all digits of a number, without zeros at the end and without -0."""
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
