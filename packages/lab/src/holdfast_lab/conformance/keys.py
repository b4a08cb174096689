"""Checks of the key: missing, malformed, twice, quoted."""

from typing import Final

from holdfast.core.keys import KeyFormat
from holdfast_lab.conformance.expect import expect, expect_error, expect_fresh, expect_replay
from holdfast_lab.conformance.harness import Check, Kit

__all__ = ["CHECKS"]

_NO_KEYS: Final[dict[KeyFormat, tuple[str | bytes, ...]]] = {
    KeyFormat.UUID4: (
        "order-17",
        "7F0F5BD0-4C0A-4B2E-9B0E-0D6D3F9C9A10",
        "7f0f5bd0-4c0a-1b2e-9b0e-0d6d3f9c9a10",
        "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10-0",
        '"7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10',
    ),
    KeyFormat.OPAQUE: ("k" * 129, "two words", '"not closed', '""', "clé".encode()),
}


async def _missing(kit: Kit) -> str:
    answer = await kit.send(await kit.fresh())
    expect_error(kit, answer, "key_required")
    return answer.told()


async def _left_out(kit: Kit) -> str:
    action = await kit.fresh()
    first = expect_fresh(await kit.send(action))
    second = expect_fresh(await kit.send(action))
    if kit.profile.answers_are_unique:
        expect(first.body != second.body, f"{second.told()}, with the bytes of the first")
    return f"{first.told()}, then {second.told()}: two requests"


async def _empty(kit: Kit) -> str:
    answer = await kit.send(await kit.fresh(), "")
    expect_error(kit, answer, "key_invalid")
    return answer.told()


async def _malformed(kit: Kit) -> str:
    action = await kit.fresh()
    for key in _NO_KEYS[kit.profile.key_format]:
        expect_error(kit, await kit.send(action, key), "key_invalid")
    return f"{len(_NO_KEYS[kit.profile.key_format])} bad keys, 400 each"


async def _two_values(kit: Kit) -> str:
    answer = await kit.send(await kit.fresh(), keys=(kit.new_key(), kit.new_key()))
    expect_error(kit, answer, "key_invalid")
    return answer.told()


async def _same_twice(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    first = expect_fresh(await kit.send(action, keys=(key, key)))
    second = expect_replay(await kit.send(action, key), first)
    return f"{first.told()}, then {second.told()}"


async def _quoted(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    first = expect_fresh(await kit.send(action, key))
    second = expect_replay(await kit.send(action, f'"{key}"'), first)
    return f"{first.told()}, then {second.told()}"


CHECKS: Final = (
    Check(
        "key missing", "§2, §4", "400 key_required", _missing, lambda profile: profile.key_required
    ),
    Check(
        "key left out where it is optional",
        "§2",
        "done, and done again: without a key a retry is another request",
        _left_out,
        lambda profile: not profile.key_required,
    ),
    Check("key empty", "§2, §4", "400 key_invalid", _empty),
    Check("key malformed", "§2, §4", "400 key_invalid for each", _malformed),
    Check("two different keys in one request", "§2", "400 key_invalid", _two_values),
    Check("the same key twice in one request", "§2", "one key: done, then replayed", _same_twice),
    Check("bare and quoted are one key", "§2", "a replay", _quoted),
)
