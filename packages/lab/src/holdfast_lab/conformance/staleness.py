"""Checks of the age limit for actions made offline (walk service)."""

from datetime import timedelta
from typing import Any, Final

from holdfast.core.error_formats import CODES
from holdfast_lab.conformance.expect import expect, expect_error, expect_replay
from holdfast_lab.conformance.harness import Check, Harness, Request, Response
from holdfast_lab.conformance.request_factory import timestamp

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
        "an action past the cap", "Staleness", "422 STALE_ACTION with details, then replayed", _old
    ),
    Check("an action from the future", "Staleness", "422 STALE_ACTION", _future),
    Check("an action just inside the cap", "Staleness", "not stale", _young_enough),
    Check(
        "an action without a valid timestamp",
        "Staleness",
        "400 if missing, without zone, or not a string",
        _invalid_timestamp,
    ),
    Check("submitted before it was generated", "Staleness", "400", _sent_before_made),
    Check(
        "submitted days after it was generated", "Staleness", "not stale, not 400", _queued_for_days
    ),
)
