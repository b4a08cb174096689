"""Reconciliation: what becomes of days, streaks, energy and allocations, whatever goes wrong."""

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import date, timedelta
from functools import wraps
from typing import Any

import pytest

from holdfast.jobs.attempt import FAULT_POINTS
from holdfast.services.walk import reconcile
from holdfast.services.walk.steps_intake import RECONCILE
from holdfast.services.walk.steps_settings import StepSettings
from tests.services.conftest import Serve

from .stepping import PHONE, TODAY, WATCH, Stepping, days_ago, stepping
from .walking import OpenWorld, ok, opener

NODE = "node.even-stride"
SETTINGS = StepSettings.model_validate({})


@pytest.fixture
async def steps(open_world: OpenWorld) -> AsyncIterator[Stepping]:
    async with stepping(open_world) as opened:
        yield opened


async def backwards(steps: Stepping, day: date = TODAY, **fields: Any) -> None:
    """Have a day quarantined: its counter goes back."""
    await steps.walk(day, 5000, hours=(6, 10), **fields)
    await steps.walk(day, 3000, hours=(6, 11), **fields)


async def take(steps: Stepping, node: str = NODE) -> None:
    """Take a node while steps are pending."""
    device = steps.world.device()
    await device.finish("quest.001")
    (allocation,) = ok(await device.allocate(node))["allocations"]
    assert allocation["provisional"] is True


async def allocations(steps: Stepping) -> list[tuple[str, bool]]:
    tree = await steps.world.device().tree()
    return [(each["nodeId"], each["provisional"]) for each in tree["allocations"]]


# -- verdicts --------------------------------------------------------------------------------------


async def test_a_day_is_settled_a_minute_after_the_first_report_and_once(
    open_world: OpenWorld,
) -> None:
    async with stepping(open_world, step_reconcile_delay_seconds=60) as steps:
        for count in (1000, 2000, 3000):
            await steps.walk(count=count, hours=(6, 8 + count / 1000))
        await steps.walk(days_ago(1))
        assert await steps.world.count("jobs") == 2
        table = steps.world.holdfast.job_table
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
    (event,) = await steps.world.device().events()
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
    assert await steps.world.count("energy_ledger") == 2
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


async def test_what_a_step_is_worth_is_a_setting(open_world: OpenWorld) -> None:
    async with stepping(open_world, step_energy_per_step=0.1) as steps:
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
    assert await steps.event_types() == ["steps.quarantined"]


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
    # On the eve it is that day somewhere; before that, nowhere.
    assert statuses == ["ACCEPTED"] * 2 + ["QUARANTINED"] * 6


async def test_what_was_accepted_stays_while_a_later_report_is_doubted(steps: Stepping) -> None:
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


async def test_walkers_are_settled_apart(steps: Stepping) -> None:
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


async def test_a_day_that_falls_below_the_goal_breaks_the_row(steps: Stepping) -> None:
    for ago in (2, 0):
        await steps.walk(days_ago(ago))
    await steps.walk(days_ago(1), 1999)
    await steps.work()
    streak = await steps.streak()
    assert (streak["current_length_days"], streak["last_attested_date"]) == (1, "2026-05-22")


async def test_a_week_later_the_row_is_over_and_the_tiers_are_going(steps: Stepping) -> None:
    for ago in range(7):
        await steps.walk(days_ago(ago))
    await steps.work()
    assert (await steps.streak())["bonus_tier"] == 2
    steps.clock.move(timedelta(days=3))
    # Two days were missed: a new row begins, and of two tiers none is left.
    answer = await steps.walk(TODAY + timedelta(days=3), 2000)
    assert answer["streakState"]["currentLengthDays"] == 1
    assert answer["streakState"]["bonusTier"] == 0
    assert answer["streakState"]["totalLifetimeSteps"] == 21_000


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
                await steps.work()  # some are settled while others are still under way
    await steps.work()
    outcomes = [await outcome(steps, walker) for walker in walkers]
    assert outcomes == [outcomes[0]] * len(orders)
    assert outcomes[0]["energy"] == sum(count for _, count in week)


async def outcome(steps: Stepping, walker: str) -> dict[str, Any]:
    days = await steps.days(walker)
    return {
        "days": {
            day: (item["reconciliationStatus"], item["acceptedCount"], item["attested"])
            for day, item in days.items()
        },
        "streak": await steps.streak(walker),
        "energy": await steps.energy(walker),
    }


async def test_a_week_sent_at_once_comes_out_as_one_sent_in_order(steps: Stepping) -> None:
    week = [(days_ago(ago), 2000 + ago) for ago in range(8)]
    for day, count in week:
        await steps.walk(day, count, walker="slow")
    answers = await asyncio.gather(*(steps.report(day, count) for day, count in week * 2))
    assert {answer.status_code for answer in answers} == {200}
    await steps.work()
    assert await outcome(steps, "ada") == await outcome(steps, "slow")
    assert (await steps.streak())["current_length_days"] == 8


# -- allocations -----------------------------------------------------------------------------------


async def test_what_was_taken_on_pending_steps_stands_once_the_day_is_attested(
    steps: Stepping,
) -> None:
    await steps.walk()
    await take(steps)
    await steps.work()
    assert await allocations(steps) == [(NODE, False)]
    assert "allocation.confirmed" in await steps.event_types()


async def test_it_waits_for_the_last_pending_day_whichever_that_is(steps: Stepping) -> None:
    for order in ((0, 1), (1, 0)):
        walker = f"walker-{order[0]}"
        for ago in order:
            # One day reaches the goal, the other does not.
            await steps.walk(days_ago(ago), 3000 if ago else 100, walker=walker)
        device = steps.world.device(walker)
        await device.finish("quest.001")
        ok(await device.allocate(NODE))
        await steps.work()
        (allocation,) = (await device.tree())["allocations"]
        assert allocation["provisional"] is False


async def test_a_day_below_the_goal_confirms_nothing(steps: Stepping) -> None:
    await steps.walk(count=1999)
    await take(steps)
    await steps.work()
    assert await allocations(steps) == [(NODE, True)]
    await steps.walk(count=2000, hours=(6, 11.5))
    await steps.work()
    assert await allocations(steps) == [(NODE, False)]


async def test_a_day_attested_before_they_were_taken_confirms_nothing(steps: Stepping) -> None:
    await steps.walk(days_ago(1))
    await steps.work()
    steps.clock.move(timedelta(minutes=1))
    await steps.walk(count=100)
    await take(steps)
    await steps.work()
    assert (await steps.day())["reconciliationStatus"] == "ACCEPTED"
    assert await allocations(steps) == [(NODE, True)]


async def test_a_balance_below_zero_confirms_nothing(open_world: OpenWorld) -> None:
    """Spent on a day that was taken back; then the server stops asking for energy."""
    settings = {"step_energy_per_step": 0.1, "step_attested_threshold": 1000}
    async with stepping(open_world, walk_energy_required=True, **settings) as steps:
        await steps.walk(days_ago(1), 6000, hours=(6, 10))
        await steps.work()
        device = steps.world.device()
        await device.finish("quest.001")
        ok(await device.allocate("node.light-pack"))
        await steps.walk(days_ago(1), 300, hours=(6, 11))
        await steps.work()
        (review,) = await steps.reviews()
        ok(await steps.resolve(review["id"], "reject"))
        assert await steps.energy() == -500
    async with stepping(open_world, **settings) as steps:
        await steps.walk(count=1000)
        ok(await steps.world.device().allocate(NODE))
        await steps.work()
        assert (await steps.day())["attested"] is True
        assert await allocations(steps) == [("node.light-pack", False), (NODE, True)]
        await steps.walk(count=5000, hours=(6, 11.5))
        await steps.work()
        assert await steps.energy() == 0
        assert await allocations(steps) == [("node.light-pack", False), (NODE, False)]


async def test_a_doubted_day_keeps_them_provisional_until_someone_decides(
    steps: Stepping,
) -> None:
    await backwards(steps)
    await take(steps)
    await steps.walk(days_ago(1))
    await steps.work()
    assert await allocations(steps) == [(NODE, True)]
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "accept"))
    assert await allocations(steps) == [(NODE, False)]


async def test_after_a_rejection_they_stay_for_a_day_and_are_then_given_back(
    steps: Stepping,
) -> None:
    await backwards(steps)
    await take(steps)
    await steps.work()
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    points = await steps.world.device().points()
    steps.clock.move(timedelta(hours=23, minutes=59))
    async with steps.world.transaction() as tx:
        await reconcile.settle_day(tx, "ada", TODAY, settings=SETTINGS, now=steps.clock.now())
    assert await allocations(steps) == [(NODE, True)]
    steps.clock.move(timedelta(minutes=1))
    await steps.work()
    assert await allocations(steps) == []
    assert await steps.world.device().points() == points + 1
    events = await steps.world.device().events()
    (reverted,) = [event for event in events if event["type"] == "allocation.reverted"]
    assert reverted["data"]["nodeId"] == NODE
    assert reverted["data"]["reason"] == "steps_rejected"


async def test_a_refund_that_comes_too_early_waits_for_its_time(steps: Stepping) -> None:
    await backwards(steps)
    await take(steps)
    await steps.work()
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    # The database's clock is months ahead of ours, so the job is due there at once.
    await steps.work()
    assert await allocations(steps) == [(NODE, True)]
    due_in = await steps.world.holdfast.job_table.due_in(["walk"])
    assert due_in == pytest.approx(24 * 3600, abs=60)


async def test_another_good_day_does_not_make_up_for_a_rejected_one(steps: Stepping) -> None:
    await backwards(steps)
    await take(steps)
    await steps.work()
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    await steps.walk(days_ago(1))
    await steps.work()
    assert (await steps.day(days_ago(1)))["attested"] is True
    assert await allocations(steps) == [(NODE, True)]
    steps.clock.move(timedelta(hours=25))
    async with steps.world.transaction() as tx:
        await reconcile.settle_day(tx, "ada", TODAY, settings=SETTINGS, now=steps.clock.now())
    assert await allocations(steps) == []


async def test_a_verdict_that_comes_after_the_deadline_does_not_bring_them_back(
    steps: Stepping,
) -> None:
    """Nobody works for two days: first what is due is given back, then the day is settled."""
    await backwards(steps)
    await take(steps)
    await steps.work()
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    await steps.walk(days_ago(1))
    steps.clock.move(timedelta(hours=48))
    await steps.work()
    await steps.work()
    assert await allocations(steps) == []
    assert (await steps.day(days_ago(1)))["reconciliationStatus"] == "ACCEPTED"
    reverted = [t for t in await steps.event_types() if t == "allocation.reverted"]
    assert len(reverted) == 1


async def test_a_day_that_turns_good_again_saves_what_rests_on_it(steps: Stepping) -> None:
    """Rejected for its sum, and in doubt before: a person who accepts the one ends the other."""
    await backwards(steps)
    await steps.work()
    await take(steps)
    await steps.walk(count=49_000, sourceBundleId=WATCH, hours=(11, 13))
    await steps.work()
    assert (await steps.day())["reconciliationStatus"] == "REJECTED"
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "accept", acceptedCount=4000))
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"]) == ("ACCEPTED", 4000)
    assert await allocations(steps) == [(NODE, False)]
    steps.clock.move(timedelta(hours=48))
    await steps.work()
    assert await allocations(steps) == [(NODE, False)]


async def test_energy_that_was_spent_and_taken_back_confirms_nothing(
    open_world: OpenWorld,
) -> None:
    async with stepping(open_world, walk_energy_required=True) as steps:
        await steps.walk(days_ago(1), 600, hours=(6, 10))
        await steps.work()
        await steps.walk(days_ago(1), 300, hours=(6, 11))  # in doubt from now on
        await take(steps)
        assert await steps.energy() == 100
        await steps.work()
        (review,) = await steps.reviews()
        ok(await steps.resolve(review["id"], "reject"))
        # What the day was worth is taken back, spent or not; the refund will make up for it.
        assert await steps.energy() == -500
        steps.clock.move(timedelta(hours=24))
        await steps.work()
        assert await steps.energy() == 0
        assert await allocations(steps) == []


# -- twice, late, killed ---------------------------------------------------------------------------


async def settle_again(steps: Stepping, day: date = TODAY) -> None:
    """Let the job of a day run once more, as if it had been delivered again."""
    holdfast = steps.world.holdfast
    handler = holdfast.jobs.find(RECONCILE)
    assert handler is not None
    async with steps.world.transaction() as tx:
        run: Any = type("Run", (), {"transaction": tx, "tenant": "ada"})()
        run.payload = {"day": day.isoformat()}
        await handler.handler(run)


async def test_run_again_it_changes_nothing(steps: Stepping) -> None:
    await steps.walk()
    await take(steps)
    await steps.work()
    before = await outcome(steps, "ada"), await steps.event_types(), await steps.verdicts()
    for _ in range(3):
        await settle_again(steps)
    after = await outcome(steps, "ada"), await steps.event_types(), await steps.verdicts()
    assert after == before


async def test_a_day_nobody_reported_is_passed_over(steps: Stepping) -> None:
    await steps.walk()
    await steps.work()
    before = await outcome(steps, "ada")
    await settle_again(steps, days_ago(5))
    assert await outcome(steps, "ada") == before


async def test_a_day_is_settled_weeks_late_as_it_would_have_been_in_time(steps: Stepping) -> None:
    await steps.walk()
    await take(steps)
    steps.clock.move(timedelta(days=20))
    await steps.work()
    assert (await steps.day())["reconciliationStatus"] == "ACCEPTED"
    assert await steps.energy() == 3000
    assert await allocations(steps) == [(NODE, False)]
    streak = await steps.streak()
    assert (streak["current_length_days"], streak["last_attested_date"]) == (0, "2026-05-22")


class Killed(BaseException):
    """Nothing an ``except Exception`` would catch: as sudden as a signal."""


class KilledOnce:
    """Kills the first to pass a point."""

    def __init__(self, point: str) -> None:
        self._point = point
        self.has_killed = False

    async def reach(self, point: str) -> None:
        if point == self._point and not self.has_killed:
            self.has_killed = True
            raise Killed


async def expected_in_the_end(steps: Stepping) -> None:
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"]) == ("ACCEPTED", 3000)
    assert await steps.energy() == 3000
    assert await steps.world.count("energy_ledger") == 1
    assert (await steps.streak())["total_lifetime_steps"] == 3000
    assert (await steps.event_types()).count("steps.accepted") == 1
    assert await allocations(steps) == [(NODE, False)]


@pytest.mark.parametrize("point", [point for point in FAULT_POINTS if point != "job_before_retry"])
async def test_a_worker_killed_at_any_point_leaves_all_or_nothing(
    steps: Stepping, point: str
) -> None:
    await steps.walk()
    await take(steps)
    faults = KilledOnce(point)
    await steps.work(faults=faults, lease_seconds=1)
    assert faults.has_killed
    await expected_in_the_end(steps)


STEPS = (
    "refund_due_allocations",
    "find_day",
    "readings_of",
    "book",
    "settle_day_log",
    "set_streak_of_day",
    "save_streak",
    "add_event",
    "confirm_allocations",
    "next_refund_at",
)


@pytest.mark.parametrize("step", STEPS)
async def test_a_worker_killed_after_any_step_does_it_all_again(
    serve: Serve, sqlite_url: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stepping(opener(serve, sqlite_url)) as steps:
        await killed_after(steps, step, monkeypatch)


@pytest.mark.parametrize("step", ["book", "confirm_allocations"])
async def test_on_postgresql_too(
    serve: Serve, postgres_url: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stepping(opener(serve, postgres_url)) as steps:
        await killed_after(steps, step, monkeypatch)


async def killed_after(steps: Stepping, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await steps.walk()
    await take(steps)
    original = getattr(reconcile, step)
    killed: list[str] = []

    @wraps(original)
    async def once(*args: Any, **kwargs: Any) -> Any:
        result = await original(*args, **kwargs)
        if not killed:
            killed.append(step)
            raise Killed
        return result

    monkeypatch.setattr(reconcile, step, once)
    await steps.work(lease_seconds=1)
    assert killed == [step]
    await expected_in_the_end(steps)
