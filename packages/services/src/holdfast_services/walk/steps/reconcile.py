"""Reconciliation: a day's reports become a verdict, and the verdict has consequences.

All of it is one transaction under the walker's lock, and all of it is computed from what is in the
tables: run twice, late, or again after a crash, it comes to the same end. A day is settled only
while it is pending.
"""

from dataclasses import replace
from datetime import date, datetime
from typing import assert_never

from holdfast import Transaction
from holdfast.ports import Row
from holdfast_services.walk.events import add_event
from holdfast_services.walk.ledger import book
from holdfast_services.walk.steps.day_assessment import (
    Accepted,
    Quarantined,
    Rejected,
    Verdict,
    judge,
)
from holdfast_services.walk.steps.repository import (
    Attestation,
    DayLog,
    DayStatus,
    add_attestation,
    attested_after,
    attested_before,
    find_day,
    find_sync,
    has_pending_steps,
    has_rejected_days,
    readings_of,
    save_streak,
    set_streak_of_day,
    settle_day_log,
)
from holdfast_services.walk.steps.reviews import QUARANTINED_DAY, note_rejection, open_review
from holdfast_services.walk.steps.rules import scaled
from holdfast_services.walk.steps.settings import StepSettings
from holdfast_services.walk.steps.streaks import extend_streak, streak_on, today_in
from holdfast_services.walk.tree import (
    confirm_allocations,
    provisional_allocations,
    refund_due_allocations,
    schedule_refund,
)
from holdfast_services.walk.walkers import lock_walker

__all__ = ["next_refund_at", "settle_day"]


async def settle_day(
    tx: Transaction, tenant: str, day: date, *, settings: StepSettings, now: datetime
) -> datetime | None:
    """Settle a pending day; returns when a refund is due, if one is. The walker is locked."""
    # What was due while nobody worked has had its grace: a late verdict does not bring it back.
    await refund_due_allocations(tx, tenant, now)
    before = await find_day(tx, tenant, day)
    if before is None or before.status != "PENDING":
        return await next_refund_at(tx, tenant)
    readings, newest = await readings_of(tx, tenant, day)
    verdict = judge(day, readings, settings.step_limits, before.ruling)
    status, accepted = _outcome(verdict, before)
    is_attested = (
        before.is_attested
        if status == "QUARANTINED"
        else status == "ACCEPTED" and accepted >= settings.step_attested_threshold
    )
    energy = scaled(accepted, settings.step_energy_per_step)
    # The number makes it another booking each time the day is settled anew.
    reference = f"{day.isoformat()}#{before.settlements + 1}"
    balance = await _book(tx, tenant, energy - before.credited_energy, reference=reference, now=now)
    await settle_day_log(
        tx,
        tenant,
        day,
        status=status,
        accepted_count=accepted,
        credited_energy=energy,
        now=now,
    )
    attested_at = await _settle_streak(
        tx,
        tenant,
        day,
        is_attested=is_attested,
        steps=accepted - before.accepted_count,
        settings=settings,
        now=now,
    )
    await _record_doubts(tx, tenant, day, verdict, newest, settings=settings, now=now)
    data = {"day": day.isoformat(), "acceptedCount": accepted, "attested": is_attested}
    await add_event(tx, tenant, f"steps.{status.lower()}", data | {"energyBalance": balance}, now)
    if status == "REJECTED":
        await _schedule_refunds(tx, tenant, now + settings.refund_grace)
    elif status == "ACCEPTED" and balance >= 0 and attested_at is not None:
        await _confirm(tx, tenant, attested_at, settings=settings, now=now)
    return await next_refund_at(tx, tenant)


async def next_refund_at(tx: Transaction, tenant: str) -> datetime | None:
    """Return when the next allocation is to be given back, if any is."""
    due = [a.refund_due_at for a in await provisional_allocations(tx, tenant)]
    return min((at for at in due if at is not None), default=None)


def _outcome(verdict: Verdict, before: DayLog) -> tuple[DayStatus, int]:
    match verdict:
        case Accepted(count):
            return "ACCEPTED", count
        case Quarantined():
            # Neither forward nor back: what was accepted before stays until a person decides.
            return "QUARANTINED", before.accepted_count
        case Rejected():
            return "REJECTED", 0
        case _:
            assert_never(verdict)


async def _book(tx: Transaction, tenant: str, change: int, *, reference: str, now: datetime) -> int:
    """Bring the ledger to what the day is worth now, and return the balance."""
    if change == 0:
        return (await lock_walker(tx, tenant, now)).energy_balance
    return await book(tx, tenant, change, reason="steps", reference=reference, now=now)


async def _settle_streak(
    tx: Transaction,
    tenant: str,
    day: date,
    *,
    is_attested: bool,
    steps: int,
    settings: StepSettings,
    now: datetime,
) -> datetime | None:
    """Write the streak anew from this day on; returns when a day last came out attested."""
    rules = settings.streak_rules
    before = await attested_before(tx, tenant, day)
    later = await attested_after(tx, tenant, day)
    known = {attested.day: attested for attested in later}
    days = [*([day] if is_attested else []), *known]
    if not is_attested:
        await set_streak_of_day(tx, tenant, day, None)
    for attested in extend_streak(before, days, rules):
        if known.get(attested.day) == attested:
            break  # from here on everything follows as it did
        await set_streak_of_day(tx, tenant, attested.day, attested)
    sync = await find_sync(tx, tenant)
    if sync is None:
        raise LookupError("a walker with a day was never heard of")
    last = await attested_before(tx, tenant, None)
    state = streak_on(last, today_in(sync.zone, now), sync.zone, rules)
    attested_at = now if is_attested else sync.attested_at
    await save_streak(tx, tenant, state, steps=steps, attested_at=attested_at)
    return attested_at


async def _record_doubts(
    tx: Transaction,
    tenant: str,
    day: date,
    verdict: Verdict,
    newest: Row,
    *,
    settings: StepSettings,
    now: datetime,
) -> None:
    """Write a doubt into the attestation log, and put it before a person."""
    row = Attestation(
        verdict="REJECTED",
        day=day,
        token_id=newest["token_id"],
        payload_hash=f"day:{day.isoformat()}:{newest['number']}",
        request_id=newest["request_id"],
    )
    match verdict:
        case Accepted():
            return
        case Quarantined(reasons):
            told = [{"code": reason} for reason in reasons]
            row = replace(row, verdict="QUARANTINED", code=reasons[0], summary={"reasons": told})
            await add_attestation(tx, tenant, row, now)
            await open_review(tx, tenant, QUARANTINED_DAY, day=day, reasons=told, now=now)
        case Rejected(reason, is_anti_cheat):
            row = replace(row, code=reason, is_anti_cheat=is_anti_cheat)
            await add_attestation(tx, tenant, row, now)
            if is_anti_cheat:
                await note_rejection(
                    tx,
                    tenant,
                    limit=settings.step_review_rejections,
                    window=settings.review_window,
                    now=now,
                )
        case _:
            assert_never(verdict)


async def _schedule_refunds(tx: Transaction, tenant: str, due_at: datetime) -> None:
    """Have what was taken while this day was believed given back after the grace."""
    provisional = await provisional_allocations(tx, tenant)
    if provisional:
        await schedule_refund(tx, tenant, [a.node_id for a in provisional], due_at)


async def _confirm(
    tx: Transaction, tenant: str, attested_at: datetime, *, settings: StepSettings, now: datetime
) -> None:
    """Let allocations stand once a day came out attested and nothing they may rest on is open.

    One whose refund is scheduled rests on a day that was rejected; another good day does not make
    up for it. It stands again only if that day does.
    """
    if await has_pending_steps(tx, tenant):
        return
    state = [
        allocation
        for allocation in await provisional_allocations(tx, tenant)
        if allocation.allocated_at <= attested_at
    ]
    if any(a.refund_due_at is not None for a in state) and await has_rejected_days(
        tx, tenant, now - settings.refund_grace
    ):
        state = [a for a in state if a.refund_due_at is None]
    if state:
        await confirm_allocations(tx, tenant, [a.node_id for a in state], now)
