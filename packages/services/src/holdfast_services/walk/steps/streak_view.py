"""A walker's streak as it is told: settled days only, as it stands right now."""

from datetime import datetime

from holdfast.ports import Store
from holdfast_services.walk.steps.model import StreakView
from holdfast_services.walk.steps.repository import read_settled_streak
from holdfast_services.walk.steps.settings import StepSettings
from holdfast_services.walk.steps.streaks import StreakState, streak_on, today_in

__all__ = ["read_streak", "streak_view"]


async def read_streak(
    store: Store, tenant: str, *, settings: StepSettings, now: datetime
) -> StreakView:
    """Return a walker's streak, read outside any transaction.

    It is worked out anew, as it gets worse by itself while nobody writes.
    """
    found = await read_settled_streak(store, tenant)
    if found is None:
        return streak_view(StreakState(), 0)
    sync, last = found
    state = streak_on(last, today_in(sync.zone, now), sync.zone, settings.streak_rules)
    return streak_view(state, sync.total_steps)


def streak_view(state: StreakState, total_steps: int) -> StreakView:
    """Show a streak as it goes over the wire."""
    return StreakView(
        current_length_days=state.length,
        last_attested_date=state.last_attested,
        bonus_tier=state.tier,
        decay_at=state.decay_at,
        total_lifetime_steps=total_steps,
    )
