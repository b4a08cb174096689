"""Checks of authentication and of the isolation of tenants."""

from typing import Final

import msgspec

from onceward_lab.conformance.expect import expect, expect_error, expect_first, expect_replay
from onceward_lab.conformance.harness import (
    ANONYMOUS,
    Check,
    CheckSkippedError,
    Credentials,
    Harness,
    Response,
)
from onceward_protocol.error_codes import CODES

__all__ = ["CHECKS"]

_OWN_BODY: Final = (
    "If the body names resources of the first tenant, the server is right to refuse it: give the "
    "second tenant's own body with --other-body, or other_request in the profile. Otherwise accept "
    "the request: the key is new for this tenant."
)
_OWN_BODY_REFUSED: Final = (
    "The second tenant's own request is refused: correct --other-path and --other-body, or "
    "other_request in the profile, or accept the request: the key is new for this tenant."
)
_CONFLICT: Final = 409
_HINTS: Final = ("payload_mismatch", "in_progress")


async def _unsigned(harness: Harness) -> str:
    if not harness.credentials.headers:
        raise CheckSkippedError("this server has no sign-in")
    response = await harness.send(
        await harness.new_request(), harness.new_key(), credentials=ANONYMOUS
    )
    expect_error(harness, response, "not_authenticated")
    # Authentication comes first: an anonymous caller does not learn that a key is required.
    without = await harness.send(await harness.new_request(), credentials=ANONYMOUS)
    expect_error(harness, without, "not_authenticated")
    return response.summary()


async def _bad_token(harness: Harness) -> str:
    if not harness.credentials.headers:
        raise CheckSkippedError("this server has no sign-in")
    forged = Credentials(
        {name: f"{value[:-4]}AAAA" for name, value in harness.credentials.headers.items()}
    )
    response = await harness.send(
        await harness.new_request(), harness.new_key(), credentials=forged
    )
    expect_error(harness, response, "not_authenticated")
    return response.summary()


async def _replay_needs_sign_in(harness: Harness) -> str:
    if not harness.credentials.headers:
        raise CheckSkippedError("this server has no sign-in")
    request, key = await harness.new_request(), harness.new_key()
    expect_first(await harness.send(request, key))
    response = await harness.send(request, key, credentials=ANONYMOUS)
    expect_error(harness, response, "not_authenticated")
    return response.summary()


async def _not_replayed(harness: Harness) -> str:
    other = harness.other_credentials
    request, key = await harness.new_request(), harness.new_key()
    first = expect_first(await harness.send(request, key))
    response = await harness.send(request, key, credentials=other)
    _expect_no_hint(harness, response)
    own = harness.other_request()
    if own is not None:
        # The first tenant's body may be refused: it can name resources of the first tenant. The
        # refusal may be stored, so the second tenant's own body needs another key.
        key = harness.new_key()
        first = expect_first(await harness.send(request, key))
        response = await harness.send(own, key, credentials=other)
        _expect_no_hint(harness, response)
    if own is not None or harness.profile.responses_are_unique:
        expect(
            response.is_success,
            f"{response.summary()}, expected a success",
            change=_OWN_BODY if own is None else _OWN_BODY_REFUSED,
        )
        expect_first(response)
    if harness.profile.responses_are_unique:
        expect(
            response.body != first.body,
            f"{response.summary()}: the body of another tenant's response",
        )
    expect_replay(await harness.send(request, key), first)
    return f"{response.summary()}, as if the key were new"


async def _not_revealed(harness: Harness) -> str:
    other = harness.other_credentials
    request, key = await harness.new_request(), harness.new_key()
    expect_first(await harness.send(request, key))
    own = harness.other_request()
    if own is None:
        own = msgspec.structs.replace(request, body=request.other_body)
    response = await harness.send(own, key, credentials=other)
    _expect_no_hint(harness, response)
    return f"{response.summary()}, as if the key were new"


async def _not_found(harness: Harness) -> str:
    other = harness.other_credentials
    request, key = await harness.new_request(), harness.new_key()
    location = harness.location_of(expect_first(await harness.send(request, key)))
    if location is None:
        raise CheckSkippedError("the response has no Location")
    response = await harness.request("GET", location, credentials=other)
    expect_error(harness, response, "not_found")
    return response.summary()


def _expect_no_hint(harness: Harness, response: Response) -> None:
    expect(not response.is_replay, f"{response.summary()}: replayed to another tenant")
    expect(
        "x-original-request-id" not in response.headers,
        f"{response.summary()}: contains the id of another tenant's request",
    )
    codes = {CODES[kind].name(harness.profile.error_format) for kind in _HINTS}
    expect(
        harness.code_of(response) not in codes
        and not (harness.profile.statuses_only and response.status == _CONFLICT),
        f"{response.summary()}: reveals that another tenant has used the key",
    )


CHECKS: Final = (
    Check(
        "not signed in",
        "Guarded request",
        "401, with or without a key",
        _unsigned,
        why="An anonymous caller must neither write nor learn which keys exist.",
        change="Authenticate before the key is read, and respond 401.",
    ),
    Check(
        "an invalid token",
        "Guarded request",
        "401",
        _bad_token,
        why="A token with an invalid signature must not choose a tenant.",
        change="Verify the signature of the token before the key is read, and respond 401.",
    ),
    Check(
        "a replay needs sign-in",
        "Guarded request",
        "401 for a known key",
        _replay_needs_sign_in,
        why="A stored response holds data of the tenant; a key alone is not a password.",
        change="Authenticate every request, replays included, before the record is looked up.",
    ),
    Check(
        "another tenant's key is not replayed",
        "Names",
        "executed as a new request",
        _not_replayed,
        why="One tenant would read the stored response of another.",
        change="Make the tenant the first part of the record's primary key and of every look-up.",
    ),
    Check(
        "another tenant's key is not revealed",
        "Names",
        "no 409 about the key",
        _not_revealed,
        why="A 409 shows one tenant that another has used the key.",
        change="Make the tenant the first part of the record's primary key and of every look-up.",
    ),
    Check(
        "another tenant's resource",
        "Guarded request",
        "404, never 403",
        _not_found,
        why="A 200 leaks data, and a 403 confirms that the resource exists.",
        change="Select by tenant and id together, and respond 404 if there is no such row.",
        applies=lambda profile: profile.gives_location,
    ),
)
