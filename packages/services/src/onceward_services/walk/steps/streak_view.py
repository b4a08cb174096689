"""The response model of a walker's streak."""

from datetime import datetime

from onceward.ports import Store
from onceward_services.walk.steps.model import StreakView
from onceward_services.walk.steps.repository import read_settled_streak
from onceward_services.walk.steps.settings import StepSettings
from onceward_services.walk.steps.streaks import StreakState, streak_on, today_in

__all__ = ["read_streak", "streak_view"]


async def read_streak(
    store: Store, tenant: str, *, settings: StepSettings, now: datetime
) -> StreakView:
    """Return a walker's streak of settled days, read outside any transaction.

    It is computed on each read, because a streak decays with time.
    """
    found = await read_settled_streak(store, tenant)
    if found is None:
        return streak_view(StreakState(), 0)
    sync, last = found
    state = streak_on(last, today_in(sync.zone, now), sync.zone, settings.streak_rules)
    return streak_view(state, sync.total_steps)


def streak_view(state: StreakState, total_steps: int) -> StreakView:
    """Return the response model of a streak."""
    return StreakView(
        current_length_days=state.length,
        last_attested_date=state.last_attested,
        bonus_tier=state.tier,
        decay_at=state.decay_at,
        total_lifetime_steps=total_steps,
    )
