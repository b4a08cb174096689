"""Checks of strict sequences, if the operation demands numbers."""

import asyncio
from typing import Any, Final

from onceward_lab.conformance.batch_results import (
    expect_executed,
    expect_item_error,
    item_of,
    send_batch,
)
from onceward_lab.conformance.expect import expect, expect_error, expect_first, expect_replay
from onceward_lab.conformance.harness import Check, Harness, Request, Response, unique
from onceward_protocol.error_codes import CODES
from onceward_protocol.sequence import CLIENT_HEADER, SEQUENCE_HEADER

__all__ = ["CHECKS", "SECTION"]

SECTION: Final = "Strict sequences"
_BAD_REQUEST: Final = 400
_IN_PROGRESS: Final = 409


class _Client:
    """One client, whose requests are numbered."""

    def __init__(self, harness: Harness) -> None:
        self.id = f"conform-{unique()}"
        self._harness = harness

    async def send(self, request: Request, key: str, number: int | str, **options: Any) -> Response:
        headers = {CLIENT_HEADER: self.id, SEQUENCE_HEADER: str(number)}
        return await self._harness.send(request, key, headers=headers, **options)

    async def run(self, number: int) -> tuple[Request, str, Response]:
        """Send a new request with a new key, which must be executed."""
        request, key = await self._harness.new_request(), self._harness.new_key()
        return request, key, expect_first(await self.send(request, key, number))

    def item(self, request: Request, key: str, number: int) -> dict[str, Any]:
        return item_of(request, key, client_id=self.id, sequence=number)


def _expect_violation(
    harness: Harness,
    response: Response,
    expected: int,
    *,
    used_by: str | None = None,
    key_sequence: int | None = None,
) -> None:
    """Expect a 422 with these details; in an own format of errors the status and code only."""
    found = expect_error(harness, response, "sequence_violation")
    if harness.profile.has_own_format:
        return
    wanted = {"expected": expected, "used_by": used_by, "key_sequence": key_sequence}
    for name, value in wanted.items():
        sent = found.get(name)
        expect(sent == value, f"{response.summary()} with {name} {sent!r}, expected {value!r}")


async def _in_order(harness: Harness) -> str:
    client = _Client(harness)
    responses = [(await client.run(number))[2] for number in (1, 2, 3)]
    return ", ".join(response.summary() for response in responses)


async def _gap(harness: Harness) -> str:
    client = _Client(harness)
    await client.run(1)
    request, key = await harness.new_request(), harness.new_key()
    early = await client.send(request, key, 3)
    _expect_violation(harness, early, 2)
    again = expect_first(await client.send(request, key, 2))
    return f"{early.summary()}, then {again.summary()} with the expected number"


async def _first_number(harness: Harness) -> str:
    client = _Client(harness)
    request, key = await harness.new_request(), harness.new_key()
    _expect_violation(harness, await client.send(request, key, 2), 1)
    return expect_first(await client.send(request, key, 1)).summary()


async def _replay(harness: Harness) -> str:
    client = _Client(harness)
    request, key, first = await client.run(1)
    await client.run(2)
    return expect_replay(await client.send(request, key, 1), first).summary()


async def _other_key(harness: Harness) -> str:
    client = _Client(harness)
    await client.run(1)
    request, key = await harness.new_request(), harness.new_key()
    refused = await client.send(request, key, 1)
    _expect_violation(harness, refused, 2, used_by="other_key")
    again = expect_first(await client.send(request, key, 2))
    return f"{refused.summary()}, then {again.summary()} with the expected number"


async def _other_number(harness: Harness) -> str:
    client = _Client(harness)
    request, key, first = await client.run(1)
    refused = await client.send(request, key, 2)
    _expect_violation(harness, refused, 2, key_sequence=1)
    expect_replay(await client.send(request, key, 1), first)
    return refused.summary()


async def _missing(harness: Harness) -> str:
    request, key, client = await harness.new_request(), harness.new_key(), _Client(harness)
    wrong = [
        await harness.send(request, key, is_numbered=False),
        await harness.send(request, key, headers={CLIENT_HEADER: client.id}, is_numbered=False),
        await harness.send(request, key, headers={SEQUENCE_HEADER: "1"}, is_numbered=False),
        *[await client.send(request, key, number) for number in ("0", "01", "-1", "one", "")],
    ]
    for response in wrong:
        expect(response.status == _BAD_REQUEST, f"{response.summary()}, expected 400")
    if not harness.profile.has_own_format:
        expect(
            harness.requires_number(wrong[0]),
            "400 without required_headers in its details",
            change=f'Add required_headers: ["{CLIENT_HEADER}", "{SEQUENCE_HEADER}"] to the details '
            "of the 400, for clients that number on demand.",
        )
    return f"400, then {expect_first(await client.send(request, key, 1)).summary()}"


async def _other_tenant(harness: Harness) -> str:
    credentials, client = harness.other_credentials, _Client(harness)
    request, *_ = await client.run(1)
    other, key = harness.other_request() or request, harness.new_key()
    response = await client.send(other, key, 1, credentials=credentials)
    # The handler may refuse it, because the other tenant is not as far.
    violation = CODES["sequence_violation"].name(harness.profile.error_format)
    expect(harness.code_of(response) != violation, f"another tenant got {response.summary()}")
    expect(not response.is_replay, f"another tenant got {response.summary()}")
    return response.summary()


async def _race(harness: Harness) -> str:
    client, request = _Client(harness), await harness.new_request()
    keys = [harness.new_key() for _ in range(4)]
    responses = await asyncio.gather(*(client.send(request, key, 1) for key in keys))
    executed = [response for response in responses if response.is_success]
    expect(len(executed) == 1, f"{len(executed)} of {len(keys)} requests with one number ran")
    for response in responses:
        if not response.is_success and response.status != _IN_PROGRESS:
            _expect_violation(harness, response, 2, used_by="other_key")
    return f"{executed[0].summary()} once, {len(keys) - 1} refused"


async def _lane(harness: Harness) -> str:
    client = _Client(harness)
    request, key = await harness.new_request(), harness.new_key()
    skipped = harness.new_key()
    # The second and third item do not get as far as the handler.
    results = await send_batch(
        harness,
        [
            client.item(request, key, 1),
            client.item(request, harness.new_key(), 3),
            client.item(request, skipped, 2),
        ],
    )
    expect_executed(results[0])
    expect_item_error(harness, results[1], "sequence_violation")
    expect_item_error(harness, results[2], "batch_skipped")
    later = await client.send(await harness.new_request(), skipped, 2)
    expect(
        later.is_success and not later.is_replay,
        f"the number of a skipped item got {later.summary()}",
        change="Use no number, and store nothing, for an item that was skipped.",
    )
    return ", ".join(result.summary() for result in results)


CHECKS: Final = (
    Check(
        "numbers in order",
        SECTION,
        "1, 2 and 3 of a client are executed",
        _in_order,
        why="A device sends everything that was queued, one after another.",
        change="Keep the last number of each tenant and client, and execute the next one.",
    ),
    Check(
        "first number of a client",
        SECTION,
        "2 is refused, 1 is executed",
        _first_number,
        why="The first action of a device would be lost without a trace.",
        change="Expect 1 from a client that has no number yet.",
    ),
    Check(
        "gap in the numbers",
        SECTION,
        "422 sequence_violation with expected; the key is executed with that number",
        _gap,
        why="What the client has not sent yet would run too late, or never.",
        change="Refuse numbers above the next one, with it as expected in the details, and store "
        "nothing.",
    ),
    Check(
        "known number with its key",
        SECTION,
        "the replay",
        _replay,
        why="A client that has lost the response sends the same number and key again.",
        change="Keep a hash of the key of each number, and replay if it is that of the request.",
    ),
    Check(
        "known number with another key",
        SECTION,
        "422 sequence_violation, used_by other_key",
        _other_key,
        why="Two actions would have one place in the order.",
        change="Compare the key with that of the number: refuse with used_by other_key.",
    ),
    Check(
        "stored key with another number",
        SECTION,
        "422 sequence_violation with key_sequence, not a replay",
        _other_number,
        why="A client that has lost its place would not learn it, and its next request is refused.",
        change="Check the number before a replay; name the number of the key as key_sequence.",
    ),
    Check(
        "missing and malformed numbers",
        SECTION,
        "400, and the key is not used",
        _missing,
        why="A request without a number would be executed out of order.",
        change=f"Respond 400 before the key is claimed unless {CLIENT_HEADER} and "
        f"{SEQUENCE_HEADER} are there, the number without sign and leading zeros.",
    ),
    Check(
        "another tenant's client id",
        SECTION,
        "has its own numbers",
        _other_tenant,
        why="One tenant could use up the numbers of another.",
        change="Keep numbers by tenant and client, not by client alone.",
    ),
    Check(
        "concurrent requests with one number",
        SECTION,
        "one is executed, the others are refused",
        _race,
        why="Two processes of a device would both have the next place in the order.",
        change="Use the number in the transaction that stores the response, by a statement that "
        "changes a row only if it is still the next one.",
    ),
    Check(
        "batch with a gap in the numbers",
        SECTION,
        "422 for its item, 424 for later ones of the client",
        _lane,
        why="What follows a refused number in a batch would run out of order.",
        change="Treat the items of a client as one lane.",
    ),
)
