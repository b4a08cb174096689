"""Checks of which errors a service stores."""

from typing import Final

from onceward_lab.conformance.expect import expect, expect_error, expect_first
from onceward_lab.conformance.harness import Check, Harness, Request
from onceward_lab.conformance.request_factory import timestamp

__all__ = ["ROUTES_CHECKS", "WALK_CHECKS"]


async def _routes(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    bad = Request(
        method=request.method,
        path=request.path,
        body=request.body | {"minutes": 0},
        other_body=None,
    )
    first, second = await harness.send(bad, key), await harness.send(bad, key)
    expect_error(harness, first, "field_not_allowed")
    expect_error(harness, second, "field_not_allowed")
    again = expect_first(await harness.send(request, key))
    return f"{first.summary()} twice, then with a valid body {again.summary()}"


async def _walk(harness: Harness) -> str:
    request = Request(
        method="POST",
        path="/tree/allocate",
        body={"allocations": [{"nodeId": "node.unheard-of"}], "clientGeneratedAt": timestamp()},
        other_body=None,
    )
    key = harness.new_key()
    first, second = await harness.send(request, key), await harness.send(request, key)
    for response in (first, second):
        code = response.code(harness.profile.error_format)
        expect(code == "UNKNOWN_NODE", f"{response.summary()}, expected UNKNOWN_NODE")
        expect(not response.is_replay, f"{response.summary()}, stored")
    return f"{first.summary()} twice, not replayed"


_STORED: Final = (
    "Do not store this response: roll back and free the key, so that the next request with it runs."
)
ROUTES_CHECKS: Final = (
    Check(
        "errors are not stored",
        "Stored responses",
        "422 twice, then the key can be used",
        _routes,
        why="The client corrects its request and sends it again with the same key.",
        change=_STORED,
    ),
)
WALK_CHECKS: Final = (
    Check(
        "errors of the handler are not stored",
        "Stored responses",
        "422 twice, not replayed",
        _walk,
        why="What is refused now may be allowed when an earlier action has arrived.",
        change=_STORED,
    ),
)
