"""The outbox profiles of the services, as they are registered."""

from importlib.metadata import entry_points

import pytest

from onceward_outbox.entry import DEFAULT_PRIORITY
from onceward_outbox.profile import ENTRY_POINT_GROUP, ProfileRegistry
from onceward_protocol.keys import KeyFormat
from onceward_protocol.response_classification import (
    AttestationNeeded,
    Done,
    OutOfOrder,
    Refused,
    Verdict,
    classify,
)
from onceward_services.field.outbox_profile import PROFILE as FIELD
from onceward_services.walk.outbox_profile import PROFILE as WALK
from packages.outbox.tests.samples import entry

NAMES = ("field", "planning", "routes", "walk")


def test_every_service_has_a_profile_that_is_found_by_its_name() -> None:
    assert sorted(point.name for point in entry_points(group=ENTRY_POINT_GROUP)) == list(NAMES)
    registry = ProfileRegistry()
    assert [registry.get(name).name for name in NAMES] == list(NAMES)


def test_key_lifetimes_are_those_of_the_policies() -> None:
    registry = ProfileRegistry()
    days = {name: registry.get(name).key_lifetime.days for name in NAMES}
    assert days == {"field": 7, "planning": 1, "routes": 1, "walk": 7}


def test_only_planning_takes_opaque_keys_and_wants_a_version_with_forced_writes() -> None:
    profiles = [ProfileRegistry().get(name) for name in NAMES]
    assert [p.name for p in profiles if p.key_format is KeyFormat.OPAQUE] == ["planning"]
    assert [p.name for p in profiles if p.force_with_version] == ["planning"]


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        (409, "ALREADY_ALLOCATED", Done()),
        (409, "QUEST_ALREADY_COMPLETED", Done()),
        (409, "QUEST_ALREADY_IN_PROGRESS", Done()),
        (422, "PREREQUISITES_NOT_MET", Refused()),
        (422, "INSUFFICIENT_POINTS", Refused()),
        (422, "INSUFFICIENT_ENERGY", Refused()),
        (422, "UNKNOWN_NODE", Refused()),
        (422, "QUEST_NOT_IN_PROGRESS", Refused()),
        (422, "QUEST_INCOMPLETE", Refused()),
        (422, "STEP_COUNT_EXCEEDED", Refused()),
        (422, "BURST_RATE_EXCEEDED", Refused()),
        (422, "TZ_JUMP", Refused()),
        (422, "FUTURE_DATED", Refused()),
        (422, "OFFLINE_CAP_EXCEEDED", Refused()),
        (422, "STEP_OUT_OF_ORDER", OutOfOrder()),
        (422, "ORDERING_VIOLATION", OutOfOrder()),
        (401, "ATTESTATION_INVALID", AttestationNeeded()),
    ],
)
def test_a_code_of_walk_means(status: int, code: str, verdict: Verdict) -> None:
    assert classify(status, code, entry(), WALK.codes) == verdict


def test_walk_has_exactly_the_codes_that_are_agreed_on() -> None:
    assert set(WALK.codes) == {
        "ALREADY_ALLOCATED",
        "QUEST_ALREADY_COMPLETED",
        "QUEST_ALREADY_IN_PROGRESS",
        "PREREQUISITES_NOT_MET",
        "INSUFFICIENT_POINTS",
        "INSUFFICIENT_ENERGY",
        "UNKNOWN_NODE",
        "UNKNOWN_SINK",
        "TOO_MANY_DEVICES",
        "WALKER_BEING_DELETED",
        "WALKER_SUSPENDED",
        "QUEST_NOT_IN_PROGRESS",
        "QUEST_INCOMPLETE",
        "STEP_COUNT_EXCEEDED",
        "BURST_RATE_EXCEEDED",
        "TZ_JUMP",
        "FUTURE_DATED",
        "OFFLINE_CAP_EXCEEDED",
        "REREAD_INVALID",
        "STEP_OUT_OF_ORDER",
        "ORDERING_VIOLATION",
        "ATTESTATION_INVALID",
    }


def test_a_code_of_walk_counts_only_with_the_statuses_it_belongs_to() -> None:
    assert classify(400, "ALREADY_ALLOCATED", entry(), WALK.codes) == Refused()


@pytest.mark.parametrize(
    ("entity_type", "priority"),
    [
        ("activity", 10),
        ("activities", 10),
        ("expense", 8),
        ("expenses", 8),
        ("contact", 5),
        ("contacts", 5),
        ("anything else", DEFAULT_PRIORITY),
    ],
)
def test_priorities_go_by_entity_type(entity_type: str, priority: int) -> None:
    assert FIELD.priority_of(entity_type) == priority


def test_only_walk_keeps_strict_order() -> None:
    assert [name for name in NAMES if ProfileRegistry().get(name).strict_order] == ["walk"]
