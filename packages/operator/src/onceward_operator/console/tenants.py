"""Pages about tenants: which there are, how large they are, export and erasure."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from onceward.app import Onceward
from onceward.ports import Store
from onceward.stores.sql_loader import load_queries
from onceward_operator.console.access import Role
from onceward_operator.console.page import (
    ConsoleError,
    Downloaded,
    Page,
    PageRequest,
    Redirected,
    Shown,
)
from onceward_operator.record_search import database_time
from onceward_operator.tenant_data import EXPORT_FORMAT, TenantData, export_json

__all__ = ["tenant_pages"]

_PAGE_ROWS: Final = 50
# How many rows of a table are counted, and how many requests of the last hour.
_COUNTED: Final = 5_000
_RECENT: Final = 1_000
_HOUR: Final = timedelta(hours=1)

_log = logging.getLogger("onceward_operator.console")


def tenant_pages(onceward: Onceward[Any]) -> list[Page]:
    """Return the pages about tenants."""
    pages = _TenantPages(onceward)
    return [
        Page("tenants", pages.all, title="Tenants", group="Server", needs_all_tenants=True),
        Page("tenants/show", pages.show),
        Page("tenants/export", pages.export, method="POST", role=Role.ADMIN),
        Page("tenants/erase", pages.erase, method="POST", role=Role.ADMIN),
    ]


class _TenantPages:
    def __init__(self, onceward: Onceward[Any]) -> None:
        self._onceward = onceward
        self._erasures: set[asyncio.Task[None]] = set()

    async def all(self, request: PageRequest) -> Shown:
        """List the tenants that have records."""
        values = {"after": request.query.get("after", ""), "limit": _PAGE_ROWS}
        rows = await request.store.read(_sql(request.store)["tenants"], values)
        names = [row["tenant"] for row in rows]
        is_full = len(names) == _PAGE_ROWS
        return Shown(
            "tenants.html",
            {
                "names": names,
                **request.pager("tenants", names[-1] if is_full else None),
            },
        )

    async def show(self, request: PageRequest) -> Shown:
        """Show how much is stored of a tenant, and what it did in the last hour."""
        tenant = request.own(request.query.get("tenant", ""))
        store, sql = request.store, _sql(request.store)
        since = request.now - _HOUR
        values: dict[str, Any] = {"tenant": tenant, "most": _RECENT}
        recent = await store.read(
            sql["recent_records"], values | {"since": database_time(store, since)}
        )
        refusals = await store.read(sql["recent_refusals"], values | {"since": since.timestamp()})
        data = await self._data()
        return Shown(
            "tenant.html",
            {
                "name": tenant,
                "counts": [
                    (_subject(table, store.table_names.prefix), number)
                    for table, number in sorted((await data.count(tenant, most=_COUNTED)).items())
                ],
                "most": _COUNTED,
                "most_recent": _RECENT,
                "executed": recent[0]["n"],
                "refusals": refusals,
                "uncovered": await data.uncovered(),
            },
        )

    async def export(self, request: PageRequest) -> Downloaded:
        """Send every row of a tenant as JSON lines."""
        tenant = request.own(request.form.get("tenant", ""))
        reason = request.reason()
        data = await self._data()
        _log.warning(
            "a tenant is exported",
            extra={"tenant": tenant, "actor": request.actor, "reason": reason},
        )
        await data.note_export(tenant, actor=request.actor, reason=reason)
        return Downloaded("tenant.jsonl", "application/x-ndjson", _lines(data, tenant, request.now))

    async def erase(self, request: PageRequest) -> Redirected:
        """Begin to erase a tenant; audit events say when it began and ended."""
        tenant = request.own(request.form.get("tenant", ""))
        if request.form.get("confirmed") != tenant:
            raise ConsoleError("to erase the tenant, type its name")
        reason = request.reason()
        data = await self._data()
        forget_cached = getattr(self._onceward.runtime.idempotency.cache, "forget_tenant", None)

        async def run() -> None:
            try:
                await data.erase(
                    tenant, actor=request.actor, reason=reason, forget_cached=forget_cached
                )
            except Exception:  # noqa: BLE001 - of a task that nothing awaits
                _log.exception("the erasure of a tenant has failed: start it again")

        task = asyncio.create_task(run())
        self._erasures.add(task)
        task.add_done_callback(self._erasures.discard)
        return Redirected(
            "tenants" if request.operator.sees_all else "", f"The erasure of {tenant} has begun."
        )

    async def _data(self) -> TenantData:
        onceward = self._onceward
        return await TenantData.open(onceward.store, onceward.clock, onceward.runtime.tenant_tables)


def _subject(table: str, prefix: str) -> str:
    """Return the content of a table by its name: ``onceward_audit_events``, audit events."""
    return table.rpartition(".")[2].removeprefix(prefix).replace("_", " ").capitalize()


async def _lines(data: TenantData, tenant: str, now: datetime) -> AsyncIterator[bytes]:
    """Yield the same lines as ``onceward tenant export`` writes."""
    counts = dict.fromkeys(await data.count(tenant, most=1), 0)
    head = {"format": EXPORT_FORMAT, "tenant": tenant, "exported_at": now, "tables": list(counts)}
    yield _line(head)
    async for table, row in data.rows(tenant):
        counts[table] += 1
        yield _line({"table": table, "row": dict(row)})
    yield _line({"complete": True, "rows": counts})


def _line(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, default=export_json) + "\n").encode(
        "utf-8", "surrogatepass"
    )


def _sql(store: Store) -> Mapping[str, str]:
    return load_queries("onceward_operator.console", "tenants.sql", names=store.table_names)
