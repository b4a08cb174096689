"""Attacks with many requests at once: duplicates, one key with many bodies, many keys."""

import asyncio
from collections import Counter
from typing import Final

import httpx
import msgspec

from onceward_lab.attack.target import Attack, Target
from onceward_lab.conformance.harness import CheckFailedError, Request, Response

__all__ = ["ATTACKS"]

_GROUP: Final = "floods"
_WRITE_EVERY_SECONDS: Final = 0.02
_WRITES_AT_ONCE: Final = 20
_ALLOWED: Final = (408, 409, 425, 429, 503)


async def _send_all(target: Target, requests: list[tuple[Request, str]]) -> list[Response | None]:
    async def send(request: Request, key: str) -> Response | None:
        try:
            return await target.harness.send(request, key)
        except httpx.HTTPError:  # refused, or not served in time
            return None

    return await asyncio.gather(*(send(request, key) for request, key in requests))


def _summary(responses: list[Response | None]) -> str:
    found = Counter(
        "no response" if response is None else response.summary() for response in responses
    )
    return ", ".join(f"{count} x {what}" for what, count in sorted(found.items()))


def _expect_no_failure(responses: list[Response | None]) -> None:
    for response in responses:
        if response is None:
            continue
        if not response.is_success and response.status not in _ALLOWED:
            raise CheckFailedError(_summary(responses))


async def _duplicates(target: Target) -> str:
    request, key = await target.harness.new_request(), target.harness.new_key()
    responses = await _send_all(target, [(request, key)] * target.limits.connections)
    _expect_no_failure(responses)
    successes = [r for r in responses if r is not None and r.is_success]
    executed = [response for response in successes if not response.is_replay]
    if len(executed) > 1 or len({response.body for response in successes}) > 1:
        raise CheckFailedError(f"executed {len(executed)} times: {_summary(responses)}")
    again = await target.send_until_served(request, key)
    if not again.is_success:
        raise CheckFailedError(f"{again.summary()} afterwards")
    return _summary(responses)


async def _conflicts(target: Target) -> str:
    first, key = await target.harness.new_request(), target.harness.new_key()
    requests = [
        (msgspec.structs.replace(first, body=(await target.harness.new_request()).body), key)
        for _ in range(target.limits.connections)
    ]
    responses = await _send_all(target, requests)
    accepted = [r for r in responses if r is not None and r.is_success]
    mismatch = target.harness.profile.mismatch_status
    for response in responses:
        if response is None or response.is_success or response.status == mismatch:
            continue
        if response.status not in _ALLOWED:
            raise CheckFailedError(_summary(responses))
    if len(accepted) > 1:
        raise CheckFailedError(f"{len(accepted)} bodies accepted: {_summary(responses)}")
    return _summary(responses)


async def _new_keys(target: Target) -> str:
    """Flood with new keys of one tenant while another one writes."""
    other = target.harness.other_credentials
    requests = [
        (await target.harness.new_request(), target.harness.new_key())
        for _ in range(2 * target.limits.connections)
    ]
    flood = asyncio.create_task(_send_all(target, requests))
    writes: list[asyncio.Task[Response]] = []
    while not flood.done() or not writes:
        if sum(not write.done() for write in writes) < _WRITES_AT_ONCE:
            own = target.harness.other_request() or await target.harness.new_request()
            write = target.harness.send(own, target.harness.new_key(), credentials=other)
            writes.append(asyncio.create_task(write))
        await asyncio.sleep(_WRITE_EVERY_SECONDS)
    written: list[Response | None] = list(await asyncio.gather(*writes))
    _expect_no_failure(await flood)
    if not all(response is not None and response.is_success for response in written):
        raise CheckFailedError(f"the other tenant got {_summary(written)}")
    return f"{_summary(await flood)}; the other tenant got {_summary(written)}"


ATTACKS: Final = (
    Attack(
        "a flood of duplicates",
        _GROUP,
        "executed once",
        _duplicates,
        why="Two of them that find no record would both run.",
        change="Claim the key before the handler runs, in the transaction of its effects.",
    ),
    Attack(
        "a flood of bodies with one key",
        _GROUP,
        "one is accepted",
        _conflicts,
        why="The key would mean more than one effect.",
        change="Compare the hash of the body with that of the claim, and respond 409.",
    ),
    Attack(
        "a flood of new keys",
        _GROUP,
        "another tenant is served",
        _new_keys,
        why="One tenant must not use up what the others need.",
        change="Limit rates, waiting requests and memory per tenant.",
    ),
)
