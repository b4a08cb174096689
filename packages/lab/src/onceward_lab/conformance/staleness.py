"""Checks of the age limit for actions made offline (walk service)."""

from datetime import timedelta
from typing import Any, Final

from onceward_lab.conformance.expect import expect, expect_error, expect_replay
from onceward_lab.conformance.harness import Check, Harness, Request, Response
from onceward_lab.conformance.request_factory import timestamp
from onceward_protocol.error_codes import CODES

__all__ = ["CHECKS"]

# Allows for different clocks; the test vectors check the exact limits.
_MARGIN: Final = timedelta(minutes=30)
_LIMIT: Final = timedelta(days=7, hours=6)
_GRACE: Final = timedelta(hours=6)
_DETAILS: Final = ("clientGeneratedAt", "serverNow", "ageDays", "capDays", "graceHours")


def _allocation(**times: Any) -> Request:
    body = {"allocations": [{"nodeId": "node.even-stride"}]} | times
    return Request(method="POST", path="/tree/allocate", body=body, other_body=None)


async def _old(harness: Harness) -> str:
    request = _allocation(clientGeneratedAt=timestamp(_LIMIT + _MARGIN))
    key = harness.new_key()
    response = await harness.send(request, key)
    details = expect_error(harness, response, "stale_action")
    missing = [name for name in _DETAILS if name not in details]
    expect(not missing, f"{response.summary()}: details without {', '.join(missing)}")
    again = expect_replay(await harness.send(request, key), response)
    return f"{response.summary()}, then {again.summary()}"


async def _future(harness: Harness) -> str:
    response = await harness.send(
        _allocation(clientGeneratedAt=timestamp(-_GRACE - _MARGIN)), harness.new_key()
    )
    expect_error(harness, response, "stale_action")
    return response.summary()


async def _young_enough(harness: Harness) -> str:
    for ago in (_LIMIT - _MARGIN, _MARGIN - _GRACE):
        response = await harness.send(
            _allocation(clientGeneratedAt=timestamp(ago)), harness.new_key()
        )
        _not_stale(harness, response)
    return f"{response.summary()}: not stale"


async def _invalid_timestamp(harness: Harness) -> str:
    for times in ({}, {"clientGeneratedAt": "2026-01-31T09:30:00"}, {"clientGeneratedAt": 1}):
        response = await harness.send(_allocation(**times), harness.new_key())
        expect_error(harness, response, "body_invalid")
    return "400 for each"


async def _sent_before_made(harness: Harness) -> str:
    times = {
        "clientGeneratedAt": timestamp(),
        "clientSubmittedAt": timestamp(_GRACE + _MARGIN),
    }
    response = await harness.send(_allocation(**times), harness.new_key())
    expect_error(harness, response, "body_invalid")
    return response.summary()


async def _queued_for_days(harness: Harness) -> str:
    times = {"clientGeneratedAt": timestamp(timedelta(days=5)), "clientSubmittedAt": timestamp()}
    response = await harness.send(_allocation(**times), harness.new_key())
    _not_stale(harness, response)
    expect(response.status != CODES["body_invalid"].status, response.summary())
    return f"{response.summary()}: not stale"


def _not_stale(harness: Harness, response: Response) -> None:
    code = CODES["stale_action"].name(harness.profile.error_format)
    expect(response.code(harness.profile.error_format) != code, response.summary())


CHECKS: Final = (
    Check(
        "an action past the cap",
        "Staleness",
        "422 STALE_ACTION with details, then replayed",
        _old,
        why="An old action would change a state that has moved on without it.",
        change="Compare clientGeneratedAt with the server's clock after the record look-up and "
        "before the handler; store the 422 with its details.",
    ),
    Check(
        "an action from the future",
        "Staleness",
        "422 STALE_ACTION",
        _future,
        why="A wrong clock on a device would keep an action valid for too long.",
        change="Respond 422 STALE_ACTION if clientGeneratedAt is more than 6 hours ahead.",
    ),
    Check(
        "an action just inside the cap",
        "Staleness",
        "not stale",
        _young_enough,
        why="A device that was offline for a week would lose what its user did.",
        change="Accept actions up to 7 days and 6 hours old, and up to 6 hours ahead.",
    ),
    Check(
        "an action without a valid timestamp",
        "Staleness",
        "400 if missing, without zone, or not a string",
        _invalid_timestamp,
        why="The age of an action without a time zone is a guess of up to a day.",
        change="Require clientGeneratedAt as ISO 8601 text with a zone; otherwise respond 400.",
    ),
    Check(
        "submitted before it was generated",
        "Staleness",
        "400",
        _sent_before_made,
        why="An action cannot be sent before it was made, so one of the two times is wrong.",
        change="Respond 400 if clientSubmittedAt is more than 6 hours before clientGeneratedAt.",
    ),
    Check(
        "submitted days after it was generated",
        "Staleness",
        "not stale, not 400",
        _queued_for_days,
        why="This is the normal case of an action that was queued offline.",
        change="Do not limit how long after clientGeneratedAt an action is submitted; the age "
        "limit covers it.",
    ),
)
