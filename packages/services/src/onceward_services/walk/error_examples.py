"""An example of every error code of the walk service, for the OpenAPI document."""

from typing import Any, Final, NamedTuple

__all__ = ["EXAMPLES", "Example"]


class Example(NamedTuple):
    """The status, the message and the details of one error."""

    status: int
    message: str
    details: dict[str, Any] = {}  # noqa: RUF012 - never changed


_QUEST: Final = {"questId": "quest.001"}

EXAMPLES: Final[dict[str, Example]] = {
    "ALREADY_ALLOCATED": Example(
        409, "'node.even-stride' is allocated already", {"nodeIds": ["node.even-stride"]}
    ),
    "ATTESTATION_INVALID": Example(401, "App Check: there is no App Check token"),
    "BURST_RATE_EXCEEDED": Example(
        422,
        "the step rate is too high for the sample span",
        {
            "received": 9000,
            "limit": 5400,
            "spanSeconds": 600.0,
            "minSpanSeconds": 1000.0,
            "maxStepsPerSecond": 3.0,
            "tolerance": 3.0,
        },
    ),
    "FUTURE_DATED": Example(
        422,
        "the day is in the future",
        {
            "received": "2026-05-24",
            "today": "2026-05-22",
            "limit": "2026-05-23",
            "passesAt": "2026-05-23T00:00:00+00:00",
        },
    ),
    "INSUFFICIENT_ENERGY": Example(
        422,
        "this costs 500 energy, and there is 320 to spend",
        {"energyRequired": 500, "energyBalance": 120, "energySpendable": 320},
    ),
    "INSUFFICIENT_POINTS": Example(
        422,
        "this costs 3 points, and the balance is 1",
        {"pointsRequired": 3, "pointsBanked": 1},
    ),
    "OFFLINE_CAP_EXCEEDED": Example(
        422,
        "the day is more than 7 days old",
        {
            "received": "2026-05-14",
            "today": "2026-05-22",
            "limit": "2026-05-15",
            "capDays": 7,
            "passesAt": None,
        },
    ),
    "PREREQUISITES_NOT_MET": Example(
        422,
        "'node.long-breath' requires 'node.even-stride'",
        {"nodeId": "node.long-breath", "missing": ["node.even-stride"]},
    ),
    "QUEST_ALREADY_COMPLETED": Example(409, "'First light' is completed", _QUEST),
    "QUEST_ALREADY_IN_PROGRESS": Example(409, "'First light' is in progress", _QUEST),
    "QUEST_INCOMPLETE": Example(
        422, "'First light' is at step 2 of 2", _QUEST | {"currentStep": 2, "steps": 2}
    ),
    "QUEST_NOT_IN_PROGRESS": Example(422, "'First light' has not been started", _QUEST),
    "REREAD_INVALID": Example(
        422,
        "the samples do not add up to count",
        {"received": 5200, "expected": 6000},
    ),
    "REVIEW_ALREADY_RESOLVED": Example(
        409,
        "this review is resolved already",
        {
            "decision": "accept",
            "resolvedBy": "boss",
            "resolvedAt": "2026-05-22T12:00:00+00:00",
        },
    ),
    "SOURCE_NOT_ALLOWED": Example(
        403,
        "steps from this source bundle are not accepted",
        {"received": "com.example.fake", "allowed": ["com.apple.health.*"]},
    ),
    "STEP_COUNT_EXCEEDED": Example(
        422,
        "a day can have at most 50000 steps",
        {"received": 61_000, "limit": 50_000, "maxStepsPerDay": 50_000},
    ),
    "STEP_OUT_OF_ORDER": Example(
        422,
        "'First light' is at step 1 of 2",
        _QUEST | {"step": 2, "currentStep": 1, "steps": 2},
    ),
    "TOO_MANY_DEVICES": Example(
        422, "a walker can have 20 devices: remove one first", {"limit": 20}
    ),
    "TZ_JUMP": Example(
        422,
        "the time zone is too far from that of the last report",
        {
            "received": "Pacific/Auckland",
            "jumpHours": 14.0,
            "maxJumpHours": 12.0,
            "limit": 12.0,
            "lastOffsetHours": -2.0,
            "passesAt": "2026-05-23T12:00:00.000001+00:00",
        },
    ),
    "UNKNOWN_NODE": Example(422, "there is no node 'node.x'", {"nodeIds": ["node.x"]}),
    "UNKNOWN_SINK": Example(
        422, "there is no sink 'gambling'", {"sinks": ["combat", "craft", "harvest"]}
    ),
    "WALKER_BEING_DELETED": Example(
        409,
        "everything about this walker is being deleted: try again when that has ended",
        {"requestedAt": "2026-05-22T12:00:00+00:00"},
    ),
    "WALKER_NOT_SUSPENDED": Example(409, "this walker is not suspended"),
    "WALKER_SUSPENDED": Example(
        403,
        "this walker is suspended: an admin has to reinstate it",
        {"suspendedAt": "2026-05-22T12:00:00+00:00"},
    ),
}
