"""Which tenants were erased, and when: audit events that name them by a hash only."""

import hmac
from collections.abc import Collection
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

from onceward.ports import Store
from onceward.tenants import OPERATOR_TENANT
from onceward_protocol.ids import new_id

ERASED: Final = "tenant.erased"
"""The endpoint of the audit event of an erasure."""

# Of an id, up to its milliseconds.
_TIME_CHARS: Final = 13


async def erased_since(
    store: Store, tenants: Collection[str], since: datetime
) -> dict[str, datetime]:
    """Return which of these tenants were erased after an instant, and when last."""
    events = store.table_names.table("audit_events")
    rows = await store.read(
        # Ids begin with their time: so only the newest events are read.
        f"SELECT payload_hash, created_at FROM {events} WHERE tenant = :operator"  # noqa: S608
        " AND id >= :first AND endpoint = :erased ORDER BY created_at",
        {
            "operator": OPERATOR_TENANT,
            "first": new_id(since)[:_TIME_CHARS],
            "erased": ERASED,
        },
    )
    if not rows:
        return {}
    names = dict(zip(await _pseudonyms(store, tenants), tenants, strict=True))
    return {
        names[row["payload_hash"]]: _instant(row["created_at"])
        for row in rows
        if row["payload_hash"] in names
    }


async def erased_at(store: Store, tenant: str) -> datetime | None:
    """Return when this tenant was erased last, as the audit events say; None if it was not."""
    events = store.table_names.table("audit_events")
    rows = await store.read(
        f"SELECT max(created_at) AS erased FROM {events} WHERE tenant = :operator"  # noqa: S608
        " AND endpoint = :erased AND payload_hash = :pseudonym",
        {
            "operator": OPERATOR_TENANT,
            "erased": ERASED,
            "pseudonym": await pseudonym(store, tenant),
        },
    )
    erased = rows[0]["erased"]
    return None if erased is None else _instant(erased)


def _instant(value: Any) -> datetime:
    found: datetime = datetime.fromisoformat(value) if isinstance(value, str) else value
    return found


async def pseudonym(store: Store, tenant: str) -> str:
    """Return a hash that only a holder of the database's secret can compute from a name."""
    (found,) = await _pseudonyms(store, [tenant])
    return found


async def _pseudonyms(store: Store, tenants: Collection[str]) -> list[str]:
    secret = await store.secret()
    names = (tenant.encode("utf-8", "surrogatepass") for tenant in tenants)
    return [hmac.new(secret, b"tenant " + name, sha256).hexdigest() for name in names]
