"""Checks of authentication and of the isolation of tenants."""

from typing import Final

import msgspec

from holdfast.core.error_formats import CODES
from holdfast_lab.conformance.expect import expect, expect_error, expect_first, expect_replay
from holdfast_lab.conformance.harness import (
    ANONYMOUS,
    Check,
    CheckSkippedError,
    Credentials,
    Harness,
    Response,
)

__all__ = ["CHECKS"]

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
    if harness.profile.responses_are_unique:
        expect_first(response)
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
    content = msgspec.json.encode(request.other_body)
    response = await harness.send(request, key, credentials=other, content=content)
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
        response.code(harness.profile.error_format) not in codes,
        f"{response.summary()}: reveals that another tenant has used the key",
    )


CHECKS: Final = (
    Check("not signed in", "Guarded request", "401, with or without a key", _unsigned),
    Check("an invalid token", "Guarded request", "401", _bad_token),
    Check(
        "a replay needs sign-in", "Guarded request", "401 for a known key", _replay_needs_sign_in
    ),
    Check(
        "another tenant's key is not replayed", "Names", "executed as a new request", _not_replayed
    ),
    Check("another tenant's key is not revealed", "Names", "no 409 about the key", _not_revealed),
    Check(
        "another tenant's resource",
        "Guarded request",
        "404, never 403",
        _not_found,
        lambda profile: profile.gives_location,
    ),
)
