"""Reconciliation of days, streaks and energy."""

import asyncio
import random
from datetime import date, timedelta

import pytest

from .fixtures import OpenGame
from .settlement_fixtures import backwards, outcome
from .step_fixtures import PHONE, TODAY, WATCH, Stepping, days_ago, stepping

# -- verdicts --------------------------------------------------------------------------------------


async def test_a_day_is_settled_a_minute_after_the_first_report_and_once(
    open_game: OpenGame,
) -> None:
    async with stepping(open_game, step_reconcile_delay_seconds=60) as steps:
        for count in (1000, 2000, 3000):
            await steps.walk(count=count, hours=(6, 8 + count / 1000))
        await steps.walk(days_ago(1))
        assert await steps.game.count("onceward_jobs") == 2
        table = steps.game.onceward.runtime.job_store
        due_in = await table.due_in(["walk"])
        assert due_in is not None
        assert 50 < due_in <= 60


async def test_steps_that_grow_are_accepted_with_everything_that_follows(steps: Stepping) -> None:
    for count in (1000, 2500, 4000):
        await steps.walk(count=count, hours=(6, 7 + count / 1000))
    await steps.work()
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"], day["attested"]) == (
        "ACCEPTED",
        4000,
        True,
    )
    assert await steps.energy() == 4000
    streak = await steps.streak()
    assert (streak["current_length_days"], streak["total_lifetime_steps"]) == (1, 4000)
    assert await steps.event_types() == ["steps.accepted"]
    (event,) = await steps.game.device().events()
    assert event["data"] == {
        "day": "2026-05-22",
        "acceptedCount": 4000,
        "attested": True,
        "energyBalance": 4000,
    }


async def test_a_later_report_credits_only_the_difference(steps: Stepping) -> None:
    for count in (3000, 5000, 5000):
        await steps.walk(count=count, hours=(6, 11))
        await steps.work()
        assert await steps.energy() == count
    assert await steps.game.count("energy_ledger") == 2
    assert (await steps.streak())["total_lifetime_steps"] == 5000


@pytest.mark.parametrize(("count", "attested"), [(1999, False), (2000, True)])
async def test_a_day_counts_for_the_streak_from_the_threshold_on(
    steps: Stepping, count: int, attested: bool
) -> None:
    await steps.walk(count=count)
    await steps.work()
    day = await steps.day()
    assert (day["reconciliationStatus"], day["attested"]) == ("ACCEPTED", attested)
    assert (await steps.streak())["current_length_days"] == int(attested)
    assert await steps.energy() == count


async def test_energy_per_step_is_a_setting(open_game: OpenGame) -> None:
    async with stepping(open_game, step_energy_per_step=0.1) as steps:
        assert (await steps.walk(count=2999))["provisionalEnergy"] == 299
        await steps.work()
        assert await steps.energy() == 299


async def test_a_counter_that_goes_backwards_is_quarantined_and_shown(steps: Stepping) -> None:
    await backwards(steps)
    await steps.work()
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"], day["attested"]) == (
        "QUARANTINED",
        0,
        False,
    )
    assert await steps.energy() == 0
    assert (await steps.streak())["current_length_days"] == 0
    assert await steps.verdicts() == ["ACCEPTED", "ACCEPTED", "QUARANTINED"]
    (review,) = await steps.reviews()
    assert (review["kind"], review["walkerId"], review["day"], review["reasons"]) == (
        "quarantined_day",
        "ada",
        "2026-05-22",
        [{"code": "COUNT_WENT_BACKWARDS"}],
    )
    assert await steps.event_types() == ["steps.quarantined", "steps.reread_requested"]


async def test_the_same_time_from_two_bundles_is_quarantined(steps: Stepping) -> None:
    await steps.walk(count=3000, sourceBundleId=PHONE, hours=(6, 10))
    await steps.walk(count=2500, sourceBundleId=WATCH, hours=(9, 11), source="WatchNative")
    await steps.work()
    assert (await steps.day())["reconciliationStatus"] == "QUARANTINED"
    (review,) = await steps.reviews()
    assert review["reasons"] == [{"code": "DUPLICATE_TIMES"}]


async def test_one_bundle_after_the_other_adds_up(steps: Stepping) -> None:
    await steps.walk(count=3000, sourceBundleId=PHONE, hours=(6, 8))
    await steps.walk(count=2500, sourceBundleId=WATCH, hours=(9, 11))
    await steps.work()
    assert (await steps.day())["acceptedCount"] == 5500
    assert await steps.energy() == 5500


async def test_one_walk_does_not_count_for_seven_days(steps: Stepping) -> None:
    """The samples of this morning, sent for every day of the week."""
    this_morning = steps.body()["sampleSpan"]
    for ago in range(8):
        await steps.walk(days_ago(ago), sampleSpan=this_morning)
    await steps.work()
    statuses = [day["reconciliationStatus"] for day in (await steps.days()).values()]
    assert statuses == ["ACCEPTED"] + ["QUARANTINED"] * 7
    assert await steps.energy() == 3000


async def test_accepted_steps_stay_while_a_later_report_is_quarantined(steps: Stepping) -> None:
    await steps.walk(count=5000, hours=(6, 10))
    await steps.work()
    await steps.walk(count=3000, hours=(6, 11))
    await steps.work()
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"], day["attested"]) == (
        "QUARANTINED",
        5000,
        True,
    )
    assert await steps.energy() == 5000


async def test_bundles_that_add_up_to_too_much_are_rejected_and_taken_back(
    steps: Stepping,
) -> None:
    await steps.walk(count=30_000, sourceBundleId=PHONE, hours=(6, 8))
    await steps.work()
    assert await steps.energy() == 30_000
    await steps.walk(count=30_000, sourceBundleId=WATCH, hours=(9, 11))
    await steps.work()
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"], day["attested"]) == (
        "REJECTED",
        0,
        False,
    )
    assert await steps.energy() == 0
    assert (await steps.streak())["total_lifetime_steps"] == 0
    rejected = [row for row in await steps.attestations() if row["verdict"] == "REJECTED"]
    assert [(row["code"], row["anti_cheat"]) for row in rejected] == [("STEP_COUNT_EXCEEDED", 1)]


async def test_walkers_are_settled_independently(steps: Stepping) -> None:
    await backwards(steps)
    await steps.walk(walker="eve")
    await steps.work()
    assert (await steps.day())["reconciliationStatus"] == "QUARANTINED"
    assert (await steps.day(walker="eve"))["reconciliationStatus"] == "ACCEPTED"
    assert (await steps.energy(), await steps.energy("eve")) == (0, 3000)


# -- streaks ---------------------------------------------------------------------------------------


async def test_a_missing_day_in_between_is_healed_when_it_comes_in(steps: Stepping) -> None:
    for ago in (4, 3, 1, 0):
        await steps.walk(days_ago(ago))
    await steps.work()
    assert (await steps.streak())["current_length_days"] == 2
    await steps.walk(days_ago(2))
    await steps.work()
    streak = await steps.streak()
    assert (streak["current_length_days"], streak["bonus_tier"]) == (5, 1)


async def test_day_that_falls_below_the_goal_ends_the_streak(steps: Stepping) -> None:
    for ago in (2, 0):
        await steps.walk(days_ago(ago))
    await steps.walk(days_ago(1), 1999)
    await steps.work()
    streak = await steps.streak()
    assert (streak["current_length_days"], streak["last_attested_date"]) == (1, "2026-05-22")


async def test_streak_ends_and_tiers_decay_after_a_week(steps: Stepping) -> None:
    for ago in range(7):
        await steps.walk(days_ago(ago))
    await steps.work()
    assert (await steps.streak())["bonus_tier"] == 2
    steps.clock.move(timedelta(days=3))
    # Two days were missed: a new streak begins, and both tiers are lost.
    response = await steps.walk(TODAY + timedelta(days=3), 2000)
    assert response["streakState"]["currentLengthDays"] == 1
    assert response["streakState"]["bonusTier"] == 0
    assert response["streakState"]["totalLifetimeSteps"] == 21_000


# -- seven days offline ----------------------------------------------------------------------------


def a_week(rng: random.Random) -> list[tuple[date, int]]:
    """Draw seven days of walking; some days below the goal, some not walked at all."""
    counts = [rng.choice([0, 1500, 2000, 8000, 12_345]) for _ in range(7)]
    return [(days_ago(ago), count) for ago, count in enumerate(counts) if rng.random() > 0.15]


def shuffled(week: list[tuple[date, int]], rng: random.Random) -> list[tuple[date, int]]:
    """Send every day, some several times, in any order."""
    sent = [*week, *(rng.choices(week, k=rng.randint(0, 6)) if week else [])]
    rng.shuffle(sent)
    return sent


@pytest.mark.parametrize("seed", range(4))
async def test_a_week_offline_comes_out_the_same_in_any_order(steps: Stepping, seed: int) -> None:
    rng = random.Random(seed)
    week = a_week(rng)
    orders = [week, week[::-1], *(shuffled(week, rng) for _ in range(4))]
    walkers = [f"walker-{number}" for number in range(len(orders))]
    for walker, order in zip(walkers, orders, strict=True):
        for number, (day, count) in enumerate(order):
            await steps.walk(day, count, walker=walker)
            if number == 3 and rng.random() < 0.5:
                await steps.work()  # some days are settled before others are reported
    await steps.work()
    outcomes = [await outcome(steps, walker) for walker in walkers]
    assert outcomes == [outcomes[0]] * len(orders)
    assert outcomes[0]["energy"] == sum(count for _, count in week)


async def test_a_week_sent_at_once_comes_out_as_one_sent_in_order(steps: Stepping) -> None:
    week = [(days_ago(ago), 2000 + ago) for ago in range(8)]
    for day, count in week:
        await steps.walk(day, count, walker="slow")
    responses = await asyncio.gather(*(steps.report(day, count) for day, count in week * 2))
    assert {response.status_code for response in responses} == {200}
    await steps.work()
    assert await outcome(steps, "ada") == await outcome(steps, "slow")
    assert (await steps.streak())["current_length_days"] == 8
