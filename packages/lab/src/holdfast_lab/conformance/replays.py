"""Checks of replays and mismatches: what a known key gets."""

import json
from hashlib import sha256
from typing import Any, Final

import msgspec

from holdfast.core.canonical_json import canonical_json
from holdfast_lab.conformance.expect import expect, expect_error, expect_fresh, expect_replay
from holdfast_lab.conformance.harness import Check, Kit, NotCheckedError, unique

__all__ = ["CHECKS"]


async def _first(kit: Kit) -> str:
    request_id = f"conform-{unique()}"
    answer = await kit.send(await kit.fresh(), kit.new_key(), headers={"X-Request-ID": request_id})
    expect_fresh(answer)
    came = answer.headers.get("x-request-id")
    expect(came == request_id, f"X-Request-ID is {came!r}, was sent as {request_id!r}")
    expect("x-correlation-id" in answer.headers, f"{answer.told()} without X-Correlation-ID")
    return answer.told()


async def _replay(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    first = expect_fresh(await kit.send(action, key))
    second = expect_replay(await kit.send(action, key), first)
    expect_replay(await kit.send(action, key), first)
    return f"{first.told()}, then {second.told()}: the same {len(first.body)} bytes"


async def _other_spelling(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    first = expect_fresh(await kit.send(action, key))
    text = json.dumps(_turned(action.body), indent=3).encode()
    second = expect_replay(await kit.send(action, key, content=text), first)
    return second.told()


async def _volatile(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    first = expect_fresh(await kit.send(action, key))
    for field in kit.profile.volatile_fields:
        body = action.body | {field: f"new on every send {unique()}"}
        answer = await kit.send(action, key, content=msgspec.json.encode(body))
        expect_replay(answer, first)
    return f"replayed with another {' and '.join(kit.profile.volatile_fields)}"


async def _mismatch(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    first = expect_fresh(await kit.send(action, key))
    other = msgspec.json.encode(action.other_body)
    answer = await kit.send(action, key, content=other)
    details = expect_error(kit, answer, "payload_mismatch")
    volatile = frozenset(kit.profile.volatile_fields)
    hashes = {
        "expectedHash": msgspec.json.encode(action.body),
        "receivedHash": other,
    }
    for name, body in hashes.items():
        wanted = sha256(canonical_json(body, volatile=volatile)).hexdigest()
        expect(details.get(name) == wanted, f"{answer.told()}: {name} is not the body's SHA-256")
    expect_replay(await kit.send(action, key), first)
    return f"{answer.told()}, and the first answer is still there"


async def _other_query(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    expect_fresh(await kit.send(action, key))
    answer = await kit.send(action, key, query="?page=2")
    expect_error(kit, answer, "payload_mismatch")
    return answer.told()


async def _get(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    first = expect_fresh(await kit.send(action, key))
    location = kit.location_of(first)
    if location is None:
        raise NotCheckedError("the answer has no Location to read")
    answer = await kit.ask("GET", location, key=key)
    expect(not answer.is_replay, f"a GET got {answer.told()}")
    expect(answer.is_success, f"{answer.told()} for GET of the Location")
    return answer.told()


async def _nested(kit: Kit) -> str:
    return await _tell_apart(kit, b'{"a":{"b":[{"c":1}]}}', b'{"a":{"b":[{"c":2}]}}')


async def _large_numbers(kit: Kit) -> str:
    return await _tell_apart(kit, b'{"a":9007199254740992}', b'{"a":9007199254740993}')


async def _tell_apart(kit: Kit, one: bytes, another: bytes) -> str:
    action, key = await kit.fresh(), kit.new_key()
    expect_fresh(await kit.send(action, key, content=one))
    answer = await kit.send(action, key, content=another)
    expect_error(kit, answer, "payload_mismatch")
    return answer.told()


async def _equal_texts(kit: Kit) -> str:
    action, key = await kit.fresh(), kit.new_key()
    one = '{"n":[1.0,100,0.002],"s":"é/A","z":null}'.encode()
    another = rb'{ "z":null, "s":"\u00e9\/\u0041", "n":[1,1e2,2E-3] }'
    # 100 is a whole-number literal and 1e2 a double: both are written 100.
    first = expect_fresh(await kit.send(action, key, content=one))
    return expect_replay(await kit.send(action, key, content=another), first).told()


def _turned(value: Any) -> Any:
    """Return the same value with the members of every object the other way round."""
    if isinstance(value, dict):
        return {name: _turned(value[name]) for name in reversed(value)}
    return [_turned(item) for item in value] if isinstance(value, list) else value


CHECKS: Final = (
    Check("first time", "§4, §9", "done, not marked, with its own X-Request-ID", _first),
    Check(
        "replay",
        "§4",
        "the stored status, bytes, Content-Type, ETag and Location; marked; own and original id",
        _replay,
    ),
    Check(
        "replay of another spelling", "§3", "order and white space do not count", _other_spelling
    ),
    Check(
        "volatile fields",
        "§3",
        "a replay, whatever they hold",
        _volatile,
        lambda profile: bool(profile.volatile_fields),
    ),
    Check(
        "same key, other body",
        "§4",
        "409 payload_mismatch with both hashes, nothing changed",
        _mismatch,
    ),
    Check("same key, other query", "§3", "409 payload_mismatch", _other_query),
    Check(
        "GET with a known key",
        "§4",
        "never answered from a record",
        _get,
        lambda profile: profile.gives_location,
    ),
    Check(
        "nested fields count",
        "§3",
        "409 payload_mismatch",
        _nested,
        lambda profile: profile.takes_any_member,
    ),
    Check(
        "integers beyond 2^53 keep their digits",
        "§3",
        "409 payload_mismatch",
        _large_numbers,
        lambda profile: profile.takes_any_member,
    ),
    Check(
        "equal numbers and escapes are equal",
        "§3",
        "a replay",
        _equal_texts,
        lambda profile: profile.takes_any_member,
    ),
)
