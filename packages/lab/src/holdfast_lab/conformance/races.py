"""Checks under concurrency: many at once with one key."""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.core.error_formats import CODES
from holdfast_lab.conformance.expect import expect, expect_error, expect_replay
from holdfast_lab.conformance.harness import Action, Answer, Check, Kit

__all__ = ["CHECKS"]

_RACERS: Final = 8


async def _identical(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    answers = await asyncio.gather(*(kit.send(action, key) for _ in range(_RACERS)))
    done = _without_in_progress(kit, answers)
    return await _one_effect(kit, action, key, done, in_progress=len(answers) - len(done))


async def _two_bodies(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    other = msgspec.json.encode(action.other_body)
    answers = await asyncio.gather(
        *(kit.send(action, key, content=other if n % 2 else None) for n in range(_RACERS))
    )
    done = [answer for answer in _without_in_progress(kit, answers) if answer.is_success]
    expect(bool(done), "nobody was served")
    expect(len({answer.body for answer in done}) == 1, "both bodies were accepted under one key")
    expect(
        sum(not answer.is_replay for answer in done) <= 1,
        "two answers say that they are the first",
    )
    for answer in _without_in_progress(kit, answers):
        if not answer.is_success:
            expect_error(kit, answer, "payload_mismatch")
    refused = sum(not answer.is_success for answer in answers)
    expect(refused >= _RACERS // 2, f"only {refused} of {_RACERS} were refused")
    return f"{len(done)} with one answer, {refused} refused"


def _without_in_progress(kit: Kit, answers: Sequence[Answer]) -> list[Answer]:
    """Leave out those that were told to wait; they have to be told for how long."""
    code = CODES["in_progress"].name(kit.profile.error_format)
    rest = []
    for answer in answers:
        if answer.code(kit.profile.error_format) == code:
            expect_error(kit, answer, "in_progress")
            expect("retry-after" in answer.headers, f"{answer.told()} without Retry-After")
        else:
            rest.append(answer)
    return rest


async def _one_effect(
    kit: Kit, action: Action, key: str, done: Sequence[Answer], *, in_progress: int
) -> str:
    for answer in done:
        expect(answer.is_success, f"{answer.told()} among {_RACERS} identical requests")
    first = [answer for answer in done if not answer.is_replay]
    different = len({answer.body for answer in done})
    expect(different == 1, f"{different} different answers to {_RACERS} identical requests")
    expect(len(first) == 1, f"{len(first)} of {_RACERS} answers say that they are the first")
    for answer in done:
        if answer.is_replay:
            expect_replay(answer, first[0])
    expect_replay(await kit.send(action, key), first[0])
    told_to_wait = f", {in_progress} told to wait" if in_progress else ""
    return f"1 done, {len(done) - 1} replayed{told_to_wait}"


CHECKS: Final = (
    Check(
        "identical requests at once",
        "§4",
        "one is done; the others get its answer, or 409 in_progress with Retry-After",
        _identical,
    ),
    Check(
        "two bodies at once under one key",
        "§4",
        "one body is done, the other 409 payload_mismatch",
        _two_bodies,
    ),
)
