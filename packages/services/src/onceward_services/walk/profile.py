"""Read a walker's points, energy and streak."""

from datetime import date, datetime

import msgspec

from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_services.walk.ledger import spendable_energy
from onceward_services.walk.steps.rules import find_zone
from onceward_services.walk.steps.streaks import (
    AttestedDay,
    StreakRules,
    StreakState,
    streak_on,
    today_in,
)

__all__ = ["Profile", "profile_of", "read_profile"]


class Profile(msgspec.Struct, frozen=True):
    """A consistent snapshot of a walker."""

    points_banked: int = 0
    energy_balance: int = 0
    last_event_id: int = 0
    streak: StreakState = StreakState()
    total_steps: int = 0
    points_provisional: int = 0
    provisional_energy: int = 0
    spendable_energy: int = 0


async def read_profile(store: Store, tenant: str, rules: StreakRules, now: datetime) -> Profile:
    """Read a walker; an unknown walker has an empty profile."""
    rows = await store.read(load_queries("onceward_services.walk")["profile"], {"tenant": tenant})
    if not rows:
        return Profile()
    return profile_of(rows[0], rules, now)


def profile_of(row: Row, rules: StreakRules, now: datetime) -> Profile:
    """Return the profile of a row of the query ``profile``."""
    return Profile(
        points_banked=row["points_banked"],
        energy_balance=row["energy_balance"],
        last_event_id=row["event_seq"],
        streak=_streak(row, rules, now),
        total_steps=row["total_lifetime_steps"] or 0,
        points_provisional=row["points_provisional"],
        provisional_energy=row["provisional_energy"],
        spendable_energy=spendable_energy(
            row["energy_balance"],
            row["provisional_energy"],
            held=row["energy_held"],
            debt=row["energy_debt"],
        ),
    )


def _streak(row: Row, rules: StreakRules, now: datetime) -> StreakState:
    """Return the streak as of today, in the time zone of the walker's last report."""
    if row["day"] is None or row["streak_length"] is None:
        return StreakState()
    zone = find_zone(row["tz"])
    day = date.fromisoformat(row["day"])
    last = AttestedDay(day, row["streak_length"], row["streak_tier"])
    return streak_on(last, today_in(zone, now), zone, rules)
