"""Everything that is stored of one tenant: counted, exported and erased, for operators."""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

from onceward.errors import ConfigurationError, OncewardError, StoreError
from onceward.guard.caches import new_epoch
from onceward.guard.erasures import ERASED
from onceward.guard.erasures import pseudonym as pseudonym_of
from onceward.ports import Clock, Row, Store
from onceward.records import AuditEvent
from onceward.stores.sql_loader import load_queries
from onceward.stores.tenant_tables import (
    Columns,
    TenantTable,
    columns_of,
    covered_tables,
    delete_batch,
    plain_name,
    read_rows,
    uncovered_tables,
)
from onceward.tenants import OPERATOR_TENANT
from onceward_protocol.ids import new_id, new_request_id

__all__ = [
    "EXPORT_FORMAT",
    "OPERATOR_TENANT",
    "Erased",
    "StillWrittenError",
    "TenantData",
    "export_json",
]

EXPORT_FORMAT: Final = 1
"""The version of the lines of an export, for programs that read them."""

_STARTED: Final = "tenant.erase_started"
_EXPORTED: Final = "tenant.exported"
_OK: Final = 200
_ACCEPTED: Final = 202
# Rows that are written while others are deleted are found by the next pass.
_PASSES: Final = 3


class StillWrittenError(OncewardError):
    """Rows of the tenant were written as fast as they were erased."""


@dataclass(frozen=True, slots=True)
class Erased:
    """How many rows of each table were erased, how many values in Redis, and the audit event."""

    rows: dict[str, int]
    cached: int | None
    audit_id: str


class TenantData:
    """The tables that hold rows of tenants, in the order in which rows are deleted."""

    def __init__(self, store: Store, clock: Clock, tables: dict[TenantTable, Columns]) -> None:
        """Use ``open`` instead."""
        self._store = store
        self._clock = clock
        self._tables = tables

    @classmethod
    async def open(cls, store: Store, clock: Clock, others: Sequence[TenantTable] = ()) -> Self:
        """Look at the library's tables and ``others`` in an open store.

        Raises ``ConfigurationError`` for a table that does not exist or cannot be used.
        """
        return cls(store, clock, await covered_tables(store, others))

    async def uncovered(self) -> list[str]:
        """Return tables with a column ``tenant`` that are neither the library's nor were given."""
        return await uncovered_tables(self._store, list(self._tables))

    async def count(self, tenant: str, *, most: int | None = None) -> dict[str, int]:
        """Return the number of rows of a tenant by table; with ``most``, counted up to it."""
        counts = {}
        limit = "" if most is None else f" LIMIT {int(most)}"
        for table in self._tables:
            rows = await self._store.read(
                f"SELECT count(*) AS n FROM (SELECT 1 AS one FROM {table.name}"  # noqa: S608 - checked
                f" WHERE {table.column} = :tenant{limit}) AS counted",
                {"tenant": tenant},
            )
            counts[plain_name(table.name)] = int(rows[0]["n"])
        return counts

    async def rows(self, tenant: str) -> AsyncIterator[tuple[str, Row]]:
        """Yield every row with the name of its table. Reads one page at a time.

        Each page is of the instant at which it is read.
        """
        for table, columns in self._tables.items():
            async for row in read_rows(self._store, table, columns, tenant):
                yield plain_name(table.name), row

    async def note_export(self, tenant: str, *, actor: str, reason: str) -> None:
        """Write an audit event, in the trail of the tenant, before its rows are exported."""
        pseudonym = await pseudonym_of(self._store, tenant)
        await self._audit(_EXPORTED, _OK, pseudonym, actor, reason, tenant=tenant)

    async def erase(
        self,
        tenant: str,
        *,
        actor: str,
        reason: str,
        forget_cached: Callable[[str], Awaitable[int]] | None = None,
        on_progress: Callable[[str, int], None] = lambda _table, _rows: None,
    ) -> Erased:
        """Delete every row of a tenant in small batches, its sessions, then what caches hold.

        May be interrupted and run again. Two audit events under ``OPERATOR_TENANT`` say that an
        erasure began and ended; they have a keyed hash of the tenant's name instead of the name.
        ``forget_cached`` deletes the tenant's values in Redis and returns how many.

        Raises ``StillWrittenError`` if rows are written as fast as they are deleted.
        """
        if not tenant:
            raise ConfigurationError("the name of the tenant is empty")
        pseudonym = await pseudonym_of(self._store, tenant)
        await self._audit(_STARTED, _ACCEPTED, pseudonym, actor, reason)
        if self._store.name == "sqlite":
            # Otherwise deleted rows stay readable in free pages of the file.
            await self._store.write("PRAGMA secure_delete = ON")
        erased = dict.fromkeys((plain_name(table.name) for table in self._tables), 0)
        for _ in range(_PASSES):
            for table, columns in self._tables.items():
                name = plain_name(table.name)
                while batch := await delete_batch(self._store, table, columns, tenant):
                    erased[name] += batch
                    on_progress(name, erased[name])
            if not any((await self.count(tenant)).values()):
                break
        else:
            raise StillWrittenError(
                "rows of this tenant are written while they are erased: end its access, then run "
                "the command again"
            )
        await self._end_sessions(tenant)
        # The new epoch makes memory and Redis forget all records: from here on none is replayed.
        # It comes after the deletion, or a server could cache a record in between.
        said = f"{reason} ({sum(erased.values())} rows)"
        audit_id = await self._audit(ERASED, _OK, pseudonym, actor, said, renew_epoch=True)
        # Servers write their log of requests in the background. From the event on they drop rows of
        # this tenant; what they have written since the last pass is deleted here.
        log = self._store.table_names.table("request_log")
        if plain_name(log) in erased:
            erased[plain_name(log)] += await self._delete_log(log, tenant)
        cached = None if forget_cached is None else await forget_cached(tenant)
        if self._store.name == "sqlite":
            # The log still has the rows as they were. A server that reads keeps it a while longer.
            with suppress(StoreError):
                await self._store.read("PRAGMA wal_checkpoint(TRUNCATE)")
        return Erased(erased, cached, audit_id)

    async def is_erased(self, tenant: str) -> bool:
        """Return whether an erasure of the tenant has begun or ended."""
        events = self._store.table_names.table("audit_events")
        rows = await self._store.read(
            f"SELECT 1 AS found FROM {events} WHERE tenant = :operator"  # noqa: S608 - checked
            " AND endpoint IN (:started, :erased) AND payload_hash = :pseudonym LIMIT 1",
            {
                "operator": OPERATOR_TENANT,
                "started": _STARTED,
                "erased": ERASED,
                "pseudonym": await pseudonym_of(self._store, tenant),
            },
        )
        return bool(rows)

    async def _delete_log(self, name: str, tenant: str) -> int:
        """Delete rows of the log of requests; return how many."""
        deleted = 0
        for table, columns in self._tables.items():
            while table.name == name and (
                batch := await delete_batch(self._store, table, columns, tenant)
            ):
                deleted += batch
        return deleted

    async def _end_sessions(self, tenant: str) -> None:
        """End the sessions of the console that are for this tenant: they contain its name."""
        table = self._store.table_names.table("console_sessions")
        if not (await columns_of(self._store, table)).types:
            return
        rows = await self._store.read(
            f"SELECT id_hash, tenants FROM {table} WHERE tenants <> 'null'"  # noqa: S608 - checked
        )
        for row in rows:
            if tenant in json.loads(row["tenants"]):
                await self._store.write(
                    f"DELETE FROM {table} WHERE id_hash = :id_hash",  # noqa: S608 - checked
                    {"id_hash": row["id_hash"]},
                )

    async def _audit(
        self,
        what: str,
        status: int,
        pseudonym: str,
        actor: str,
        reason: str,
        *,
        renew_epoch: bool = False,
        tenant: str = OPERATOR_TENANT,
    ) -> str:
        now = self._clock.now()
        request_id = new_request_id()
        event = AuditEvent(
            id=new_id(now),
            tenant=tenant,
            actor=actor,
            endpoint=what,
            payload_hash=pseudonym,
            status=status,
            request_id=request_id,
            correlation_id=request_id,
            created_at=now,
            resource=f"tenant:{pseudonym[:16]}",
            reason=reason,
        )
        unit: Any = await self._store.begin()
        try:
            if renew_epoch:
                names = self._store.table_names
                sql = load_queries("onceward.stores", "records.sql", names=names)
                await unit.statements.execute(sql["renew_cache_epoch"], {"epoch": new_epoch()})
            await unit.commit(None, event)
        except BaseException:
            await unit.rollback()
            raise
        return event.id


def export_json(value: object) -> Any:
    """Return a value that JSON has no type for: instants in UTC, bytes as text if they are."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        case bytes() | memoryview():
            data = bytes(value)
            try:
                return data.decode()
            except UnicodeDecodeError:
                return {"base64": base64.b64encode(data).decode()}
        case _:
            return str(value)
