"""Checks of replays and payload mismatches."""

import json
from hashlib import sha256
from typing import Any, Final

import msgspec

from onceward_lab.conformance.expect import expect, expect_error, expect_first, expect_replay
from onceward_lab.conformance.harness import Check, CheckSkippedError, Harness, unique
from onceward_protocol.fingerprint import canonical_json

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
        if harness.profile.has_own_format:  # it may leave the details out
            break
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
        "first request",
        "Headers",
        "executed, not marked as a replay, echoes X-Request-ID",
        _first,
        why="Request ids connect the log of a client with that of the server.",
        change="Return the X-Request-ID of the request, or a new one, and an X-Correlation-ID with "
        "every response.",
    ),
    Check(
        "replay",
        "Guarded request",
        "stored status, body, Content-Type, ETag and Location; marked; own and original request id",
        _replay,
        why="A client that lost the first response gets the id of what was created only here.",
        change="Store status, headers and bytes of the response in the transaction of the effect, "
        "and respond with them to every later request with the key.",
    ),
    Check(
        "replay with other formatting",
        "Fingerprint",
        "order of members and whitespace do not matter",
        _other_formatting,
        why="A client that serializes its retry again would get a conflict for its own request.",
        change="Hash the canonical form of the JSON body (RFC 8785), not the bytes that arrived.",
    ),
    Check(
        "volatile fields",
        "Fingerprint",
        "a replay, whatever their values",
        _volatile,
        why="These fields are new in every attempt; hashing them turns each retry into a conflict.",
        change="Leave these top-level fields out of the hash, or set volatile_fields in the "
        "profile to those of the server ([] if there are none).",
        applies=lambda profile: bool(profile.volatile_fields),
    ),
    Check(
        "same key, other body",
        "Guarded request",
        "409 payload_mismatch with both hashes, nothing written",
        _mismatch,
        why="A replay of another request would confirm something that never happened.",
        change="Store the SHA-256 of the canonical body with the key; if it differs respond "
        "payload_mismatch with expectedHash and receivedHash, and keep the first response.",
    ),
    Check(
        "same key, other query",
        "Fingerprint",
        "409 payload_mismatch",
        _other_query,
        why="The query selects what the request is about, as the path does.",
        change="Include method, path and query in the fingerprint, not only the body.",
    ),
    Check(
        "GET with a known key",
        "Guarded request",
        "never replayed",
        _get,
        why="A replayed GET shows an old state for as long as the record lives.",
        change="Guard only requests that write: do not look keys up for GET. If the operation "
        "sends no Location, set gives_location to false in the profile.",
        applies=lambda profile: profile.gives_location,
    ),
    Check(
        "nested fields count",
        "Fingerprint",
        "409 payload_mismatch",
        _nested,
        why="Two different orders that differ only inside an object would get one response.",
        change="Hash the whole body. JSON.stringify with a list of top-level names drops nested "
        "members.",
        applies=lambda profile: profile.takes_any_member,
    ),
    Check(
        "integers beyond 2^53 keep their digits",
        "Fingerprint",
        "409 payload_mismatch",
        _large_numbers,
        why="Two ids that differ only in their last digits would be one request.",
        change="Parse integers as integers, not as doubles, before the body is hashed.",
        applies=lambda profile: profile.takes_any_member,
    ),
    Check(
        "equal numbers and escapes are equal",
        "Fingerprint",
        "a replay",
        _equal_texts,
        why="Serializers write 100 or 1e2, and escape characters or not; the request is the same.",
        change="Hash the canonical form (RFC 8785): numbers as ECMAScript prints them, characters "
        "without needless escapes.",
        applies=lambda profile: profile.takes_any_member,
    ),
)
