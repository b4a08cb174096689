"""Decide about what is provisional: allocations, quest progress, and energy spent before its day.

Everything is computed from the tables under the walker's lock, so it may run at any time and as
often as it likes: after each settlement, and when something is due.

- What a day that was rejected has paid for is refunded after the grace period, unless the day is
  accepted before.
- Energy that open days should pay is debited when a settled day has credited enough, and refunded
  after the grace period if what is left of the open days does not cover it.
- The rest is confirmed once no day up to its action is open.
"""

from collections.abc import Iterable
from datetime import date, datetime
from typing import Final

import msgspec

from onceward import Transaction
from onceward_services.walk.catalogue import Catalogue
from onceward_services.walk.events import add_event
from onceward_services.walk.ledger import (
    Hold,
    list_holds,
    pay_holds,
    release_hold,
    schedule_hold_refund,
)
from onceward_services.walk.quests import (
    Unsettled,
    UnsettledQuest,
    confirm_quest,
    mark_quest,
    revert_due_quests,
    unsettled_quests,
)
from onceward_services.walk.steps.open_days import OpenDays, read_open_days
from onceward_services.walk.steps.repository import list_rejected_days, open_challenges
from onceward_services.walk.steps.settings import StepSettings
from onceward_services.walk.tree import (
    ALLOCATION,
    Allocation,
    cancel_refunds,
    confirm_allocations,
    covers_points,
    provisional_allocations,
    refund_due_allocations,
    schedule_refund,
)
from onceward_services.walk.walkers import find_walker, save_settle_due

__all__ = ["next_due_at", "refund_due", "settle_provisional", "take_back"]

MISSING: Final = "energy_missing"


async def refund_due(
    tx: Transaction, tenant: str, *, settings: StepSettings, now: datetime
) -> None:
    """Refund and revert what is due. The walker is locked."""
    await refund_due_allocations(tx, tenant, now, settings.catalogue)
    days = await _days(tx, tenant, settings, now)
    await revert_due_quests(tx, tenant, now, days, settings.catalogue)
    for hold in await _holds(tx, tenant):
        if hold.refund_due_at is not None and hold.refund_due_at <= now:
            await release_hold(tx, tenant, hold.reason, hold.reference, now)
            await _add_energy_event(tx, tenant, "energy.refunded", hold, now)


async def take_back(
    tx: Transaction, tenant: str, day: date, *, settings: StepSettings, now: datetime
) -> None:
    """Schedule what a rejected day takes back: what was done since then and is provisional."""
    days = await _days(tx, tenant, settings, now)
    due_at = now + settings.refund_grace
    nodes = [
        allocation.node_id
        for allocation in await provisional_allocations(tx, tenant)
        if days.day_of(allocation.acted_at) >= day
    ]
    if nodes:
        await schedule_refund(
            tx, tenant, nodes, due_at, rejected_day=day, catalogue=settings.catalogue, now=now
        )
    for quest in await unsettled_quests(tx, tenant):
        if quest.revert_due_at is None and _is_since(quest, day, days):
            await mark_quest(tx, tenant, quest, due_at=due_at, rejected_day=day)


async def settle_provisional(
    tx: Transaction, tenant: str, *, settings: StepSettings, now: datetime
) -> None:
    """Cancel, pay, schedule and confirm what the settled days allow. The walker is locked."""
    days = await _days(tx, tenant, settings, now)
    await _cancel(tx, tenant, days, settings=settings, now=now)
    unpaid = await _pay(tx, tenant, days, settings=settings, now=now)
    await _confirm_quests(tx, tenant, days, settings.catalogue, now)
    await _confirm_allocations(tx, tenant, days, unpaid, catalogue=settings.catalogue, now=now)


async def next_due_at(
    tx: Transaction, tenant: str, *, settings: StepSettings, now: datetime
) -> datetime | None:
    """Return when something is due next, and save it; None if nothing is."""
    days = await _days(tx, tenant, settings, now)
    allocations = await provisional_allocations(tx, tenant)
    quests = await unsettled_quests(tx, tenant)
    due = [
        *(a.refund_due_at for a in allocations),
        *(quest.revert_due_at for quest in quests),
        *(hold.refund_due_at for hold in await _holds(tx, tenant)),
        *(at for _, at in await open_challenges(tx, tenant)),
    ]
    acted = [a.acted_at for a in allocations if a.refund_due_at is None]
    for quest in quests:
        if quest.revert_due_at is None:
            acted += _times(quest)
    settles = min((at for at in map(days.settles_at, acted) if at is not None), default=None)
    await save_settle_due(tx, tenant, settles)
    return min((at for at in (*due, settles) if at is not None), default=None)


# -- one rule each --------------------------------------------------------------------------------


async def _cancel(
    tx: Transaction, tenant: str, days: OpenDays, *, settings: StepSettings, now: datetime
) -> None:
    """Cancel what a day takes back that is not rejected any more.

    If another rejected day takes it back too, that day's grace period counts.
    """
    allocations = [
        a for a in await provisional_allocations(tx, tenant) if a.rejected_day is not None
    ]
    quests = [q for q in await unsettled_quests(tx, tenant) if q.rejected_day is not None]
    if not allocations and not quests:
        return
    rejected = await list_rejected_days(tx, tenant, now - settings.refund_grace)
    still = {day for day, _ in rejected}
    for allocation in allocations:
        if allocation.rejected_day in still:
            continue
        await cancel_refunds(tx, tenant, [allocation.node_id])
        for day, at in rejected:
            if at >= allocation.allocated_at and days.day_of(allocation.acted_at) >= day:
                due_at = at + settings.refund_grace
                nodes = [allocation.node_id]
                await schedule_refund(
                    tx,
                    tenant,
                    nodes,
                    due_at,
                    rejected_day=day,
                    catalogue=settings.catalogue,
                    now=now,
                )
                break
    for quest in quests:
        if quest.rejected_day in still:
            continue
        other = next(
            ((day, at) for day, at in rejected if _is_since(quest, day, days)), (None, None)
        )
        due = None if other[1] is None else other[1] + settings.refund_grace
        await mark_quest(tx, tenant, quest, due_at=due, rejected_day=other[0])


async def _pay(
    tx: Transaction, tenant: str, days: OpenDays, *, settings: StepSettings, now: datetime
) -> set[str]:
    """Debit held energy as far as the balance goes; returns the nodes that are not paid.

    What neither the balance nor open days nor scheduled refunds cover is refunded after the grace
    period, newest first. While a day is in quarantine, nothing is: an admin may accept it.
    """
    walker = await find_walker(tx, tenant)
    if not walker.energy_held:
        return set()
    nodes = {str(a.seq): a for a in await provisional_allocations(tx, tenant)}

    def allocation_of(hold: Hold) -> Allocation | None:
        return nodes.get(hold.reference) if hold.reason == ALLOCATION else None

    holds = await list_holds(tx, tenant)
    lost = [h for h in holds if (a := allocation_of(h)) is not None and a.rejected_day is not None]
    wanted = [hold for hold in holds if hold not in lost]
    unpaid = await pay_holds(tx, tenant, wanted, walker.energy_balance, now=now)
    for hold in wanted:
        if hold not in unpaid and hold.reason != ALLOCATION:
            await _add_energy_event(tx, tenant, "energy.confirmed", hold, now)
    walker = await find_walker(tx, tenant)
    held = {hold.reference for hold in holds if hold.reason == ALLOCATION}
    returning = sum(
        a.energy_cost for ref, a in nodes.items() if a.rejected_day is not None and ref not in held
    )
    covered = walker.energy_balance + days.provisional_energy + returning - walker.energy_debt
    for hold in wanted:
        covered -= hold.amount if hold in unpaid else 0
        is_missing = hold in unpaid and covered < 0 and not days.is_quarantined()
        due_at = now + settings.refund_grace if is_missing else None
        await _schedule_missing(
            tx, tenant, hold, allocation_of(hold), due_at, catalogue=settings.catalogue, now=now
        )
    return {a.node_id for hold in (*lost, *unpaid) if (a := allocation_of(hold)) is not None}


async def _schedule_missing(
    tx: Transaction,
    tenant: str,
    hold: Hold,
    allocation: Allocation | None,
    due_at: datetime | None,
    *,
    catalogue: Catalogue,
    now: datetime,
) -> None:
    """Schedule the refund of a hold that nothing will pay, or cancel it; an earlier time stays."""
    scheduled = hold.refund_due_at if allocation is None else allocation.refund_due_at
    if (due_at is None) == (scheduled is None):
        return
    if allocation is None:
        await schedule_hold_refund(tx, tenant, hold, due_at)
    elif due_at is not None:
        nodes = [allocation.node_id]
        await schedule_refund(
            tx, tenant, nodes, due_at, reason=MISSING, catalogue=catalogue, now=now
        )
    elif allocation.refund_reason == MISSING:
        await _cancel_missing(tx, tenant, allocation, catalogue)


async def _cancel_missing(
    tx: Transaction, tenant: str, allocation: Allocation, catalogue: Catalogue
) -> None:
    """Cancel the refund of a node and of those that were to be refunded with it."""
    held = [a for a in await provisional_allocations(tx, tenant) if a.refund_reason == MISSING]
    affected = catalogue.with_dependents([allocation.node_id], [a.node_id for a in held])
    await cancel_refunds(tx, tenant, affected)


async def _confirm_quests(
    tx: Transaction, tenant: str, days: OpenDays, catalogue: Catalogue, now: datetime
) -> None:
    """Confirm progress whose days are settled, as far as its own and required quests are final."""
    left = {quest.quest_id: quest for quest in await unsettled_quests(tx, tenant)}
    quests = catalogue.quests
    while True:
        final = []
        for quest in left.values():
            known = quests.get(quest.quest_id)
            is_free = known is None or left.keys().isdisjoint(known.requires)
            unsettled = _still_open(quest, days, is_free=is_free)
            if unsettled != quest.unsettled:
                await confirm_quest(tx, tenant, quest, unsettled, now)
                left[quest.quest_id] = msgspec.structs.replace(quest, unsettled=unsettled)
            if not unsettled:
                final.append(quest.quest_id)
        if not final:
            return
        # Quests that require one of these may be final now.
        for quest_id in final:
            del left[quest_id]


def _still_open(quest: UnsettledQuest, days: OpenDays, *, is_free: bool) -> Unsettled:
    """Return the progress of a quest that is not final; a step waits for the steps before it."""
    if quest.revert_due_at is not None:
        return quest.unsettled
    steps: dict[int, datetime] = {}
    for step, at in sorted(quest.unsettled.steps.items()):
        if steps or days.is_open_up_to(at):
            steps[step] = at
    completed = quest.unsettled.completed
    is_final = is_free and not steps
    if completed is not None and is_final and not days.is_open_up_to(completed):
        completed = None
    return Unsettled(steps, completed)


async def _confirm_allocations(
    tx: Transaction,
    tenant: str,
    days: OpenDays,
    unpaid: set[str],
    *,
    catalogue: Catalogue,
    now: datetime,
) -> None:
    """Confirm allocations whose days are settled and whose nodes, points and energy are final."""
    left = await provisional_allocations(tx, tenant)
    walker = await find_walker(tx, tenant)
    if not left or walker.energy_debt:
        return
    confirmed: list[str] = []
    for allocation in list(left):
        others = [a for a in left if a is not allocation]
        node = catalogue.nodes.get(allocation.node_id)
        requires = () if node is None else node.requires
        if (
            allocation.refund_due_at is None
            and allocation.node_id not in unpaid
            and not days.is_open_up_to(allocation.acted_at)
            and not any(a.node_id in requires for a in others)
            and covers_points(walker.points_banked, others, walker.points_provisional)
        ):
            confirmed.append(allocation.node_id)
            left = others
    if confirmed:
        await confirm_allocations(tx, tenant, confirmed, now)


async def _add_energy_event(
    tx: Transaction, tenant: str, type_: str, hold: Hold, now: datetime
) -> None:
    """Say what became of energy spent on a sink; nodes have events about the allocation."""
    data = {"reason": hold.reason, "reference": hold.reference, "amount": hold.amount}
    await add_event(tx, tenant, type_, data, now)


# -- reading --------------------------------------------------------------------------------------


async def _days(tx: Transaction, tenant: str, settings: StepSettings, now: datetime) -> OpenDays:
    walker = await find_walker(tx, tenant)
    return await read_open_days(
        tx, tenant, walker.first_action_at, empty_after=settings.empty_day_after, now=now
    )


async def _holds(tx: Transaction, tenant: str) -> list[Hold]:
    walker = await find_walker(tx, tenant)
    return await list_holds(tx, tenant) if walker.energy_held else []


def _is_since(quest: UnsettledQuest, day: date, days: OpenDays) -> bool:
    return any(days.day_of(at) >= day for at in _times(quest))


def _times(quest: UnsettledQuest) -> Iterable[datetime]:
    completed = quest.unsettled.completed
    return [*quest.unsettled.steps.values(), *([] if completed is None else [completed])]
