"""Checks of the idempotency key: missing, malformed, repeated, quoted."""

from typing import Final

from onceward_lab.conformance.expect import expect, expect_error, expect_first, expect_replay
from onceward_lab.conformance.harness import Check, Harness
from onceward_protocol.keys import KeyFormat

__all__ = ["CHECKS"]

_INVALID_KEYS: Final[dict[KeyFormat, tuple[str | bytes, ...]]] = {
    KeyFormat.UUID4: (
        "order-17",
        "7F0F5BD0-4C0A-4B2E-9B0E-0D6D3F9C9A10",
        "7f0f5bd0-4c0a-1b2e-9b0e-0d6d3f9c9a10",
        "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10-0",
        '"7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10',
    ),
    KeyFormat.OPAQUE: ("k" * 129, "two words", '"not closed', '""', "clé".encode()),
}


async def _missing(harness: Harness) -> str:
    response = await harness.send(await harness.new_request())
    expect_error(harness, response, "key_required")
    return response.summary()


async def _left_out(harness: Harness) -> str:
    request = await harness.new_request()
    first = expect_first(await harness.send(request))
    second = expect_first(await harness.send(request))
    if harness.profile.responses_are_unique:
        expect(first.body != second.body, f"{second.summary()}, with the body of the first")
    return f"{first.summary()}, then {second.summary()}: two requests"


async def _empty(harness: Harness) -> str:
    response = await harness.send(await harness.new_request(), "")
    expect_error(harness, response, "key_invalid")
    return response.summary()


async def _malformed(harness: Harness) -> str:
    request = await harness.new_request()
    for key in _INVALID_KEYS[harness.profile.key_format]:
        expect_error(harness, await harness.send(request, key), "key_invalid")
    return f"{len(_INVALID_KEYS[harness.profile.key_format])} invalid keys, 400 each"


async def _two_values(harness: Harness) -> str:
    response = await harness.send(
        await harness.new_request(), keys=(harness.new_key(), harness.new_key())
    )
    expect_error(harness, response, "key_invalid")
    return response.summary()


async def _same_twice(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    first = expect_first(await harness.send(request, keys=(key, key)))
    second = expect_replay(await harness.send(request, key), first)
    return f"{first.summary()}, then {second.summary()}"


async def _quoted(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    first = expect_first(await harness.send(request, key))
    second = expect_replay(await harness.send(request, f'"{key}"'), first)
    return f"{first.summary()}, then {second.summary()}"


CHECKS: Final = (
    Check(
        "key missing",
        "Key",
        "400 key_required",
        _missing,
        why="A request without a key that runs anyway runs again with each retry.",
        change="Respond 400 key_required before the handler if there is no Idempotency-Key. If the "
        "key is optional on purpose, set key_required to false in the profile.",
        applies=lambda profile: profile.key_required,
    ),
    Check(
        "key omitted where it is optional",
        "Key",
        "executed twice: without a key a retry is a new request",
        _left_out,
        why="Two requests without a key may be two orders; a server cannot know that they are one.",
        change="Run each request without a key. If the key is required, set key_required to true "
        "in the profile.",
        applies=lambda profile: not profile.key_required,
    ),
    Check(
        "key empty",
        "Key",
        "400 key_invalid",
        _empty,
        why="If an empty key is a key, all clients with that bug share one response.",
        change="Respond 400 key_invalid to an empty Idempotency-Key; do not treat it as missing.",
    ),
    Check(
        "key malformed",
        "Key",
        "400 key_invalid for each",
        _malformed,
        why="Two spellings of one key, such as an upper-case UUID, would run as two requests.",
        change="Accept exactly the format that the profile names (key_format) and respond 400 "
        "key_invalid to anything else: uuid4 is a lower-case UUID version 4, opaque is 1 to 128 "
        "visible ASCII characters.",
    ),
    Check(
        "two different keys in one request",
        "Key",
        "400 key_invalid",
        _two_values,
        why="A proxy and the server could each use another one of them, so a retry runs again.",
        change="Read all values of the header and respond 400 key_invalid if they differ.",
    ),
    Check(
        "the same key twice in one request",
        "Key",
        "one key: executed, then replayed",
        _same_twice,
        why="Some proxies repeat a header. Joined with a comma it would be another key.",
        change="Read the values of the header one by one; equal values are one key.",
    ),
    Check(
        "bare and quoted key are equal",
        "Key",
        "a replay",
        _quoted,
        why="The IETF draft quotes keys and many clients do not; a retry through another client "
        "would run again.",
        change="Remove the quotes of a quoted key (RFC 8941 string) before it is looked up.",
    ),
)
