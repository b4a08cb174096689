"""Checks of who may see what: sign-in, and keys of another tenant."""

from typing import Final

import msgspec

from holdfast.core.error_formats import CODES
from holdfast_lab.conformance.expect import expect, expect_error, expect_fresh, expect_replay
from holdfast_lab.conformance.harness import (
    NOBODY,
    Answer,
    Check,
    Kit,
    NotCheckedError,
    Person,
)

__all__ = ["CHECKS"]

_HINTS: Final = ("payload_mismatch", "in_progress")


async def _unsigned(kit: Kit) -> str:
    if not kit.me.headers:
        raise NotCheckedError("nobody signs in here")
    answer = await kit.send(await kit.fresh(), kit.new_key(), person=NOBODY)
    expect_error(kit, answer, "not_authenticated")
    # Sign-in comes before the key: a stranger learns nothing about what is demanded.
    without = await kit.send(await kit.fresh(), person=NOBODY)
    expect_error(kit, without, "not_authenticated")
    return answer.told()


async def _bad_token(kit: Kit) -> str:
    if not kit.me.headers:
        raise NotCheckedError("nobody signs in here")
    impostor = Person({name: f"{value[:-4]}AAAA" for name, value in kit.me.headers.items()})
    answer = await kit.send(await kit.fresh(), kit.new_key(), person=impostor)
    expect_error(kit, answer, "not_authenticated")
    return answer.told()


async def _replay_needs_sign_in(kit: Kit) -> str:
    if not kit.me.headers:
        raise NotCheckedError("nobody signs in here")
    action, key = await kit.fresh(), kit.new_key()
    expect_fresh(await kit.send(action, key))
    answer = await kit.send(action, key, person=NOBODY)
    expect_error(kit, answer, "not_authenticated")
    return answer.told()


async def _not_replayed(kit: Kit) -> str:
    other = kit.other
    action, key = await kit.fresh(), kit.new_key()
    first = expect_fresh(await kit.send(action, key))
    answer = await kit.send(action, key, person=other)
    _no_hint(kit, answer)
    if kit.profile.answers_are_unique:
        expect_fresh(answer)
        expect(answer.body != first.body, f"{answer.told()}: the bytes of another tenant's answer")
    expect_replay(await kit.send(action, key), first)
    return f"{answer.told()}, as if the key were new"


async def _no_hints(kit: Kit) -> str:
    other = kit.other
    action, key = await kit.fresh(), kit.new_key()
    expect_fresh(await kit.send(action, key))
    content = msgspec.json.encode(action.other_body)
    answer = await kit.send(action, key, person=other, content=content)
    _no_hint(kit, answer)
    return f"{answer.told()}, as if the key were new"


async def _not_found(kit: Kit) -> str:
    other = kit.other
    action, key = await kit.fresh(), kit.new_key()
    location = kit.location_of(expect_fresh(await kit.send(action, key)))
    if location is None:
        raise NotCheckedError("the answer has no Location to read")
    answer = await kit.ask("GET", location, person=other)
    expect_error(kit, answer, "not_found")
    return answer.told()


def _no_hint(kit: Kit, answer: Answer) -> None:
    expect(not answer.is_replay, f"{answer.told()}: replayed to another tenant")
    expect(
        "x-original-request-id" not in answer.headers,
        f"{answer.told()}: names another tenant's request",
    )
    codes = {CODES[kind].name(kit.profile.error_format) for kind in _HINTS}
    expect(
        answer.code(kit.profile.error_format) not in codes,
        f"{answer.told()}: tells that another tenant has used the key",
    )


CHECKS: Final = (
    Check("not signed in", "§4", "401, with or without a key", _unsigned),
    Check("a token that does not hold", "§4, §9", "401", _bad_token),
    Check("a replay needs sign-in", "§4", "401 for a known key", _replay_needs_sign_in),
    Check("another tenant's key is not replayed", "§1", "a request of its own", _not_replayed),
    Check("another tenant's key is not hinted at", "§1", "no 409 about the key", _no_hints),
    Check(
        "another tenant's resource",
        "§4",
        "404, never 403",
        _not_found,
        lambda profile: profile.gives_location,
    ),
)
