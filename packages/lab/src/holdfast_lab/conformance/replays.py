"""Checks of replays and payload mismatches."""

import json
from hashlib import sha256
from typing import Any, Final

import msgspec

from holdfast.core.canonical_json import canonical_json
from holdfast_lab.conformance.expect import expect, expect_error, expect_first, expect_replay
from holdfast_lab.conformance.harness import Check, CheckSkippedError, Harness, unique

__all__ = ["CHECKS"]


async def _first(harness: Harness) -> str:
    request_id = f"conform-{unique()}"
    response = await harness.send(
        await harness.new_request(), harness.new_key(), headers={"X-Request-ID": request_id}
    )
    expect_first(response)
    echoed = response.headers.get("x-request-id")
    expect(echoed == request_id, f"X-Request-ID is {echoed!r}, was sent as {request_id!r}")
    expect("x-correlation-id" in response.headers, f"{response.summary()} without X-Correlation-ID")
    return response.summary()


async def _replay(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    first = expect_first(await harness.send(request, key))
    second = expect_replay(await harness.send(request, key), first)
    expect_replay(await harness.send(request, key), first)
    return f"{first.summary()}, then {second.summary()}: the same {len(first.body)} bytes"


async def _other_formatting(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    first = expect_first(await harness.send(request, key))
    text = json.dumps(_reversed(request.body), indent=3).encode()
    second = expect_replay(await harness.send(request, key, content=text), first)
    return second.summary()


async def _volatile(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    first = expect_first(await harness.send(request, key))
    for field in harness.profile.volatile_fields:
        body = request.body | {field: f"new in every attempt {unique()}"}
        response = await harness.send(request, key, content=msgspec.json.encode(body))
        expect_replay(response, first)
    return f"replayed with another {' and '.join(harness.profile.volatile_fields)}"


async def _mismatch(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    first = expect_first(await harness.send(request, key))
    other = msgspec.json.encode(request.other_body)
    response = await harness.send(request, key, content=other)
    details = expect_error(harness, response, "payload_mismatch")
    volatile = frozenset(harness.profile.volatile_fields)
    hashes = {
        "expectedHash": msgspec.json.encode(request.body),
        "receivedHash": other,
    }
    for name, body in hashes.items():
        wanted = sha256(canonical_json(body, volatile=volatile)).hexdigest()
        expect(
            details.get(name) == wanted, f"{response.summary()}: {name} is not the body's SHA-256"
        )
    expect_replay(await harness.send(request, key), first)
    return f"{response.summary()}, and the first response is still replayed"


async def _other_query(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    expect_first(await harness.send(request, key))
    response = await harness.send(request, key, query="?page=2")
    expect_error(harness, response, "payload_mismatch")
    return response.summary()


async def _get(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    first = expect_first(await harness.send(request, key))
    location = harness.location_of(first)
    if location is None:
        raise CheckSkippedError("the response has no Location")
    response = await harness.request("GET", location, key=key)
    expect(not response.is_replay, f"a GET got {response.summary()}")
    expect(response.is_success, f"{response.summary()} for GET of the Location")
    return response.summary()


async def _nested(harness: Harness) -> str:
    return await _expect_mismatch(harness, b'{"a":{"b":[{"c":1}]}}', b'{"a":{"b":[{"c":2}]}}')


async def _large_numbers(harness: Harness) -> str:
    return await _expect_mismatch(harness, b'{"a":9007199254740992}', b'{"a":9007199254740993}')


async def _expect_mismatch(harness: Harness, one: bytes, another: bytes) -> str:
    request, key = await harness.new_request(), harness.new_key()
    expect_first(await harness.send(request, key, content=one))
    response = await harness.send(request, key, content=another)
    expect_error(harness, response, "payload_mismatch")
    return response.summary()


async def _equal_texts(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    one = '{"n":[1.0,100,0.002],"s":"é/A","z":null}'.encode()
    another = rb'{ "z":null, "s":"\u00e9\/\u0041", "n":[1,1e2,2E-3] }'
    # 100 is an integer literal and 1e2 a double; the canonical form of both is 100.
    first = expect_first(await harness.send(request, key, content=one))
    return expect_replay(await harness.send(request, key, content=another), first).summary()


def _reversed(value: Any) -> Any:
    """Return the same value with the members of every object in reverse order."""
    if isinstance(value, dict):
        return {name: _reversed(value[name]) for name in reversed(value)}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


CHECKS: Final = (
    Check(
        "first request", "Headers", "executed, not marked as a replay, echoes X-Request-ID", _first
    ),
    Check(
        "replay",
        "Guarded request",
        "stored status, body, Content-Type, ETag and Location; marked; own and original request id",
        _replay,
    ),
    Check(
        "replay with other formatting",
        "Fingerprint",
        "order of members and whitespace do not matter",
        _other_formatting,
    ),
    Check(
        "volatile fields",
        "Fingerprint",
        "a replay, whatever their values",
        _volatile,
        lambda profile: bool(profile.volatile_fields),
    ),
    Check(
        "same key, other body",
        "Guarded request",
        "409 payload_mismatch with both hashes, nothing written",
        _mismatch,
    ),
    Check("same key, other query", "Fingerprint", "409 payload_mismatch", _other_query),
    Check(
        "GET with a known key",
        "Guarded request",
        "never replayed",
        _get,
        lambda profile: profile.gives_location,
    ),
    Check(
        "nested fields count",
        "Fingerprint",
        "409 payload_mismatch",
        _nested,
        lambda profile: profile.takes_any_member,
    ),
    Check(
        "integers beyond 2^53 keep their digits",
        "Fingerprint",
        "409 payload_mismatch",
        _large_numbers,
        lambda profile: profile.takes_any_member,
    ),
    Check(
        "equal numbers and escapes are equal",
        "Fingerprint",
        "a replay",
        _equal_texts,
        lambda profile: profile.takes_any_member,
    ),
)
