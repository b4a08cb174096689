"""``holdfast keys``: idempotency records, for operators. Keys are printed in full."""

import asyncio
import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from holdfast.cli.database import opened
from holdfast.cli.output import CommandError, print_json, print_table, printable
from holdfast.cli.target import Target
from holdfast.core.idempotency_record import Record
from holdfast.ports import RecordQuery

__all__ = ["list_keys", "show_key"]


def list_keys(
    target: Target, *, tenant: str | None, endpoint: str | None, limit: int, as_json: bool
) -> None:
    """Print records, newest first."""
    found = asyncio.run(
        _records(target, RecordQuery(tenant=tenant, endpoint=endpoint, limit=limit))
    )
    if as_json:
        print_json([_summary(record) for record in found])
    else:
        _print_list(found)


def show_key(
    target: Target, key: str, *, tenant: str | None, endpoint: str | None, as_json: bool
) -> None:
    """Print one record. Where several match, print a list and raise ``CommandError``."""
    query = RecordQuery(tenant=tenant, endpoint=endpoint, key=key, limit=50)
    found = asyncio.run(_records(target, query))
    if not found:
        raise CommandError("no record matches the key and these options (try: holdfast keys ls)")
    if len(found) > 1:
        _print_list(found)
        raise CommandError(
            f"{len(found)} records have that key: choose one with --tenant and --endpoint"
        )
    record = found[0]
    fields = _summary(record) | {
        "body_hash": record.fingerprint.body_hash,
        "fingerprint": record.fingerprint.request_hash,
        "correlation_id": record.correlation_id,
        "audit_id": record.audit_id,
        "headers": record.headers,
        **_body(record.body),
    }
    if as_json:
        print_json(fields)
        return
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        if isinstance(value, dict):
            value = "; ".join(f"{header}: {text}" for header, text in value.items())  # noqa: PLW2901
        print(f"{name:<{width}}  {'-' if value is None else printable(str(value))}")


async def _records(target: Target, query: RecordQuery) -> Sequence[Record]:
    async with opened(target) as store:
        return await store.records(query)


def _print_list(found: Sequence[Record]) -> None:
    headings = ("created", "tenant", "endpoint", "key", "status", "expires")
    rows = [
        (
            _instant(record.created_at),
            *record.id,
            str(record.status),
            _instant(record.expires_at) + (" (expired)" if _is_expired(record) else ""),
        )
        for record in found
    ]
    print_table(headings, rows)


def _summary(record: Record) -> dict[str, Any]:
    return {
        "tenant": record.id.tenant,
        "endpoint": record.id.endpoint,
        "key": record.id.key,
        "status": record.status,
        "created_at": _instant(record.created_at),
        "expires_at": _instant(record.expires_at),
        "expired": _is_expired(record),
        "request_id": record.request_id,
    }


def _body(body: bytes) -> dict[str, str]:
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def _is_expired(record: Record) -> bool:
    return record.expires_at <= datetime.now(UTC)


def _instant(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
