"""How values get into statements for asyncpg: numbered parameters, or SQL literals.

``:name`` becomes ``$1``, once per statement text. asyncpg sends parameters with one statement at a
time, so statements that share a message with BEGIN or COMMIT carry their values as literals.
Printable ASCII without quote or backslash is written as it is; everything else in hexadecimal
digits, which ``decode`` reads: no literal contains a backslash or a byte beyond ASCII. So no value,
whatever a tenant or key contains, can end a literal or change its meaning, and neither can
``standard_conforming_strings`` or ``client_encoding`` of the app's session.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from onceward.errors import UsageError
from onceward.ports import Params
from onceward.records import AuditEvent, Record
from onceward.stores.rows import check_storable, encode_headers
from onceward.stores.statements import named_parameters, refuse_transaction_control

# Skips strings, quoted names, comments, dollar quotes and casts; the last group is a parameter.
_TOKEN = re.compile(
    r"(?<!\w)[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/"
    r"|\$(\w*)\$.*?\$\1\$|::|:([A-Za-z_]\w*)",
    re.DOTALL,
)
# Printable ASCII without quote and backslash.
_PLAIN: Final = bytes(set(range(0x20, 0x7F)) - set(b"'\\"))
# How other libraries write parameters.
_PLACEHOLDER = re.compile(r"%s|%\(\w+\)s|\$\d+|\?")


@lru_cache(maxsize=2048)
def _compile(sql: str) -> tuple[str, tuple[str, ...]]:
    refuse_transaction_control(sql)
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
    given = named_parameters(params)
    if not names:
        if given and (placeholder := _PLACEHOLDER.search(sql)) is not None:
            raise UsageError(
                f"the statement has a parameter {placeholder[0]}, but parameters have names: "
                "write :name"
            )
        return text, []
    try:
        return text, [given[name] for name in names]
    except KeyError as missing:
        raise UsageError(
            f"the statement has a parameter :{missing.args[0]}, which was not given"
        ) from None


def rows_changed(tag: str) -> int:
    """Read the number of rows from a command tag: ``INSERT 0 3``, ``UPDATE 2``, ``BEGIN``."""
    last = tag.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0


def text_literal(value: str | None) -> str:
    """Return a literal of type text."""
    if value is None:
        return "NULL"
    if _is_plain(value):
        return f"'{value}'"
    return f"convert_from(decode('{value.encode().hex()}','hex'),'UTF8')"


def _is_plain(text: str) -> bool:
    """Return whether a text means itself between quotes, whatever the session's settings are."""
    return text.isascii() and not text.encode().translate(None, _PLAIN)


def bytes_literal(value: bytes) -> str:
    """Return a literal of type bytea."""
    return f"decode('{value.hex()}','hex')"


def int_literal(value: int | None) -> str:
    """Return a literal of an integer type. Raises for anything that is no integer."""
    return "NULL" if value is None else str(int(value))


def instant_literal(value: datetime) -> str:
    """Return a literal of type timestamptz."""
    return f"'{value.isoformat()}'"


def claim_literals(tenant: str, endpoint: str, key: str) -> str:
    """Return three literals of type text, separated by commas.

    Raises ``BodyInvalidError`` for what the database cannot store.
    """
    if _is_plain(tenant + endpoint + key):
        return f"'{tenant}','{endpoint}','{key}'"
    check_storable(tenant, endpoint, key)
    return ",".join(map(text_literal, (tenant, endpoint, key)))


def text_literals(values: Sequence[str | None]) -> list[str]:
    """Return literals of type text. Faster than one by one: nearly always, all are plain."""
    if _is_plain("".join([value for value in values if value is not None])):
        return ["NULL" if value is None else f"'{value}'" for value in values]
    return [text_literal(value) for value in values]


def finish_statement(function: str, record: Record, audit: AuditEvent | None) -> str:
    """Return the call of ``onceward_save_record`` with literals, to share a message with COMMIT."""
    made_at = record.client_generated_at
    instants = (
        f"{instant_literal(record.created_at)},{instant_literal(record.expires_at)},"
        f"{'NULL' if made_at is None else instant_literal(made_at)}"
    )
    result = f"{int_literal(record.status)},{bytes_literal(record.body)}"
    audited, version = "NULL,NULL,NULL", "NULL"
    if audit is not None:
        audited = ",".join(text_literals((audit.id, audit.actor, audit.resource)))
        version = int_literal(audit.version)
    tenant, endpoint, key = record.id
    body_hash, request_hash = record.fingerprint
    # Apart from the others: an ETag has quotes, which JSON escapes, so that it is not plain.
    headers, request_id = text_literal(encode_headers(record)), record.request_id
    correlation_id = record.correlation_id
    # One check for all: nearly always, all are plain.
    if _is_plain(f"{tenant}{endpoint}{key}{body_hash}{request_hash}{request_id}{correlation_id}"):
        return (
            f"SELECT {function}('{tenant}','{endpoint}','{key}','{body_hash}','{request_hash}',"
            f"{result},{headers},'{request_id}','{correlation_id}',{instants},{audited},{version})"
        )
    keys = ",".join(map(text_literal, (*record.id, *record.fingerprint)))
    about = f"{headers},{text_literal(request_id)},{text_literal(correlation_id)}"
    return f"SELECT {function}({keys},{result},{about},{instants},{audited},{version})"
