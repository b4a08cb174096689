"""The checker convicts each broken promise, and acquits a history in which all were kept."""

from typing import Any

import msgspec
import pytest

from holdfast_lab.checker import Rule, check
from holdfast_lab.history import (
    AnswerSeen,
    Effect,
    Expect,
    Fate,
    FollowUp,
    History,
    JobEffect,
    JobSeen,
    Tap,
)

TAPS = [
    Tap(
        id=f"tap-{number}",
        device="phone",
        user="ada",
        tenant="ada",
        key=f"key-{number}",
        position=number,
        in_order=True,
        brings_job=True,
    )
    for number in (1, 2)
]


def kept_promises() -> History:
    return History(
        taps=TAPS,
        effects=[Effect(tenant="ada", tap=tap.id, number=tap.position) for tap in TAPS],
        fates=[Fate(tap=tap.id, status="succeeded", key=tap.key) for tap in TAPS],
        answers=[answer(), answer()],
        jobs=[JobSeen(tenant="ada", job_id=f"job {t.id}", tap=t.id, marker=1) for t in TAPS],
        job_effects=[
            JobEffect(
                tenant="ada",
                job_id=f"job {tap.id}",
                attempt=1,
                number=tap.position,
                order="line",
                position=tap.position,
            )
            for tap in TAPS
        ],
        follow_ups=[FollowUp(tenant="ada", name="count", wanted=2, seen=2)],
    )


def answer(**facts: Any) -> AnswerSeen:
    known: dict[str, Any] = {
        "tenant": "ada",
        "key": "key-1",
        "status": 201,
        "body": b"1",
        "asked": "a",
    }
    return AnswerSeen(**(known | facts))


def rules_of(**changes: Any) -> set[Rule]:
    history = kept_promises()
    for name, value in changes.items():
        setattr(history, name, value)
    return {violation.rule for violation in check(history)}


def replace(item: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(item, **changes)


GOOD = kept_promises()


def test_a_history_that_kept_all_promises_is_acquitted() -> None:
    assert check(GOOD) == []


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (Rule.EXACTLY_ONCE, {"effects": GOOD.effects[:1]}),
        (Rule.EXACTLY_ONCE, {"effects": [*GOOD.effects, replace(GOOD.effects[1], number=3)]}),
        (
            Rule.AT_MOST_ONCE,
            {
                "taps": [TAPS[0], replace(TAPS[1], acknowledged=False)],
                "effects": [*GOOD.effects, replace(GOOD.effects[1], number=3)],
            },
        ),
        (Rule.NO_INVENTION, {"effects": [*GOOD.effects, replace(GOOD.effects[0], tenant="bob")]}),
        (Rule.REFUSED_IS_NOTHING, {"taps": [TAPS[0], replace(TAPS[1], expect=Expect.REFUSAL)]}),
        (Rule.TOLD_THE_TRUTH, {"fates": [GOOD.fates[0], replace(GOOD.fates[1], status="failed")]}),
        (Rule.NEVER_LOST, {"fates": GOOD.fates[:1]}),
        (Rule.ONE_ENTRY, {"fates": [*GOOD.fates, GOOD.fates[0]]}),
        (Rule.ONE_ENTRY, {"fates": [GOOD.fates[0], replace(GOOD.fates[1], key="another")]}),
        (Rule.SAME_ANSWER, {"answers": [answer(), answer(body=b"2")]}),
        (Rule.SAME_ANSWER, {"answers": [answer(), answer(status=422, code="X")]}),
        (Rule.OTHER_PAYLOAD, {"answers": [answer(), answer(asked="b")]}),
        (Rule.OWN_ANSWERS, {"answers": [answer(shows="bob")]}),
        (
            Rule.OWN_ANSWERS,
            {"answers": [answer(status=409, code="idempotency.payload_mismatch")]},
        ),
        (
            Rule.ORDER,
            {"effects": [replace(effect, number=-effect.number) for effect in GOOD.effects]},
        ),
        (Rule.JOB_WITH_EFFECT, {"jobs": GOOD.jobs[:1], "job_effects": GOOD.job_effects[:1]}),
        (Rule.JOB_WITH_EFFECT, {"effects": GOOD.effects[:1]}),
        (Rule.JOB_ENDS_ONCE, {"jobs": [GOOD.jobs[0], replace(GOOD.jobs[1], is_dead=True)]}),
        (Rule.JOB_ENDS_ONCE, {"jobs": [GOOD.jobs[0], replace(GOOD.jobs[1], waits=True)]}),
        (Rule.JOB_ENDS_ONCE, {"jobs": GOOD.jobs[:1]}),
        (Rule.JOB_EFFECT_ONCE, {"job_effects": [*GOOD.job_effects, GOOD.job_effects[1]]}),
        (Rule.JOB_EFFECT_ONCE, {"job_effects": GOOD.job_effects[:1]}),
        (Rule.FENCED, {"jobs": [GOOD.jobs[0], replace(GOOD.jobs[1], marker=2)]}),
        (
            Rule.JOB_ORDER,
            {
                "job_effects": [
                    replace(effect, number=-effect.number) for effect in GOOD.job_effects
                ]
            },
        ),
        (
            Rule.FOLLOWED,
            {"follow_ups": [FollowUp(tenant="ada", name="count", wanted=2, seen=1)]},
        ),
        (Rule.DRAINS, {"undrained": ["tap-2 is pending"]}),
        (Rule.NO_MISHAP, {"mishaps": ["KeyError in the worker"]}),
    ],
)
def test_a_broken_promise_is_named(rule: Rule, changes: dict[str, Any]) -> None:
    assert rule in rules_of(**changes)


@pytest.mark.parametrize(
    "passing",
    [
        answer(status=503, body=b"down"),
        answer(status=429, body=b"slow"),
        answer(status=409, body=b"runs", code="idempotency.in_progress"),
        answer(status=409, body=b"other", code="idempotency.payload_mismatch", asked="b"),
        answer(status=422, body=b"no", code="INSUFFICIENT_POINTS", kept=False),
    ],
)
def test_answers_of_the_moment_may_differ(passing: AnswerSeen) -> None:
    assert rules_of(answers=[answer(), passing]) == set()
