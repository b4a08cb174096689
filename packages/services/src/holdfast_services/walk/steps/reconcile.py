"""Reconcile a day: assess its reports and apply the verdict.

Reconciliation is one transaction under the walker's lock and depends only on what is in the tables,
so running it twice, late or again after a crash has the same result. Only pending days are settled.
"""

from dataclasses import replace
from datetime import date, datetime
from typing import assert_never

from holdfast import Transaction
from holdfast.ports import Row
from holdfast_services.walk.catalogue import Catalogue
from holdfast_services.walk.events import add_event
from holdfast_services.walk.ledger import book
from holdfast_services.walk.steps.day_assessment import (
    Accepted,
    Quarantined,
    Rejected,
    Verdict,
    assess_day,
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
from holdfast_services.walk.steps.reviews import QUARANTINED_DAY, open_review, review_rejections
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
    """Settle a pending day; returns when the next refund is due. The walker is locked."""
    # Refunds that became due while no worker ran come first: a late verdict does not cancel them.
    await refund_due_allocations(tx, tenant, now, settings.catalogue)
    before = await find_day(tx, tenant, day)
    if before is None or before.status != "PENDING":
        return await next_refund_at(tx, tenant)
    readings, newest = await readings_of(tx, tenant, day)
    verdict = assess_day(day, readings, settings.step_limits, before.ruling)
    status, accepted = _outcome(verdict, before)
    is_attested = (
        before.is_attested
        if status == "QUARANTINED"
        else status == "ACCEPTED" and accepted >= settings.step_attested_threshold
    )
    energy = scaled(accepted, settings.step_energy_per_step)
    # The number makes each settlement of a day a separate ledger entry.
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
        await _schedule_refunds(tx, tenant, now + settings.refund_grace, settings.catalogue, now)
    elif status == "ACCEPTED" and balance >= 0 and attested_at is not None:
        await _confirm(tx, tenant, attested_at, settings=settings, now=now)
    return await next_refund_at(tx, tenant)


async def next_refund_at(tx: Transaction, tenant: str) -> datetime | None:
    """Return when the next refund is due, or None."""
    due = [a.refund_due_at for a in await provisional_allocations(tx, tenant)]
    return min((at for at in due if at is not None), default=None)


def _outcome(verdict: Verdict, before: DayLog) -> tuple[DayStatus, int]:
    match verdict:
        case Accepted(count):
            return "ACCEPTED", count
        case Quarantined():
            # What was accepted before stays until an admin decides.
            return "QUARANTINED", before.accepted_count
        case Rejected():
            return "REJECTED", 0
        case _:
            assert_never(verdict)


async def _book(tx: Transaction, tenant: str, change: int, *, reference: str, now: datetime) -> int:
    """Book the difference to the day's current energy, and return the balance."""
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
    """Recompute the streak from this day on; returns when a day was last settled as attested."""
    rules = settings.streak_rules
    before = await attested_before(tx, tenant, day)
    later = await attested_after(tx, tenant, day)
    known = {attested.day: attested for attested in later}
    days = [*([day] if is_attested else []), *known]
    if not is_attested:
        await set_streak_of_day(tx, tenant, day, None)
    for attested in extend_streak(before, days, rules):
        if known.get(attested.day) == attested:
            break  # later days are unchanged
        await set_streak_of_day(tx, tenant, attested.day, attested)
    sync = await find_sync(tx, tenant)
    if sync is None:
        raise LookupError("a walker with a reported day has no sync state")
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
    """Log a quarantine or rejection in the attestation log, and open a review."""
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
            listed = [{"code": reason} for reason in reasons]
            row = replace(row, verdict="QUARANTINED", code=reasons[0], summary={"reasons": listed})
            await add_attestation(tx, tenant, row, now)
            await open_review(tx, tenant, QUARANTINED_DAY, day=day, reasons=listed, now=now)
        case Rejected(reason, is_anti_cheat):
            row = replace(row, code=reason, is_anti_cheat=is_anti_cheat)
            await add_attestation(tx, tenant, row, now)
            if is_anti_cheat:
                await review_rejections(
                    tx,
                    tenant,
                    limit=settings.step_review_rejections,
                    window=settings.review_window,
                    now=now,
                )
        case _:
            assert_never(verdict)


async def _schedule_refunds(
    tx: Transaction, tenant: str, due_at: datetime, catalogue: Catalogue, now: datetime
) -> None:
    """Schedule the refund of provisional allocations after the grace period."""
    provisional = await provisional_allocations(tx, tenant)
    if provisional:
        await schedule_refund(
            tx, tenant, [a.node_id for a in provisional], due_at, catalogue=catalogue, now=now
        )


async def _confirm(
    tx: Transaction, tenant: str, attested_at: datetime, *, settings: StepSettings, now: datetime
) -> None:
    """Confirm allocations made before the last attested day was settled, if no day is pending.

    An allocation with a scheduled refund depends on a rejected day. It is confirmed only if that
    day is not rejected any more.
    """
    if await has_pending_steps(tx, tenant):
        return
    confirmed = [
        allocation
        for allocation in await provisional_allocations(tx, tenant)
        if allocation.allocated_at <= attested_at
    ]
    if any(a.refund_due_at is not None for a in confirmed) and await has_rejected_days(
        tx, tenant, now - settings.refund_grace
    ):
        confirmed = [a for a in confirmed if a.refund_due_at is None]
    if confirmed:
        await confirm_allocations(tx, tenant, [a.node_id for a in confirmed], now)
