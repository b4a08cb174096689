"""Checks of staleness, for walk: what was made offline too long ago."""

from datetime import timedelta
from typing import Any, Final

from holdfast.core.error_formats import CODES
from holdfast_lab.conformance.expect import expect, expect_error, expect_replay
from holdfast_lab.conformance.harness import Action, Answer, Check, Kit
from holdfast_lab.conformance.request_factory import instant

__all__ = ["CHECKS"]

# Clocks of two machines may be apart; the exact boundary is for the vectors.
_MARGIN: Final = timedelta(minutes=30)
_LIMIT: Final = timedelta(days=7, hours=6)
_GRACE: Final = timedelta(hours=6)
_DETAILS: Final = ("clientGeneratedAt", "serverNow", "ageDays", "capDays", "graceHours")


def _allocation(**times: Any) -> Action:
    body = {"allocations": [{"nodeId": "node.even-stride"}]} | times
    return Action(method="POST", path="/tree/allocate", body=body, other_body=None)


async def _old(kit: Kit) -> str:
    action = _allocation(clientGeneratedAt=instant(_LIMIT + _MARGIN))
    key = kit.new_key()
    answer = await kit.send(action, key)
    details = expect_error(kit, answer, "stale_action")
    missing = [name for name in _DETAILS if name not in details]
    expect(not missing, f"{answer.told()}: details without {', '.join(missing)}")
    again = expect_replay(await kit.send(action, key), answer)
    return f"{answer.told()}, then {again.told()}"


async def _future(kit: Kit) -> str:
    answer = await kit.send(
        _allocation(clientGeneratedAt=instant(-_GRACE - _MARGIN)), kit.new_key()
    )
    expect_error(kit, answer, "stale_action")
    return answer.told()


async def _young_enough(kit: Kit) -> str:
    for back in (_LIMIT - _MARGIN, _MARGIN - _GRACE):
        answer = await kit.send(_allocation(clientGeneratedAt=instant(back)), kit.new_key())
        _not_stale(kit, answer)
    return f"{answer.told()}: whatever it is, not stale"


async def _no_instant(kit: Kit) -> str:
    for times in ({}, {"clientGeneratedAt": "2026-01-31T09:30:00"}, {"clientGeneratedAt": 1}):
        answer = await kit.send(_allocation(**times), kit.new_key())
        expect_error(kit, answer, "body_invalid")
    return "400 for each"


async def _sent_before_made(kit: Kit) -> str:
    times = {
        "clientGeneratedAt": instant(),
        "clientSubmittedAt": instant(_GRACE + _MARGIN),
    }
    answer = await kit.send(_allocation(**times), kit.new_key())
    expect_error(kit, answer, "body_invalid")
    return answer.told()


async def _queued_for_days(kit: Kit) -> str:
    times = {"clientGeneratedAt": instant(timedelta(days=5)), "clientSubmittedAt": instant()}
    answer = await kit.send(_allocation(**times), kit.new_key())
    _not_stale(kit, answer)
    expect(answer.status != CODES["body_invalid"].status, answer.told())
    return f"{answer.told()}: whatever it is, not stale"


def _not_stale(kit: Kit, answer: Answer) -> None:
    code = CODES["stale_action"].name(kit.profile.error_format)
    expect(answer.code(kit.profile.error_format) != code, answer.told())


CHECKS: Final = (
    Check("an action past the cap", "§5", "422 STALE_ACTION with details, then replayed", _old),
    Check("an action from the future", "§5", "422 STALE_ACTION", _future),
    Check("an action just inside the cap", "§5", "not stale", _young_enough),
    Check("an action without an instant", "§5", "400 for none, no zone, no text", _no_instant),
    Check("sent before it was made", "§5", "400", _sent_before_made),
    Check("sent days after it was made", "§5", "not stale, not 400", _queued_for_days),
)
