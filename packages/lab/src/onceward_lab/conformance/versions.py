"""Checks of optimistic locking (planning and field services)."""

import asyncio
from typing import Any, Final

from onceward_lab.conformance.expect import expect, expect_error, expect_first, expect_replay
from onceward_lab.conformance.harness import Check, Harness, Request, Response, unique

__all__ = ["FIELD_CHECKS", "PLANNING_CHECKS"]


class _Resource:
    """A versioned resource of the server."""

    def __init__(self, path: str, field: str, created: Response) -> None:
        self.path = path
        self.field = field
        self.tag = created.headers.get("etag", "")
        self.version = created.document().get("version")

    def change(self, tag: str | None, **more: Any) -> Request:
        """Return a PATCH with this ETag; None sends no If-Match."""
        headers = {} if tag is None else {"If-Match": tag}
        body = {self.field: f"changed {unique()}"} | more
        return Request(method="PATCH", path=self.path, headers=headers, body=body, other_body=None)


async def _create(harness: Harness) -> _Resource:
    """Create a resource that can be changed."""
    request = await harness.new_request()
    made = expect_first(await harness.send(request, harness.new_key()))
    field = "name"
    if harness.profile.name == "planning":
        missions = f"/v1/projects/{made.document().get('id')}/missions"
        body = {"title": f"conformance {unique()}"}
        made = expect_first(await harness.request("POST", missions, body, key=harness.new_key()))
        field = "title"
    expect(made.status == 201, f"{made.summary()} for a create")  # noqa: PLR2004
    path = harness.location_of(made)
    expect(path is not None, "a create without Location")
    expect("etag" in made.headers, "a create without ETag")
    return _Resource(path or "", field, made)


async def _created(harness: Harness) -> str:
    resource = await _create(harness)
    response = await harness.request("GET", resource.path)
    expect(response.is_success, f"GET of the Location got {response.summary()}")
    expect(
        response.headers.get("etag") == resource.tag, "the ETag of GET is not that of the create"
    )
    expect(isinstance(resource.version, int), "a versioned resource without version")
    return f"201, then {response.summary()} with the same ETag"


async def _required(harness: Harness) -> str:
    resource = await _create(harness)
    response = await harness.send(resource.change(None), harness.new_key())
    expect_error(harness, response, "version_required")
    return response.summary()


async def _left_out(harness: Harness) -> str:
    resource = await _create(harness)
    return expect_first(await harness.send(resource.change(None), harness.new_key())).summary()


async def _forced(harness: Harness) -> str:
    resource = await _create(harness)
    return expect_first(await harness.send(resource.change("*"), harness.new_key())).summary()


async def _current(harness: Harness) -> str:
    resource = await _create(harness)
    response = expect_first(await harness.send(resource.change(resource.tag), harness.new_key()))
    expect(
        response.headers.get("etag") not in (None, resource.tag),
        f"{response.summary()} without a new ETag",
    )
    return f"{response.summary()}, with a new ETag"


async def _in_body(harness: Harness) -> str:
    resource = await _create(harness)
    expect_first(
        await harness.send(resource.change(None, version=resource.version), harness.new_key())
    )
    response = await harness.send(
        resource.change(None, version=resource.version), harness.new_key()
    )
    expect_error(harness, response, "version_mismatch")
    return f"changed, then {response.summary()}"


async def _outdated(harness: Harness) -> str:
    resource = await _create(harness)
    expect_first(await harness.send(resource.change(resource.tag), harness.new_key()))
    change, key = resource.change(resource.tag), harness.new_key()
    response = await harness.send(change, key)
    expect_error(harness, response, "version_mismatch")
    expect_replay(await harness.send(change, key), response)
    return f"{response.summary()}, and replayed"


async def _replay_of_a_change(harness: Harness) -> str:
    resource = await _create(harness)
    change, key = resource.change(resource.tag), harness.new_key()
    first = expect_first(await harness.send(change, key))
    return expect_replay(await harness.send(change, key), first).summary()


async def _unreadable(harness: Harness) -> str:
    resource = await _create(harness)
    for tag in ("7", f"W/{resource.tag}", '"7'):
        expect_error(
            harness, await harness.send(resource.change(tag), harness.new_key()), "body_invalid"
        )
    contradiction = resource.change(resource.tag, version=int(resource.version or 0) + 1)
    expect_error(harness, await harness.send(contradiction, harness.new_key()), "body_invalid")
    return "400 for each"


async def _race(harness: Harness) -> str:
    resource = await _create(harness)
    responses = await asyncio.gather(
        *(harness.send(resource.change(resource.tag), harness.new_key()) for _ in range(4))
    )
    done = [response for response in responses if response.is_success]
    expect(len(done) == 1, f"{len(done)} of 4 writers won")
    for response in responses:
        if not response.is_success:
            expect_error(harness, response, "version_mismatch")
    return "1 won, 3 got 409"


async def _not_theirs(harness: Harness) -> str:
    other = harness.other_credentials
    resource = await _create(harness)
    response = await harness.send(
        resource.change(resource.tag), harness.new_key(), credentials=other
    )
    expect_error(harness, response, "not_found")
    return response.summary()


_ATOMIC: Final = (
    "Check and write in one statement, UPDATE … WHERE version = …, and respond 409 "
    "version_mismatch if it changed no row."
)
_BOTH: Final = (
    Check(
        "a create",
        "Versions",
        "201 with Location, ETag and version",
        _created,
        why="Without the version of what it created, a client cannot make its next change.",
        change="Respond 201 with Location, with ETag and with version in the body; GET of the "
        "Location sends the same ETag.",
    ),
    Check(
        "If-Match with the current ETag",
        "Versions",
        "changed, with a new ETag",
        _current,
        why="The next change of the client is based on the version that this one produced.",
        change="Increment the version with every change and send it as the ETag of the response.",
    ),
    Check(
        "version in the body",
        "Versions",
        "changed, then 409 version_mismatch",
        _in_body,
        why="Clients that cannot set headers name the version in the body.",
        change="Read the body's version where there is no If-Match. " + _ATOMIC,
    ),
    Check(
        "If-Match with an outdated ETag",
        "Versions",
        "409 version_mismatch, stored and replayed",
        _outdated,
        why="The change of another person would be overwritten without notice.",
        change=_ATOMIC,
    ),
    Check(
        "replay of a change with an outdated ETag",
        "Versions",
        "the stored response, not 409",
        _replay_of_a_change,
        why="The change has happened; a 409 would make the client send it a second time.",
        change="Look the key up before the version is compared.",
    ),
    Check(
        "malformed If-Match",
        "Versions",
        "400",
        _unreadable,
        why="A weak or unquoted tag that is ignored turns a safe change into a blind one.",
        change="Accept strong tags only (a quoted text), and respond 400 if If-Match and the "
        "body's version differ.",
    ),
    Check(
        "four writers with one ETag",
        "Versions",
        "one wins, the others 409",
        _race,
        why="Reading the version first and writing later lets two writers win.",
        change=_ATOMIC,
    ),
    Check(
        "a change of another tenant's resource",
        "Versions",
        "404, never 403",
        _not_theirs,
        why="A 403 or 409 confirms that the resource exists.",
        change="Select by tenant and id together, and respond 404 if there is no such row.",
    ),
)
PLANNING_CHECKS: Final = (
    Check(
        "a change without a version",
        "Versions",
        "428 version_required",
        _required,
        why="A change without a version overwrites what others have written since.",
        change="Respond 428 version_required if neither If-Match nor the body names a version.",
    ),
    *_BOTH,
)
FIELD_CHECKS: Final = (
    Check(
        "a change without a version",
        "Versions",
        "changed: field does not require one",
        _left_out,
        why="Devices may change what they have never read.",
        change="Accept a change without a version as one of the current version.",
    ),
    Check(
        "If-Match: *",
        "Versions",
        "changed, whatever the version",
        _forced,
        why="A person who has chosen to overwrite sends a star.",
        change="Accept If-Match: * as any version (allow_any=True of update_with_version).",
    ),
    *_BOTH,
)
