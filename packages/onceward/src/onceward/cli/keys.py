"""``onceward keys``: idempotency records, for operators. Keys are printed in full."""

import asyncio
import base64
import getpass
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from onceward.cli.database import check_known_tenant, opened
from onceward.cli.options import (
    USAGE,
    Json,
    Limit,
    Target,
    Tenant,
    check_tenant,
    command,
    new_group,
    print_fields,
    tenant_or_all,
)
from onceward.errors import CommitUnknownError, InProgressError
from onceward.maintenance.record_removal import RecordRemoval
from onceward.ports import RecordQuery
from onceward.records import Record, RecordId
from onceward_protocol.cli.output import (
    CommandError,
    instant_text,
    print_json,
    print_table,
    shown_instant,
)
from onceward_protocol.clock import SystemClock

_MAX_REASON: Final = 1000
_PAGE: Final = 500

Key = Annotated[str, typer.Argument(help="The idempotency key.")]

app = new_group("keys")


@command(app, "ls")
def list_keys(
    target: Target,
    *,
    tenant: Tenant = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help='Only this endpoint, such as "POST /api/v1/routes". Default: all.'),
    ] = None,
    status: Annotated[
        int | None,
        typer.Option(help="Only records whose response has this status.", min=100, max=599),
    ] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List idempotency records, newest first. Exits with 1 if nothing is stored of the tenant.

    Examples:
        onceward keys ls --tenant ada --limit 10

        onceward keys ls --endpoint "POST /api/v1/routes" --json

    """
    query = RecordQuery(tenant=tenant_or_all(tenant), endpoint=endpoint, limit=limit)
    found = asyncio.run(
        _records(target, query) if status is None else _with_status(target, query, status)
    )
    if as_json:
        print_json([_summary(record) for record in found])
    else:
        _print_list(found)


@command(app, "show")
def show_key(
    target: Target,
    key: Key,
    *,
    tenant: Annotated[
        str | None, typer.Option(help="The tenant, if several tenants used this key.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="The endpoint, if the key was used with several.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one idempotency record, including the stored response.

    Exits with 1 if no record matches, or more than one.

    Example:
        onceward keys show 7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10

    """
    query = RecordQuery(tenant=tenant_or_all(tenant), endpoint=endpoint, key=key, limit=50)
    found = asyncio.run(_records(target, query))
    if not found:
        raise CommandError("no record matches the key and these options (try: onceward keys ls)")
    if len(found) > 1:
        _print_list(found)
        raise CommandError(
            f"{len(found)} records have that key: choose one with --tenant and --endpoint"
        )
    record = found[0]
    made_at = record.client_generated_at
    fields = _summary(record) | {
        "body_hash": record.fingerprint.body_hash,
        "fingerprint": record.fingerprint.request_hash,
        "correlation_id": record.correlation_id,
        "client_generated_at": None if made_at is None else instant_text(made_at),
        "audit_id": record.audit_id,
        "headers": record.headers,
        **_body(record.body),
    }
    if as_json:
        print_json(fields)
        return
    headers = "; ".join(f"{header}: {text}" for header, text in record.headers.items())
    print_fields(fields | {"headers": headers})


@command(app, "rm")
def remove_key(
    target: Target,
    key: Key,
    *,
    tenant: Annotated[str, typer.Option(help="The tenant of the record.")],
    endpoint: Annotated[
        str, typer.Option(help='The endpoint of the record, such as "POST /api/v1/routes".')
    ],
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why; stored in the audit event.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the record, and remove nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove one idempotency record: the next request with this key runs again.

    What the first request has changed stays as it is. The removal is an audit event with your
    name and the reason. Running servers stop replaying the record within a second.

    Example:
        onceward keys rm order-17 --tenant ada --endpoint orders.create --reason "ticket 4711"

    """
    text = (reason or "").strip()
    if not dry_run and not 0 < len(text) <= _MAX_REASON:
        raise CommandError(
            f"--reason is missing or longer than {_MAX_REASON} characters: say why, for the audit "
            "log",
            USAGE,
        )
    record_id = RecordId(check_tenant(tenant), endpoint, key)
    record, audit_id = asyncio.run(_remove(target, record_id, None if dry_run else text))
    if record is None:
        raise CommandError("no record matches key, tenant and endpoint (try: onceward keys ls)")
    if as_json:
        print_json({"removed": audit_id is not None, "audit_id": audit_id} | _summary(record))
        return
    _print_list([record])
    if audit_id is None:
        print("this record would be removed, and the next request with its key would run")
    else:
        print(
            f"removed (audit event {audit_id}); servers that can reach the database stop replaying "
            "it within a second"
        )


async def _remove(
    target: Target, record_id: RecordId, reason: str | None
) -> tuple[Record | None, str | None]:
    """Return the removed record and the id of the audit event; with ``reason`` None, only find it.

    The record is None if there is none.
    """
    started_at = SystemClock().now()
    async with opened(target) as store:
        removal = RecordRemoval(store, SystemClock())
        if reason is None:
            return await removal.find(record_id), None
        try:
            actor = f"{getpass.getuser()} via onceward keys rm"
            removed = await removal.remove(
                record_id, actor=actor, reason=reason, started_at=started_at
            )
        except InProgressError as error:
            raise CommandError(f"nothing was removed: {error}") from error
        except CommitUnknownError as error:
            raise CommandError(
                "the connection was lost during the commit: look with onceward keys show"
            ) from error
    return (None, None) if removed is None else (removed.record, removed.audit_id)


async def _records(target: Target, query: RecordQuery) -> Sequence[Record]:
    async with opened(target) as store:
        found = await store.records(query)
        if not found:
            await check_known_tenant(store, query.tenant)
        return found


async def _with_status(target: Target, query: RecordQuery, status: int) -> Sequence[Record]:
    """Read page by page until there are enough: no index finds a status."""
    found: list[Record] = []
    page = replace(query, limit=_PAGE)
    async with opened(target) as store:
        while len(found) < query.limit:
            records = await store.records(page)
            found += [record for record in records if record.status == status]
            if len(records) < _PAGE:
                break
            last = records[-1]
            page = replace(page, after=(last.created_at, *last.id))
        if not found:
            await check_known_tenant(store, query.tenant)
    return found[: query.limit]


def _print_list(found: Sequence[Record]) -> None:
    headings = ("created", "tenant", "endpoint", "key", "status", "expires")
    rows = [
        (
            shown_instant(record.created_at),
            *record.id,
            str(record.status),
            shown_instant(record.expires_at) + (" (expired)" if _is_expired(record) else ""),
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
        "created_at": instant_text(record.created_at),
        "expires_at": instant_text(record.expires_at),
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
