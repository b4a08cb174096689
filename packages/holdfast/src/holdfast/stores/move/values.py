"""Values of SQLite as values of PostgreSQL, and hashes of rows that are equal on both sides.

SQLite keeps what it is given: a time is text or a number, a boolean is 0 or 1. The type of the
column in PostgreSQL decides what a value means. A value that does not fit raises ``ValueError``;
nothing is guessed.
"""

import json
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from hashlib import sha256
from typing import Any, Final
from uuid import UUID

__all__ = ["INFINITY", "RowHash", "converter_for", "milliseconds"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# How asyncpg represents the timestamp "infinity".
INFINITY: Final = datetime.max.replace(tzinfo=UTC)
# Jobs that wait for another one are visible at this time on SQLite, "infinity" on PostgreSQL.
_NEVER_MS: Final = 9_000_000_000_000_000

_SCALE: Final = re.compile(r"\(\d+,(\d+)\)")

Converter = Callable[[Any], Any]


def converter_for(type_name: str, shown_type: str = "") -> Converter | None:
    """Return the function that converts a value for a column of this type (``pg_type.typname``).

    ``shown_type`` is the type with its length or scale. None if values of that type cannot be
    converted. The function passes None through.
    """
    convert = _CONVERTERS.get(type_name)
    if convert is None:
        return None
    scale = _SCALE.search(shown_type)
    if type_name == "numeric" and scale is not None:
        convert = _decimal_with(Decimal(1).scaleb(-int(scale[1])))
    return lambda value: None if value is None else convert(value)


def milliseconds(value: Any) -> datetime | None:
    """Convert a time of the job tables: whole milliseconds since 1970."""
    if value is None:
        return None
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is not a number of milliseconds")  # noqa: TRY004 - the data
    return INFINITY if value >= _NEVER_MS else _EPOCH + timedelta(milliseconds=value)


def _boolean(value: Any) -> bool:
    known = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True}
    found = known.get(value.lower() if isinstance(value, str) else value)
    if found is None:
        raise ValueError(f"{value!r} is not a boolean")
    return found


def _integer(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value!r} is not an integer")
    return int(value)


def _decimal(value: Any) -> Decimal:
    try:
        return Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"{value!r} is not a number") from None


def _decimal_with(step: Decimal) -> Converter:
    """Return a converter that rounds doubles to the scale of the column, as PostgreSQL does.

    SQLite keeps decimals as doubles. Text with more digits is not rounded: that would lose some.
    """

    def convert(value: Any) -> Decimal:
        found = _decimal(value)
        return found.quantize(step, ROUND_HALF_UP) if isinstance(value, float) else found

    return convert


def _single(value: Any) -> float:
    """Round to the precision of ``real``, so that both sides hash the same number."""
    (rounded,) = struct.unpack("f", struct.pack("f", float(value)))
    return float(rounded)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        raise ValueError("it has bytes in a column of text")  # noqa: TRY004 - about the data
    text = value if isinstance(value, str) else str(value)
    if "\x00" in text:
        raise ValueError("it contains the character U+0000, which PostgreSQL does not store")
    return text


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _uuid(value: Any) -> UUID:
    return UUID(bytes=value) if isinstance(value, bytes) else UUID(value)


def _instant(value: Any) -> datetime:
    if not isinstance(value, str):
        raise ValueError(  # noqa: TRY004 - about the data
            f"{value!r} is a number in a column of times: its unit is unknown"
        )
    instant = datetime.fromisoformat(value)
    return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)


def _local_time(value: Any) -> datetime:
    return _instant(value).replace(tzinfo=None)


def _json(value: Any) -> str:
    text = value.decode() if isinstance(value, bytes) else _text(value)
    json.loads(text)
    return text


_CONVERTERS: Final[dict[str, Converter]] = {
    "bool": _boolean,
    "int2": _integer,
    "int4": _integer,
    "int8": _integer,
    "float4": _single,
    "float8": float,
    "numeric": _decimal,
    "text": _text,
    "varchar": _text,
    "bpchar": _text,
    "citext": _text,
    "bytea": _bytes,
    "uuid": _uuid,
    "timestamptz": _instant,
    "timestamp": _local_time,
    "date": lambda value: date.fromisoformat(str(value)[:10]),
    "time": lambda value: time.fromisoformat(str(value)),
    "json": _json,
    "jsonb": _json,
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
            return str(value.normalize() + 0).encode()
        case bool():
            return b"true" if value else b"false"
        case _:
            return str(value).encode()


def _encode_json(value: str) -> bytes:
    parsed = json.loads(value, parse_float=_number, parse_int=_number)
    return json.dumps(parsed, sort_keys=True).encode()


def _number(text: str) -> str:
    """Return one spelling for equal numbers: jsonb does not keep the other ones."""
    return f"number {Decimal(text).normalize():f}"
