"""The energy ledger: credits for steps, debits for allocations. The balance is the sum of both."""

from datetime import datetime

from holdfast import Transaction
from holdfast.stores.sql_loader import load_queries
from holdfast_services.walk.errors import walk_error
from holdfast_services.walk.walkers import update_walker

__all__ = ["book", "credit", "debit"]


async def credit(
    tx: Transaction, tenant: str, amount: int, *, reason: str, reference: str, now: datetime
) -> int:
    """Add energy and return the balance. The same reason and reference are booked once."""
    if amount < 0:
        raise ValueError("a credit cannot be negative: use debit or book")
    return await book(tx, tenant, amount, reason=reason, reference=reference, now=now)


async def debit(
    tx: Transaction, tenant: str, amount: int, *, reason: str, reference: str, now: datetime
) -> int:
    """Subtract energy and return the balance, or raise ``INSUFFICIENT_ENERGY``. Booked once."""
    if amount < 0:
        raise ValueError("a debit cannot be negative: use credit or book")
    balance, is_booked = await _find(tx, tenant, reason, reference)
    if is_booked:
        return balance
    if balance < amount:
        raise walk_error(
            "INSUFFICIENT_ENERGY",
            f"this costs {amount} energy, and the balance is {balance}",
            energyRequired=amount,
            energyBalance=balance,
        )
    return await _add(tx, tenant, -amount, reason=reason, reference=reference, now=now)


async def book(
    tx: Transaction, tenant: str, delta: int, *, reason: str, reference: str, now: datetime
) -> int:
    """Book a change of either sign, such as a correction, and return the balance.

    The caller has locked the walker. An entry with this reason and reference is booked only once.
    """
    balance, is_booked = await _find(tx, tenant, reason, reference)
    if is_booked:
        return balance
    return await _add(tx, tenant, delta, reason=reason, reference=reference, now=now)


async def _find(tx: Transaction, tenant: str, reason: str, reference: str) -> tuple[int, bool]:
    row = await tx.fetch_one(
        load_queries("holdfast_services.walk")["find_entry"],
        {"tenant": tenant, "reason": reason, "reference": reference},
    )
    if row is None:
        raise LookupError("the walker has no row: call lock_walker first")
    return row["energy_balance"], row["seq"] is not None


async def _add(
    tx: Transaction, tenant: str, delta: int, *, reason: str, reference: str, now: datetime
) -> int:
    walker = await update_walker(tx, tenant, now, energy=delta, entries=1)
    await tx.execute(
        load_queries("holdfast_services.walk")["add_entry"],
        {
            "tenant": tenant,
            "seq": walker.ledger_seq,
            "delta": delta,
            "reason": reason,
            "reference": reference,
            "balance_after": walker.energy_balance,
            "now": now,
        },
    )
    return walker.energy_balance
