"""Audit events in a database, sealed and tampered with; also by a process that kills itself."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from onceward import open_store
from onceward.audit.chain import AuditKeys, ChainCheck
from onceward.audit.seals import AuditSealer
from onceward.ports import Store
from onceward.records import AuditEvent
from onceward_operator.audit_trail import AuditTrail
from onceward_protocol.clock import SystemClock
from onceward_protocol.ids import new_id
from packages.operator.tests.moving import KillAt

HASH = "ab" * 32


async def add_event(
    store: Store, at: datetime, tenant: str = "ada", *, commits: bool = True, **fields: Any
) -> str:
    """Write an audit event as a request does, or roll it back, and return its id."""
    values: dict[str, Any] = {
        "id": new_id(at),
        "tenant": tenant,
        "actor": "ada's phone “☎”\u2028\x7f",
        "endpoint": "orders.create",
        "payload_hash": HASH,
        "status": 201,
        "request_id": "r-1",
        "correlation_id": "c-1",
        "created_at": at,
        "resource": "order:1",
        "version": 2**53 + 1,
    }
    event = AuditEvent(**values | fields)
    unit = await store.begin()
    if commits:
        await unit.commit(None, event)
    else:
        await unit.statements.execute(
            store.table_names.render(
                "INSERT INTO onceward_audit_events (tenant, id, actor, endpoint, payload_hash,"
                " status, request_id, correlation_id, created_at)"
                " VALUES (:tenant, :id, '', '', '', 1, '', '', :at)"
            ),
            {"tenant": tenant, "id": event.id, "at": at},
        )
        await unit.rollback()
    return event.id


async def seal(store: Store, clock: Any = None, *keys: str) -> int:
    """Seal all events; return how many."""
    sealer = AuditSealer(store, clock or SystemClock(), keys=AuditKeys(keys))
    return (await sealer.seal()).events


async def verify(store: Store, tenant: str = "ada", *keys: str, **options: Any) -> ChainCheck:
    return await AuditTrail(store, keys=AuditKeys(keys)).verify(tenant, **options)


async def chains(store: Store, tenants: Sequence[str]) -> dict[str, list[str]]:
    """Write three seals of two events for each tenant; return the ids of its events, in order."""
    start = SystemClock().now().replace(hour=12) - timedelta(days=1)
    ids: dict[str, list[str]] = {tenant: [] for tenant in tenants}
    for number in range(3):
        values = []
        for tenant in tenants:
            for position in range(2):
                ids[tenant].append(new_id(start + timedelta(seconds=10 * number + position)))
                values.append(
                    f"('{tenant}', '{ids[tenant][-1]}', 'actor {number} {position}', 'e', '{HASH}',"
                    " 201, 'r', 'c', :at)"
                )
        await store.write(
            store.table_names.render(
                "INSERT INTO onceward_audit_events (tenant, id, actor, endpoint, payload_hash,"
                f" status, request_id, correlation_id, created_at) VALUES {', '.join(values)}"
            ),
            {"at": start + timedelta(seconds=10 * number)},
        )
        assert await seal(store) == 2 * len(tenants)
    return ids


def seal_and_die(url: str, point: str) -> None:
    """Seal, and kill this process when it reaches ``point``."""

    async def run() -> None:
        store = open_store(url)
        await store.open()
        await AuditSealer(store, SystemClock(), faults=KillAt(point, 1)).seal()

    asyncio.run(run())
