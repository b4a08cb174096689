"""Reconcile a day: assess its reports and apply the verdict.

Reconciliation is one transaction under the walker's lock and depends only on what is in the tables,
so running it twice, late or again after a crash has the same result. Only pending days are settled.
"""

from dataclasses import replace
from datetime import date, datetime
from typing import assert_never

from onceward import Transaction
from onceward.ports import Row
from onceward_services.walk.events import add_event
from onceward_services.walk.ledger import book
from onceward_services.walk.provisional import (
    next_due_at,
    refund_due,
    settle_provisional,
    take_back,
)
from onceward_services.walk.steps.challenges import open_challenge
from onceward_services.walk.steps.day_assessment import (
    Accepted,
    Quarantined,
    Rejected,
    Verdict,
    assess_day,
)
from onceward_services.walk.steps.repository import (
    Attestation,
    DayLog,
    DayStatus,
    add_attestation,
    attested_after,
    attested_before,
    find_day,
    find_sync,
    neighbours_of,
    readings_of,
    save_streak,
    set_streak_of_day,
    settle_day_log,
)
from onceward_services.walk.steps.reviews import (
    QUARANTINED_DAY,
    close_reread_review,
    open_review,
    review_rejections,
)
from onceward_services.walk.steps.rules import scaled
from onceward_services.walk.steps.settings import StepSettings
from onceward_services.walk.steps.streaks import extend_streak, streak_on, today_in
from onceward_services.walk.walkers import find_walker

__all__ = ["settle_day"]


async def settle_day(
    tx: Transaction, tenant: str, day: date, *, settings: StepSettings, now: datetime
) -> datetime | None:
    """Settle a pending day; returns when something is due next. The walker is locked."""
    # Refunds that became due while no worker ran come first: a late verdict does not cancel them.
    await refund_due(tx, tenant, settings=settings, now=now)
    before = await find_day(tx, tenant, day)
    if before is not None and (before.status == "PENDING" or _is_unanswered(before, now)):
        await _settle(tx, tenant, day, before, settings=settings, now=now)
    await settle_provisional(tx, tenant, settings=settings, now=now)
    return await next_due_at(tx, tenant, settings=settings, now=now)


async def _settle(
    tx: Transaction,
    tenant: str,
    day: date,
    before: DayLog,
    *,
    settings: StepSettings,
    now: datetime,
) -> None:
    elsewhere, zones = await neighbours_of(tx, tenant, day)
    readings, newest = await readings_of(tx, tenant, day, zones)
    if before.reread_number is not None:
        readings = [reading for reading in readings if reading.number >= before.reread_number]
    verdict = assess_day(day, readings, settings.step_limits, before.ruling, elsewhere=elsewhere)
    if isinstance(verdict, Quarantined) and _is_unanswered(before, now):
        verdict = _without_response(before)
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
    await _settle_streak(
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
    if isinstance(verdict, Quarantined) and before.challenge_id is None and settings.reread_within:
        await open_challenge(
            tx,
            tenant,
            day,
            reasons=verdict.reasons,
            due_at=now + settings.reread_within,
            now=now,
        )
    if status == "ACCEPTED" and before.reread_number is not None:
        await close_reread_review(tx, tenant, day, now)
    if status == "REJECTED":
        await take_back(tx, tenant, day, settings=settings, now=now)


def _is_unanswered(before: DayLog, now: datetime) -> bool:
    """Return whether the day was to be read again by now, and was not."""
    return (
        before.reread_number is None
        and before.challenge_due_at is not None
        and before.challenge_due_at <= now
    )


def _without_response(before: DayLog) -> Verdict:
    """Return the verdict about an odd day that was not read again in time.

    What was accepted before it became odd stays; if that is nothing, the day is rejected. The
    review stays open: an admin may still accept the day.
    """
    if before.accepted_count:
        return Accepted(before.accepted_count)
    return Rejected("REREAD_UNANSWERED")


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
        return (await find_walker(tx, tenant)).energy_balance
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
) -> None:
    """Recompute the streak from this day on."""
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
