"""The table of what may become of an entry, case by case."""

import itertools

import pytest

from onceward_outbox.entry import OPEN, TRANSITIONS, Status, Transition, after
from onceward_outbox.errors import TransitionError
from onceward_protocol.operation import METHODS, Operation

LEGAL = {
    # What the drain does.
    ("claim", "pending"): "in_flight",
    ("succeed", "in_flight"): "succeeded",
    ("retry_later", "in_flight"): "pending",
    ("release", "in_flight"): "pending",
    ("fail", "in_flight"): "failed",
    ("conflict", "in_flight"): "conflict",
    ("expire", "in_flight"): "expired",
    ("expire", "pending"): "expired",
    ("watchdog", "in_flight"): "pending",
    # What follows from another entry.
    ("park", "pending"): "failed",
    ("revive", "failed"): "pending",
    # What a person does.
    ("retry", "failed"): "pending",
    ("revive", "expired"): "pending",
    ("resend", "conflict"): "pending",
    ("give_up", "conflict"): "failed",
    ("edit", "pending"): "pending",
    ("edit", "failed"): "pending",
    ("edit", "conflict"): "pending",
    ("cancel", "pending"): "discarded",
    ("discard", "failed"): "discarded",
    ("discard", "conflict"): "discarded",
}


@pytest.mark.parametrize(("action", "status"), list(itertools.product(Transition, Status)))
def test_status_transition_must_be_valid(action: Transition, status: Status) -> None:
    expected = LEGAL.get((action.value, status.value))
    if expected is None:
        with pytest.raises(TransitionError):
            after(action, status)
    else:
        assert after(action, status) == expected


def test_the_refusal_names_both_the_status_and_what_it_would_take() -> None:
    with pytest.raises(TransitionError, match=r"succeeded cannot discard: .*failed or conflict"):
        after(Transition.DISCARD, Status.SUCCEEDED)


def test_only_a_person_leads_out_of_a_settled_status() -> None:
    """An entry that the device expired unsent can be revived."""
    leads_out = {status for froms in TRANSITIONS.values() for status in froms}
    assert leads_out == OPEN | {Status.EXPIRED}
    assert set(Status) - OPEN == {Status.SUCCEEDED, Status.EXPIRED, Status.DISCARDED}


def test_every_status_but_the_first_can_be_reached() -> None:
    reached = {to for froms in TRANSITIONS.values() for to in froms.values()}
    assert reached == set(Status)


def test_every_verb_has_its_method() -> None:
    assert {verb.value: METHODS[verb] for verb in Operation} == {
        "create": "POST",
        "update": "PUT",
        "patch": "PATCH",
        "delete": "DELETE",
    }
