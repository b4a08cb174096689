"""Checks of the idempotency key: missing, malformed, repeated, quoted."""

from typing import Final

from holdfast.core.keys import KeyFormat
from holdfast_lab.conformance.expect import expect, expect_error, expect_first, expect_replay
from holdfast_lab.conformance.harness import Check, Harness

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
    Check("key missing", "Key", "400 key_required", _missing, lambda profile: profile.key_required),
    Check(
        "key omitted where it is optional",
        "Key",
        "executed twice: without a key a retry is a new request",
        _left_out,
        lambda profile: not profile.key_required,
    ),
    Check("key empty", "Key", "400 key_invalid", _empty),
    Check("key malformed", "Key", "400 key_invalid for each", _malformed),
    Check("two different keys in one request", "Key", "400 key_invalid", _two_values),
    Check(
        "the same key twice in one request", "Key", "one key: executed, then replayed", _same_twice
    ),
    Check("bare and quoted key are equal", "Key", "a replay", _quoted),
)
