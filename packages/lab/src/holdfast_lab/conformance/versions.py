"""Checks of optimistic locking, for planning and field: who has seen what, and who was first."""

import asyncio
from typing import Any, Final

from holdfast_lab.conformance.expect import expect, expect_error, expect_fresh, expect_replay
from holdfast_lab.conformance.harness import Action, Answer, Check, Kit, unique

__all__ = ["FIELD_CHECKS", "PLANNING_CHECKS"]


class _Thing:
    """A document with a version, and where it is changed."""

    def __init__(self, path: str, field: str, made: Answer) -> None:
        self.path = path
        self.field = field
        self.tag = made.headers.get("etag", "")
        self.version = made.document().get("version")

    def change(self, tag: str | None, **more: Any) -> Action:
        """Return a change made against that tag; none names no version."""
        headers = {} if tag is None else {"If-Match": tag}
        body = {self.field: f"changed {unique()}"} | more
        return Action(method="PATCH", path=self.path, headers=headers, body=body, other_body=None)


async def _thing(kit: Kit) -> _Thing:
    """Make something that can be changed."""
    action = await kit.fresh()
    made = expect_fresh(await kit.send(action, kit.new_key()))
    field = "name"
    if kit.profile.name == "planning":
        missions = f"/v1/projects/{made.document().get('id')}/missions"
        body = {"title": f"conformance {unique()}"}
        made = expect_fresh(await kit.ask("POST", missions, body, key=kit.new_key()))
        field = "title"
    expect(made.status == 201, f"{made.told()} for a create")  # noqa: PLR2004
    path = kit.location_of(made)
    expect(path is not None, "a create without Location")
    expect("etag" in made.headers, "a create without ETag")
    return _Thing(path or "", field, made)


async def _created(kit: Kit) -> str:
    thing = await _thing(kit)
    answer = await kit.ask("GET", thing.path)
    expect(answer.is_success, f"GET of the Location got {answer.told()}")
    expect(answer.headers.get("etag") == thing.tag, "the ETag of GET is not that of the create")
    expect(isinstance(thing.version, int), "a versioned resource without version")
    return f"201, then {answer.told()} with the same ETag"


async def _required(kit: Kit) -> str:
    thing = await _thing(kit)
    answer = await kit.send(thing.change(None), kit.new_key())
    expect_error(kit, answer, "version_required")
    return answer.told()


async def _left_out(kit: Kit) -> str:
    thing = await _thing(kit)
    return expect_fresh(await kit.send(thing.change(None), kit.new_key())).told()


async def _forced(kit: Kit) -> str:
    thing = await _thing(kit)
    return expect_fresh(await kit.send(thing.change("*"), kit.new_key())).told()


async def _current(kit: Kit) -> str:
    thing = await _thing(kit)
    answer = expect_fresh(await kit.send(thing.change(thing.tag), kit.new_key()))
    expect(
        answer.headers.get("etag") not in (None, thing.tag), f"{answer.told()} without a new ETag"
    )
    return f"{answer.told()}, with a new ETag"


async def _in_body(kit: Kit) -> str:
    thing = await _thing(kit)
    expect_fresh(await kit.send(thing.change(None, version=thing.version), kit.new_key()))
    answer = await kit.send(thing.change(None, version=thing.version), kit.new_key())
    expect_error(kit, answer, "version_mismatch")
    return f"done, then {answer.told()}"


async def _outdated(kit: Kit) -> str:
    thing = await _thing(kit)
    expect_fresh(await kit.send(thing.change(thing.tag), kit.new_key()))
    change, key = thing.change(thing.tag), kit.new_key()
    answer = await kit.send(change, key)
    expect_error(kit, answer, "version_mismatch")
    expect_replay(await kit.send(change, key), answer)
    return f"{answer.told()}, and replayed"


async def _replay_of_a_change(kit: Kit) -> str:
    thing = await _thing(kit)
    change, key = thing.change(thing.tag), kit.new_key()
    first = expect_fresh(await kit.send(change, key))
    return expect_replay(await kit.send(change, key), first).told()


async def _unreadable(kit: Kit) -> str:
    thing = await _thing(kit)
    for tag in ("7", f"W/{thing.tag}", '"7'):
        expect_error(kit, await kit.send(thing.change(tag), kit.new_key()), "body_invalid")
    contradiction = thing.change(thing.tag, version=int(thing.version or 0) + 1)
    expect_error(kit, await kit.send(contradiction, kit.new_key()), "body_invalid")
    return "400 for each"


async def _race(kit: Kit) -> str:
    thing = await _thing(kit)
    answers = await asyncio.gather(
        *(kit.send(thing.change(thing.tag), kit.new_key()) for _ in range(4))
    )
    done = [answer for answer in answers if answer.is_success]
    expect(len(done) == 1, f"{len(done)} of 4 writers won")
    for answer in answers:
        if not answer.is_success:
            expect_error(kit, answer, "version_mismatch")
    return "1 won, 3 got 409"


async def _not_theirs(kit: Kit) -> str:
    other = kit.other
    thing = await _thing(kit)
    answer = await kit.send(thing.change(thing.tag), kit.new_key(), person=other)
    expect_error(kit, answer, "not_found")
    return answer.told()


_BOTH: Final = (
    Check("a create", "§9", "201 with Location, ETag and version", _created),
    Check("If-Match with the current ETag", "§9", "done, with a new ETag", _current),
    Check("version in the body", "§9", "done, then 409 version_mismatch", _in_body),
    Check(
        "If-Match with an old ETag",
        "§4, §9",
        "409 version_mismatch, stored and replayed",
        _outdated,
    ),
    Check(
        "replay of a change whose ETag is old by now",
        "§4",
        "the stored answer, not 409",
        _replay_of_a_change,
    ),
    Check("If-Match that cannot be read", "§4", "400", _unreadable),
    Check("four writers with one ETag", "§9", "one wins, the others 409", _race),
    Check("a change of another tenant's resource", "§4", "404, never 403", _not_theirs),
)
PLANNING_CHECKS: Final = (
    Check("a change without a version", "§9", "428 version_required", _required),
    *_BOTH,
)
FIELD_CHECKS: Final = (
    Check("a change without a version", "§9", "done: field does not demand one", _left_out),
    Check("If-Match: *", "§9", "done, whatever the version", _forced),
    *_BOTH,
)
