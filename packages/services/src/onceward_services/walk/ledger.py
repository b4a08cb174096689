"""The energy ledger: credits for steps, debits for purchases. The balance is the sum of both.

The balance is never below zero. What a walker spends beyond it, against the provisional credit of
open days, is *held*: it becomes a debit when a settled day pays for it, and disappears when it is
refunded. What is taken back after it was spent is a *debt*, which the next credits pay.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from onceward import Transaction
from onceward.ports import Row
from onceward.stores.sql_loader import load_queries
from onceward_services.walk.errors import walk_error
from onceward_services.walk.walkers import instant, update_walker

__all__ = [
    "Hold",
    "Spent",
    "book",
    "credit",
    "debit",
    "list_holds",
    "pay_holds",
    "release_hold",
    "schedule_hold_refund",
    "spend",
    "spendable_energy",
]

_DEBT = "debt"


@dataclass(frozen=True, slots=True)
class Spent:
    """The balance after something was bought, and whether open days have to pay for it."""

    balance: int
    is_held: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """Energy spent against open days. ``reason`` and ``reference`` are those of the later debit."""

    reason: str
    reference: str
    amount: int
    refund_due_at: datetime | None


def spendable_energy(balance: int, provisional: int, *, held: int, debt: int) -> int:
    """Return the balance and the credit of open days, minus what is spent of them already."""
    return max(0, balance + provisional - held - debt)


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
    """Spend energy and return the balance, or raise ``INSUFFICIENT_ENERGY``. Booked once."""
    spent = await spend(tx, tenant, amount, reason=reason, reference=reference, now=now)
    return spent.balance


async def spend(
    tx: Transaction, tenant: str, amount: int, *, reason: str, reference: str, now: datetime
) -> Spent:
    """Spend energy, or raise ``INSUFFICIENT_ENERGY``. The same reason and reference count once.

    The balance pays if it covers all of it; otherwise all of it is held against open days.
    """
    if amount < 0:
        raise ValueError("a debit cannot be negative: use credit or book")
    found = await _find(tx, tenant, reason, reference)
    balance = int(found["energy_balance"])
    if found["seq"] is not None or found["hold_seq"] is not None:
        return Spent(balance, found["hold_seq"] is not None)
    spendable = spendable_energy(
        balance,
        found["provisional_energy"],
        held=found["energy_held"],
        debt=found["energy_debt"],
    )
    if spendable < amount:
        raise walk_error(
            "INSUFFICIENT_ENERGY",
            f"this costs {amount} energy, and there is {spendable} to spend",
            energyRequired=amount,
            energyBalance=balance,
            energySpendable=spendable,
        )
    if amount <= balance:
        balance = await _add(tx, tenant, -amount, reason=reason, reference=reference, now=now)
        return Spent(balance, is_held=False)
    await tx.execute(
        _sql("add_hold"),
        {
            "tenant": tenant,
            "reason": reason,
            "reference": reference,
            "amount": amount,
            "now": now,
        },
    )
    await update_walker(tx, tenant, now, held=amount)
    return Spent(balance, is_held=True)


async def book(
    tx: Transaction, tenant: str, delta: int, *, reason: str, reference: str, now: datetime
) -> int:
    """Book a change of either sign, such as a correction, and return the balance.

    The caller has locked the walker. An entry with this reason and reference is booked only once.
    A correction takes what is there; the rest is a debt, which credits pay from then on.
    """
    found = await _find(tx, tenant, reason, reference)
    balance, debt = int(found["energy_balance"]), int(found["energy_debt"])
    if found["seq"] is not None:
        return balance
    if delta < 0:
        taken = min(balance, -delta)
        owed = -delta - taken
        return await _add(
            tx, tenant, -taken, reason=reason, reference=reference, now=now, debt=owed
        )
    balance = await _add(tx, tenant, delta, reason=reason, reference=reference, now=now)
    paid = min(balance, debt)
    if paid:
        # Named after the credit that pays it, which is booked once.
        balance = await _add(
            tx,
            tenant,
            -paid,
            reason=_DEBT,
            reference=f"{reason}:{reference}",
            now=now,
            debt=-paid,
        )
    return balance


# -- energy that open days have to pay ------------------------------------------------------------


async def list_holds(tx: Transaction, tenant: str) -> list[Hold]:
    """Return a walker's spending against open days, in the order of the actions."""
    rows = await tx.fetch_all(_sql("list_holds"), {"tenant": tenant})
    return [
        Hold(
            row["reason"],
            row["reference"],
            row["amount"],
            None if row["refund_due_at"] is None else instant(row["refund_due_at"]),
        )
        for row in rows
    ]


async def pay_holds(
    tx: Transaction,
    tenant: str,
    holds: Collection[Hold],
    balance: int,
    *,
    now: datetime,
) -> list[Hold]:
    """Turn holds into debits in this order, as far as the balance goes; returns the others."""
    unpaid = list(holds)
    while unpaid and unpaid[0].amount <= balance:
        hold = unpaid.pop(0)
        await release_hold(tx, tenant, hold.reason, hold.reference, now)
        balance = await _add(
            tx, tenant, -hold.amount, reason=hold.reason, reference=hold.reference, now=now
        )
    return unpaid


async def release_hold(
    tx: Transaction, tenant: str, reason: str, reference: str, now: datetime
) -> int:
    """Delete a hold and return its amount; 0 if there is none."""
    row = await tx.fetch_one(
        _sql("remove_hold"), {"tenant": tenant, "reason": reason, "reference": reference}
    )
    if row is None:
        return 0
    await update_walker(tx, tenant, now, held=-row["amount"])
    return int(row["amount"])


async def schedule_hold_refund(
    tx: Transaction, tenant: str, hold: Hold, due_at: datetime | None
) -> None:
    """Schedule the refund of a hold that is not an allocation's; None cancels it."""
    values = {"tenant": tenant, "reason": hold.reason, "reference": hold.reference}
    await tx.execute(_sql("schedule_hold_refund"), values | {"due_at": due_at})


async def _find(tx: Transaction, tenant: str, reason: str, reference: str) -> Row:
    row = await tx.fetch_one(
        _sql("find_entry"), {"tenant": tenant, "reason": reason, "reference": reference}
    )
    if row is None:
        raise LookupError("the walker has no row: call lock_walker first")
    return row


async def _add(
    tx: Transaction,
    tenant: str,
    delta: int,
    *,
    reason: str,
    reference: str,
    now: datetime,
    debt: int = 0,
) -> int:
    walker = await update_walker(tx, tenant, now, energy=delta, entries=1, debt=debt)
    await tx.execute(
        _sql("add_entry"),
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


def _sql(name: str) -> str:
    return load_queries("onceward_services.walk")[name]
