"""The outbox profile of walk: strict order, timestamps in the body, quest chains rebuilt."""

from dataclasses import replace
from datetime import timedelta
from typing import Final

from onceward_outbox import Profile, TimestampsInBody
from onceward_protocol.response_classification import AttestationNeeded, Done, OutOfOrder, Refused
from onceward_protocol.retry import DEVICE
from onceward_protocol.staleness import CAP, GRACE
from onceward_services.walk.quest_chain import QuestChain

__all__ = ["PROFILE", "STRICT_PROFILE"]

PROFILE: Final = Profile(
    # Without its start, or without a step, the rest of a quest makes no sense.
    chains=("/quest/{quest}/*", "/quest/start#/questId", "/quest/complete#/questId"),
    name="walk",
    # An allocation may reveal the quest that the next entry advances, and nothing in the entries
    # says so: they are sent in the order of the actions.
    strict_order=True,
    # Twelve attempts per wake-up; the entry then stays queued for the next one.
    retry=DEVICE,
    key_lifetime=timedelta(days=7),
    # What the server accepts: its cap and its grace.
    stale_after=CAP + GRACE,
    # Made anew for each action.
    batch_headers=frozenset({"x-firebase-appcheck"}),
    codes={
        # The effect exists, whichever request caused it.
        "ALREADY_ALLOCATED": Done(),
        "QUEST_ALREADY_COMPLETED": Done(),
        "QUEST_ALREADY_IN_PROGRESS": Done(),
        # No longer possible.
        "PREREQUISITES_NOT_MET": Refused(),
        "INSUFFICIENT_POINTS": Refused(),
        "INSUFFICIENT_ENERGY": Refused(),
        "UNKNOWN_NODE": Refused(),
        "UNKNOWN_SINK": Refused(),
        "TOO_MANY_DEVICES": Refused(),
        "WALKER_BEING_DELETED": Refused(),
        "WALKER_SUSPENDED": Refused(),
        "QUEST_NOT_IN_PROGRESS": Refused(),
        "QUEST_INCOMPLETE": Refused(),
        # About the report itself: sent again, it would count as another attempt to cheat.
        "STEP_COUNT_EXCEEDED": Refused(),
        "BURST_RATE_EXCEEDED": Refused(),
        "TZ_JUMP": Refused(),
        "FUTURE_DATED": Refused(),
        "OFFLINE_CAP_EXCEEDED": Refused(),
        "REREAD_INVALID": Refused(),
        # Possible, but not at this point of the chain.
        "STEP_OUT_OF_ORDER": OutOfOrder(),
        "ORDERING_VIOLATION": OutOfOrder(),
        # About the App Check token of one report, not about the sign-in.
        "ATTESTATION_INVALID": AttestationNeeded(),
    },
    # What an app shows, and which state it reads again.
    causes={
        "PREREQUISITES_NOT_MET": "prerequisites",
        "QUEST_NOT_IN_PROGRESS": "prerequisites",
        "QUEST_INCOMPLETE": "prerequisites",
        "INSUFFICIENT_POINTS": "points_changed",
        "INSUFFICIENT_ENERGY": "energy_changed",
        "UNKNOWN_NODE": "not_found",
        "UNKNOWN_SINK": "not_found",
        "OFFLINE_CAP_EXCEEDED": "too_old",
        "STEP_COUNT_EXCEEDED": "implausible",
        "BURST_RATE_EXCEEDED": "implausible",
        "COUNT_WENT_BACKWARDS": "implausible",
        "FUTURE_DATED": "implausible",
        "REREAD_INVALID": "implausible",
        "TZ_JUMP": "implausible",
    },
    # A server with ONCEWARD_WALK_ORDERING=strict refuses the first action without a number.
    strict_endpoints=(
        "/tree/allocate",
        "/quest/{quest}/step/{step}/advance",
        "/quest/complete",
        "/step/ingest",
        "/energy/spend",
    ),
    numbers_on_demand=True,
    payload_must_be_object=True,
    request_format=TimestampsInBody(key_in_body=frozenset({"/step/ingest"})),
    recovery=QuestChain(),
)

# For apps whose server is known to have ONCEWARD_WALK_ORDERING=strict: the first action is not sent
# in vain. Outbox.open(…, profiles=[STRICT_PROFILE]).
STRICT_PROFILE: Final = replace(PROFILE, numbers_on_demand=False)
