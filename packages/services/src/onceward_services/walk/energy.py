"""Spend energy on what the app offers, and read the ledger of a walker."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from onceward import Transaction
from onceward.ports import Store
from onceward.stores.sql_loader import load_queries
from onceward_protocol.ids import new_id
from onceward_services.walk.errors import walk_error
from onceward_services.walk.events import add_event
from onceward_services.walk.ledger import spend
from onceward_services.walk.suspension import lock_active_walker
from onceward_services.walk.walkers import instant

__all__ = ["LedgerEntry", "LedgerPage", "Spent", "read_ledger", "spend_energy"]

SPEND_PREFIX = "spend."
"""Reasons of ledger entries are ``spend.combat`` and so on, which no other booking has."""


class Spent(msgspec.Struct, frozen=True):
    """Energy that was spent, and the balance after it."""

    id: str
    energy_balance: int
    is_provisional: bool


class LedgerEntry(msgspec.Struct, frozen=True):
    """One booking. ``seq`` grows by one; the deltas up to it add up to ``balance_after``."""

    seq: int
    delta: int
    reason: str
    reference: str
    balance_after: int
    created_at: datetime


class LedgerPage(msgspec.Struct, frozen=True):
    """The balance and some entries of one instant, newest first."""

    energy_balance: int
    entries: Sequence[LedgerEntry]


async def spend_energy(
    tx: Transaction,
    tenant: str,
    sink: str,
    amount: int,
    *,
    sinks: Sequence[str],
    acted_at: datetime,
    now: datetime,
) -> Spent:
    """Spend energy on a sink of the app, or raise ``INSUFFICIENT_ENERGY``. Locks the walker.

    Energy that open days have promised can be spent too; it is held until they are settled.

    Raises ``UNKNOWN_SINK`` for one that is not in ``sinks``.
    """
    if sink not in sinks:
        raise walk_error("UNKNOWN_SINK", f"there is no sink {sink!r}", sinks=list(sinks))
    await lock_active_walker(tx, tenant, now, min(acted_at, now))
    # A new id, not the request's key: after a key's record has expired, a request with the same
    # key is another one, and has to pay.
    spend_id = new_id(now)
    spent = await spend(tx, tenant, amount, reason=SPEND_PREFIX + sink, reference=spend_id, now=now)
    data = {
        "spendId": spend_id,
        "sink": sink,
        "amount": amount,
        "provisional": spent.is_held,
        "energyBalance": spent.balance,
    }
    await add_event(tx, tenant, "energy.spent", data, now)
    return Spent(spend_id, spent.balance, spent.is_held)


async def read_ledger(store: Store, tenant: str, *, before: int, limit: int) -> LedgerPage:
    """Return up to ``limit`` entries before the entry ``before``, newest first."""
    rows = await store.read(
        load_queries("onceward_services.walk", "account.sql")["ledger_page"],
        {"tenant": tenant, "before": before, "limit": limit},
    )
    if not rows:
        return LedgerPage(0, [])
    entries = [
        LedgerEntry(
            row["seq"],
            row["delta"],
            row["reason"],
            row["reference"],
            row["balance_after"],
            instant(row["created_at"]),
        )
        for row in rows
        if row["seq"] is not None
    ]
    return LedgerPage(rows[0]["energy_balance"], entries)
