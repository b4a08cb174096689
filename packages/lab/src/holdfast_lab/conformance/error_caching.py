"""Checks of which errors are stored: none, or only some, by the policy of the service."""

from typing import Final

from holdfast_lab.conformance.expect import expect, expect_error, expect_fresh
from holdfast_lab.conformance.harness import Action, Check, Kit
from holdfast_lab.conformance.request_factory import instant

__all__ = ["ROUTES_CHECKS", "WALK_CHECKS"]


async def _routes(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    bad = Action(
        method=action.method,
        path=action.path,
        body=action.body | {"minutes": 0},
        other_body=None,
    )
    first, second = await kit.send(bad, key), await kit.send(bad, key)
    expect_error(kit, first, "field_not_allowed")
    expect_error(kit, second, "field_not_allowed")
    again = expect_fresh(await kit.send(action, key))
    return f"{first.told()} twice, then with a good body {again.told()}"


async def _walk(kit: Kit) -> str:
    action = Action(
        method="POST",
        path="/tree/allocate",
        body={"allocations": [{"nodeId": "node.unheard-of"}], "clientGeneratedAt": instant()},
        other_body=None,
    )
    key = kit.new_key()
    first, second = await kit.send(action, key), await kit.send(action, key)
    for answer in (first, second):
        code = answer.code(kit.profile.error_format)
        expect(code == "UNKNOWN_NODE", f"{answer.told()} where UNKNOWN_NODE was due")
        expect(not answer.is_replay, f"{answer.told()}, stored")
    return f"{first.told()} twice, not replayed"


ROUTES_CHECKS: Final = (
    Check("errors are not stored", "§2", "422 twice, then the key is free", _routes),
)
WALK_CHECKS: Final = (
    Check("errors of the handler are not stored", "§2", "422 twice, not replayed", _walk),
)
