"""The checker reports each broken rule, and nothing for a history without violations."""

from typing import Any

import msgspec
import pytest

from onceward_lab.checker import Rule, check
from onceward_lab.history import (
    Conflict,
    Contact,
    Delay,
    Effect,
    EntryState,
    Exhausted,
    Expect,
    FollowUp,
    History,
    Idle,
    JobEffect,
    JobState,
    ResponseSeen,
    UserAction,
    VersionSeen,
    Write,
)

ACTIONS = [
    UserAction(
        id=f"action-{number}",
        device="phone",
        user="ada",
        tenant="ada",
        key=f"key-{number}",
        position=number,
        in_order=True,
        enqueues_job=True,
    )
    for number in (1, 2)
]


def good_history() -> History:
    return History(
        actions=ACTIONS,
        effects=[Effect(tenant="ada", action=a.id, number=a.position) for a in ACTIONS],
        entries=[EntryState(action=a.id, status="succeeded", key=a.key) for a in ACTIONS],
        responses=[response(), response()],
        jobs=[JobState(tenant="ada", job_id=f"job {a.id}", action=a.id, marker=1) for a in ACTIONS],
        job_effects=[
            JobEffect(
                tenant="ada",
                job_id=f"job {action.id}",
                attempt=1,
                number=action.position,
                order="line",
                position=action.position,
            )
            for action in ACTIONS
        ],
        follow_ups=[FollowUp(tenant="ada", name="count", wanted=2, seen=2)],
    )


def response(**fields: Any) -> ResponseSeen:
    defaults: dict[str, Any] = {
        "tenant": "ada",
        "key": "key-1",
        "status": 201,
        "body": b"1",
        "request": "a",
    }
    return ResponseSeen(**(defaults | fields))


def rules_of(**changes: Any) -> set[Rule]:
    history = good_history()
    for name, value in changes.items():
        setattr(history, name, value)
    return {violation.rule for violation in check(history)}


def replace(item: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(item, **changes)


GOOD = good_history()
WRITES = [
    Write(entity="1", version=1, action="action-1", is_checked=False),
    Write(entity="1", version=2, action="foreign", is_foreign=True),
    Write(entity="1", version=3, action="action-2"),
]
OWN_WRITES = [WRITES[0], replace(WRITES[2], version=2)]
SEEN = VersionSeen(user="ada", entity="1", version=1, at=5.0, how="response", action="action-1")
CONFLICT = Conflict(entity="1", action="action-2", sent=1, theirs=2)

# The first action was made before the second, and has written after it.
OVERTAKEN: dict[str, Any] = {
    "actions": [
        replace(ACTIONS[0], is_overtaken=True, enqueued_at=1.0),
        replace(ACTIONS[1], enqueued_at=2.0),
    ],
    "writes": [
        replace(WRITES[1], version=1),
        replace(WRITES[2], version=2),
        replace(WRITES[0], version=3, is_checked=True),
    ],
    "seen": [replace(SEEN, at=0.5)],
}


def contact(what: str, at: float, **fields: Any) -> Contact:
    defaults: dict[str, Any] = {
        "device": "phone",
        "process": "app 1",
        "number": 1,
        "action": "action-1",
        "endpoint": "/notes",
    }
    return Contact(what=what, at=at, **(defaults | fields))


def outage(at: float = 1.0, **fields: Any) -> list[Contact]:
    return [contact("sent", at), contact("held", at, **fields)]


def other(at: float, **fields: Any) -> Contact:
    return contact("sent", at, **({"number": 2, "action": "action-2"} | fields))


LIMITED: dict[str, Any] = {"is_endpoint": True, "retry_after_seconds": 60.0}
STORED = [*outage(retry_after_seconds=60.0), contact("stored", 1.0, number=0)]
RESTARTED: dict[str, Any] = {"process": "app 2", "drain_began_at": 5.0}


def test_history_without_violations_passes() -> None:
    assert check(GOOD) == []


def test_older_edit_may_conflict_with_a_newer_one_and_be_written_after_it() -> None:
    conflict = replace(CONFLICT, action="action-1")
    entries = [replace(GOOD.entries[0], had_conflict=True), *GOOD.entries[1:]]
    assert rules_of(**OVERTAKEN, entries=entries, conflicts=[conflict]) == set()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (Rule.EXACTLY_ONCE, {"effects": GOOD.effects[:1]}),
        (Rule.EXACTLY_ONCE, {"effects": [*GOOD.effects, replace(GOOD.effects[1], number=3)]}),
        (
            Rule.AT_MOST_ONCE,
            {
                "actions": [ACTIONS[0], replace(ACTIONS[1], acknowledged=False)],
                "effects": [*GOOD.effects, replace(GOOD.effects[1], number=3)],
            },
        ),
        (Rule.NO_INVENTION, {"effects": [*GOOD.effects, replace(GOOD.effects[0], tenant="bob")]}),
        (
            Rule.REFUSED_HAS_NO_EFFECT,
            {"actions": [ACTIONS[0], replace(ACTIONS[1], expect=Expect.REFUSAL)]},
        ),
        (
            Rule.STATUS_IS_TRUE,
            {"entries": [GOOD.entries[0], replace(GOOD.entries[1], status="failed")]},
        ),
        (Rule.NEVER_LOST, {"entries": GOOD.entries[:1]}),
        (Rule.ONE_ENTRY, {"entries": [*GOOD.entries, GOOD.entries[0]]}),
        (Rule.ONE_ENTRY, {"entries": [GOOD.entries[0], replace(GOOD.entries[1], key="another")]}),
        (Rule.SAME_RESPONSE, {"responses": [response(), response(body=b"2")]}),
        (Rule.SAME_RESPONSE, {"responses": [response(), response(status=422, code="X")]}),
        (Rule.OTHER_PAYLOAD, {"responses": [response(), response(request="b")]}),
        (Rule.OWN_RESPONSES, {"responses": [response(data_of="bob")]}),
        (
            Rule.OWN_RESPONSES,
            {"responses": [response(status=409, code="idempotency.payload_mismatch")]},
        ),
        (
            Rule.ORDER,
            {"effects": [replace(effect, number=-effect.number) for effect in GOOD.effects]},
        ),
        (Rule.JOB_WITH_EFFECT, {"jobs": GOOD.jobs[:1], "job_effects": GOOD.job_effects[:1]}),
        (Rule.JOB_WITH_EFFECT, {"effects": GOOD.effects[:1]}),
        (Rule.JOB_ENDS_ONCE, {"jobs": [GOOD.jobs[0], replace(GOOD.jobs[1], is_dead=True)]}),
        (Rule.JOB_ENDS_ONCE, {"jobs": [GOOD.jobs[0], replace(GOOD.jobs[1], is_waiting=True)]}),
        (Rule.JOB_ENDS_ONCE, {"jobs": GOOD.jobs[:1]}),
        (Rule.JOB_EFFECT_ONCE, {"job_effects": [*GOOD.job_effects, GOOD.job_effects[1]]}),
        (Rule.JOB_EFFECT_ONCE, {"job_effects": GOOD.job_effects[:1]}),
        (Rule.FENCED, {"jobs": [GOOD.jobs[0], replace(GOOD.jobs[1], marker=2)]}),
        (
            Rule.FENCED,
            {"job_effects": [GOOD.job_effects[0], replace(GOOD.job_effects[1], is_stale=True)]},
        ),
        (
            Rule.PAUSED,
            {"job_effects": [replace(GOOD.job_effects[0], is_of_paused_queue=True)]},
        ),
        (
            Rule.CANCELLED,
            {"cancelled_jobs": [(GOOD.job_effects[0].tenant, GOOD.job_effects[0].job_id)]},
        ),
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
        (
            Rule.RESTORED,
            {
                "actions": [ACTIONS[0], replace(ACTIONS[1], lost=True)],
                "effects": GOOD.effects[:1],
                "responses": [response(action="action-2", is_after_restore=True)],
            },
        ),
        (Rule.NO_OVERWRITE, {"writes": WRITES}),
        (
            Rule.NO_OVERWRITE,
            {"writes": [*WRITES[:2], replace(WRITES[2], is_checked=False)], "seen": [SEEN]},
        ),
        (Rule.OWN_EDITS, {"writes": OWN_WRITES, "conflicts": [CONFLICT]}),
        (
            Rule.OWN_EDITS,  # it was overtaken, but not by the edit that it conflicts with
            {
                "actions": [ACTIONS[0], replace(ACTIONS[1], is_overtaken=True, enqueued_at=9.0)],
                "writes": OWN_WRITES,
                "conflicts": [CONFLICT],
            },
        ),
        (Rule.NEWER_EDITS, OVERTAKEN),
        (Rule.SAME_VERSION, {"changed_retries": ["1, then 2"]}),
        (Rule.CHAINED, {"sent_after_refusal": ["action-2"]}),
        (
            Rule.INDEPENDENT,
            {"delays": [Delay(action="action-2", behind="action-1", seconds=200.0)]},
        ),
        (Rule.OUTAGES, {"exhausted": [Exhausted(action="action-1", max_attempts=6, sends=5)]}),
        (Rule.HELD, {"contacts": [*outage(), other(1.2)]}),
        (Rule.HELD, {"contacts": [*outage(retry_after_seconds=60.0), other(50.0)]}),
        (Rule.HELD, {"contacts": [*outage(**LIMITED), other(50.0)]}),
        (Rule.HELD, {"contacts": [*STORED, other(5.0, **RESTARTED)]}),
        (
            # An earlier response does not shorten what the server has named.
            Rule.HELD,
            {"contacts": [*outage(retry_after_seconds=60.0), contact("held", 2.0), other(50.0)]},
        ),
        (
            Rule.PROBED,
            {"contacts": [*outage(), contact("sent", 9.0, number=3), other(9.1)]},
        ),
        (Rule.RESUMED, {"idle": [Idle(action="action-2", ended="blocked", next_seconds=None)]}),
        (Rule.RESUMED, {"idle": [Idle(action="action-2", ended="held", next_seconds=600.0)]}),
        (Rule.DRAINS, {"unfinished": ["action-2 is pending"]}),
        (Rule.NO_OTHER_ERROR, {"errors": ["KeyError in the worker"]}),
    ],
)
def test_each_violation_is_reported_under_its_rule(rule: Rule, changes: dict[str, Any]) -> None:
    assert rule in rules_of(**changes)


def test_action_whose_effect_was_lost_in_a_restore_may_have_none() -> None:
    lost = [ACTIONS[0], replace(ACTIONS[1], lost=True)]
    changes: dict[str, Any] = {
        "effects": GOOD.effects[:1],
        "jobs": GOOD.jobs[:1],
        "job_effects": GOOD.job_effects[:1],
    }
    assert rules_of(actions=lost, **changes) == set()
    assert Rule.EXACTLY_ONCE in rules_of(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"writes": WRITES, "seen": [replace(SEEN, version=2, how="conflict", action="action-2")]},
        {"writes": WRITES, "seen": [replace(SEEN, version=2, how="decided", action=None)]},
        {"writes": WRITES, "seen": [replace(SEEN, version=2, at=-1.0)]},
        {"writes": [*WRITES[:2], replace(WRITES[2], is_checked=False)]},
        {"writes": WRITES, "are_versions_lost": True},
        {"conflicts": [CONFLICT], "writes": WRITES[:2]},
        {"exhausted": [Exhausted(action="action-1", max_attempts=6, sends=6)]},
    ],
)
def test_writes_over_versions_that_were_noticed_are_no_violation(changes: dict[str, Any]) -> None:
    assert rules_of(**changes) == set()


@pytest.mark.parametrize(
    "contacts",
    [
        [*outage(), other(9.0)],
        [*outage(retry_after_seconds=60.0), contact("responded", 2.0), other(2.1)],
        [*outage(), contact("online", 1.1, number=0), other(1.2)],
        [*outage(**LIMITED), other(2.0, endpoint="/steps")],
        # The process has begun its drain before the hold was stored, or its clock was set since.
        [*STORED, other(5.0, **RESTARTED | {"drain_began_at": 0.5})],
        [*STORED, other(5.0, **RESTARTED, clock_seconds=3600.0)],
        # A hold that the server has not named is not stored.
        [*outage(), contact("stored", 1.0, number=0), other(1.1, process="app 2")],
        # The same probe once more, and a probe of another endpoint.
        [*outage(), contact("sent", 9.0, number=3), contact("sent", 9.1, number=4)],
        [*outage(**LIMITED), contact("sent", 70.0, number=3), other(70.1, endpoint="/steps")],
        [*outage(), contact("sent", 9.0, number=3), contact("none", 9.1, number=3), other(9.2)],
        # What was sent before the hold and got no response yet is not a probe.
        [contact("sent", 0.5, number=3, action="action-3"), *outage(), other(9.2)],
    ],
)
def test_requests_that_keep_to_holds_are_no_violation(contacts: list[Contact]) -> None:
    assert rules_of(contacts=contacts) == set()


@pytest.mark.parametrize(
    "temporary",
    [
        response(status=503, body=b"down"),
        response(status=429, body=b"slow"),
        response(status=409, body=b"runs", code="idempotency.in_progress"),
        response(status=409, body=b"other", code="idempotency.payload_mismatch", request="b"),
        response(status=422, body=b"no", code="INSUFFICIENT_POINTS", stored=False),
    ],
)
def test_temporary_responses_may_differ(temporary: ResponseSeen) -> None:
    assert rules_of(responses=[response(), temporary]) == set()


def test_conflict_for_a_key_that_was_used_during_a_restore_is_no_violation() -> None:
    conflict = response(status=409, body=b"other", code="idempotency.payload_mismatch", request="b")
    other = response(status=422, body=b"1", is_unsettled=True)
    assert rules_of(responses=[other, conflict]) == set()
    for again in (
        msgspec.structs.replace(other, tenant="bob"),
        msgspec.structs.replace(conflict, is_unsettled=True),
    ):
        assert rules_of(responses=[again, conflict]) == {Rule.OWN_RESPONSES}
