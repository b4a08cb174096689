"""SQL literals for the few statements that share a round trip with BEGIN or COMMIT.

asyncpg sends parameters only one statement at a time. Two statements in one message have to carry
their values as text. Printable ASCII without quote or backslash stands as it is; everything else
is written in hexadecimal digits. So whatever a tenant or a key contains, nothing reaches the
parser that could end a literal, and there is nothing to escape.
"""

from datetime import datetime

__all__ = ["bytes_literal", "instant_literal", "int_literal", "text_literal"]


def text_literal(value: str | None) -> str:
    """Write text."""
    if value is None:
        return "NULL"
    if value.isascii() and value.isprintable() and "'" not in value and "\\" not in value:
        return f"'{value}'"
    return f"convert_from('\\x{value.encode().hex()}','UTF8')"


def bytes_literal(value: bytes) -> str:
    """Write bytes."""
    return f"'\\x{value.hex()}'"


def int_literal(value: int | None) -> str:
    """Write an integer; anything else is refused by the conversion."""
    return "NULL" if value is None else str(int(value))


def instant_literal(value: datetime) -> str:
    """Write an instant: digits and punctuation of our own making."""
    return f"'{value.isoformat()}'"
