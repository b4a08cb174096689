"""Checks of concurrent requests with one key."""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from onceward_lab.conformance.expect import expect, expect_error, expect_replay
from onceward_lab.conformance.harness import Check, Harness, Request, Response
from onceward_protocol.error_codes import CODES

__all__ = ["CHECKS"]

_RACERS: Final = 8
_CONFLICT: Final = 409


async def _identical(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    responses = await asyncio.gather(*(harness.send(request, key) for _ in range(_RACERS)))
    done = _without_in_progress(harness, responses)
    return await _one_effect(harness, request, key, done, in_progress=len(responses) - len(done))


async def _two_bodies(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    other = msgspec.json.encode(request.other_body)
    responses = await asyncio.gather(
        *(harness.send(request, key, content=other if n % 2 else None) for n in range(_RACERS))
    )
    done = [
        response for response in _without_in_progress(harness, responses) if response.is_success
    ]
    expect(bool(done), "no request succeeded")
    expect(
        len({response.body for response in done}) == 1, "both bodies were accepted under one key"
    )
    expect(
        sum(not response.is_replay for response in done) <= 1,
        "two responses are not marked as replays",
    )
    for response in _without_in_progress(harness, responses):
        if not response.is_success:
            expect_error(harness, response, "payload_mismatch")
    refused = sum(not response.is_success for response in responses)
    expect(refused >= _RACERS // 2, f"only {refused} of {_RACERS} were refused")
    return f"{len(done)} with one response, {refused} refused"


def _without_in_progress(harness: Harness, responses: Sequence[Response]) -> list[Response]:
    """Leave out 409 in_progress; each of these must have a Retry-After header."""
    code = CODES["in_progress"].name(harness.profile.error_format)
    rest = []
    for response in responses:
        found = harness.code_of(response)
        # Without codes, the header is what distinguishes it from a mismatch.
        is_without_code = harness.profile.statuses_only and response.status == _CONFLICT
        if found == code or (is_without_code and "retry-after" in response.headers):
            expect_error(harness, response, "in_progress")
            expect("retry-after" in response.headers, f"{response.summary()} without Retry-After")
        else:
            rest.append(response)
    return rest


async def _one_effect(
    harness: Harness, request: Request, key: str, done: Sequence[Response], *, in_progress: int
) -> str:
    for response in done:
        expect(response.is_success, f"{response.summary()} among {_RACERS} identical requests")
    first = [response for response in done if not response.is_replay]
    different = len({response.body for response in done})
    expect(different == 1, f"{different} different responses to {_RACERS} identical requests")
    expect(len(first) == 1, f"{len(first)} of {_RACERS} responses are not marked as replays")
    for response in done:
        if response.is_replay:
            expect_replay(response, first[0])
    expect_replay(await harness.send(request, key), first[0])
    waiting = f", {in_progress} in progress" if in_progress else ""
    return f"1 executed, {len(done) - 1} replayed{waiting}"


CHECKS: Final = (
    Check(
        "concurrent identical requests",
        "Guarded request",
        "one is executed; the others get its response, or 409 in_progress with Retry-After",
        _identical,
        why="A client that retries while its first request still runs would cause two effects.",
        change="Claim the key before the handler runs: a unique constraint or a lock in the "
        "transaction of the effect, across all processes. A look-up before the insert is not "
        "enough. Others wait, or get 409 in_progress with Retry-After.",
    ),
    Check(
        "concurrent requests with one key and two bodies",
        "Guarded request",
        "one body is executed, the other gets 409 payload_mismatch",
        _two_bodies,
        why="Both effects would happen, and only one of them would be known to the client.",
        change="Claim the key before the handler runs, and compare the fingerprint after the "
        "claim, not before it.",
    ),
)
