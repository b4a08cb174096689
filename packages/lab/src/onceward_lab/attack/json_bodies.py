"""Attacks with JSON: ambiguous, deep, large, compressed, and expensive to read."""

import asyncio
import gzip
import time
from typing import Final

import msgspec

from onceward_lab.attack.large_bodies import EXPENSIVE, fill
from onceward_lab.attack.latencies import Latencies, measure
from onceward_lab.attack.target import (
    Attack,
    Target,
    expect_no_failure,
    expect_refusal,
    with_member,
)
from onceward_lab.conformance.harness import CheckFailedError, CheckSkippedError

__all__ = ["ATTACKS", "expect_health"]

_GROUP: Final = "bodies"
_SENDERS: Final = 3
_TOO_LONG_SECONDS: Final = 20.0
_OK: Final = 200
# With fewer samples, the 99th percentile is the slowest one.
_SAMPLES: Final = 10


def expect_health(target: Target, found: Latencies) -> str:
    """Compare health checks under load with the limit; returns both, with those before it."""
    if not found.seconds or found.statuses.keys() - {_OK}:
        raise CheckFailedError(f"GET {target.health_path}: {dict(found.statuses)}")
    text = (
        f"{target.health_path} p99 {found.percentile(99):.0f} ms "
        f"(before: {target.quiet.percentile(99):.0f} ms)"
    )
    if found.percentile(99) > target.limits.health_ms:
        raise CheckFailedError(f"{text}, at most {target.limits.health_ms:g} ms expected")
    return text


async def _ambiguous(target: Target) -> str:
    harness = target.harness
    values = {
        "duplicate members": b'{"a":1,"a":2}',
        "duplicate members with an escape": b'{"a":1,"\\u0061":2}',
        "invalid UTF-8": b'"\xff\xfe"',
        "an overlong encoding": b'"\xc0\xaf"',
        "half a surrogate pair": b'"\\ud800"',
        "NaN": b"NaN",
        "Infinity": b"-Infinity",
        "a number too large for a double": b"1e400",
        "a control character": b'"a\x01b"',
        "a comma at the end": b"[1,]",
        "a comment": b"1/* */",
        "100,000 levels": b"[" * 100_000 + b"]" * 100_000,
        "100,000 open objects": b'{"a":' * 100_000,
    }
    bodies = {
        what: with_member(await harness.new_request(), value) for what, value in values.items()
    }
    bodies["a byte order mark"] = b"\xef\xbb\xbf" + await target.body()
    bodies["two values"] = await target.body() + await target.body()
    bodies["UTF-16"] = (await target.body()).decode().encode("utf-16")
    for what, body in bodies.items():
        request = await harness.new_request()
        response = await harness.send(request, harness.new_key(), content=body)
        expect_refusal(what, response.status, response.summary())
    return f"{len(bodies)} bodies refused"


async def _difficult(target: Target) -> str:
    """Send valid JSON that databases and converters fail on."""
    harness = target.harness
    values = {
        "a NUL in a text": b'"a\\u0000b"',
        "NUL as a name": b'{"\\u0000":1}',
        "an integer of 1,000,000 digits": b"1" * 1_000_000,
        "an integer of 5,000 digits": b"9" * 5000,
        "a fraction of 1,000,000 digits": b"0." + b"1" * 1_000_000,
        "the smallest double": b"4.9406564584124654e-324",
        "names of JavaScript objects": b'{"__proto__":{"a":1},"constructor":1}',
        "a text that is SQL": b'"\'; DROP TABLE records; --"',
        "a name of 500,000 characters": b'{"' + b"n" * 500_000 + b'":1}',
        "not an object": b"null",
    }
    for what, value in values.items():
        started = time.monotonic()
        body = value if what == "not an object" else with_member(await harness.new_request(), value)
        request = await harness.new_request()
        response = await harness.send(request, harness.new_key(), content=body)
        expect_no_failure(what, response.status, response.summary())
        if time.monotonic() - started > _TOO_LONG_SECONDS:
            raise CheckFailedError(f"{what}: took {time.monotonic() - started:.0f} seconds")
    return f"{len(values)} bodies accepted or refused"


async def _compressed(target: Target) -> str:
    harness = target.harness
    bomb = gzip.compress(b'{"a":"' + b"a" * 20_000_000 + b'"}')
    for encoding in ("gzip", "deflate", "br", "attack"):
        response = await harness.send(
            await harness.new_request(),
            harness.new_key(),
            content=bomb,
            headers={"content-encoding": encoding},
        )
        expect_refusal(encoding, response.status, response.summary())
    return "4 encodings refused"


async def _cut(target: Target) -> str:
    """Break off at many bytes of a body. The spaces at its end make each long part valid JSON."""
    harness = target.harness
    request, key = await harness.new_request(), harness.new_key()
    whole = msgspec.json.encode(request.body).ljust(500)
    head = await target.head(b"Content-Length: 500", key=key)
    for at in range(0, len(whole), 20):
        cut = await target.exchange(head + whole[:at], ends=True)
        for status in cut.statuses[:1]:
            expect_refusal(f"cut at {at} of 500 bytes", status, cut.summary())
    again = await harness.send(request, key, content=whole)
    if again.is_replay or not again.is_success:
        raise CheckFailedError(f"after cuts, the whole body got {again.summary()}")
    return "25 cuts refused; the whole body got " + again.summary()


async def _endless(target: Target) -> str:
    """Declare a body of 100 GB, and send one without a declared length that does not end."""
    key, wait = target.harness.new_key(), min(10.0, target.limits.patience_seconds)
    declared = await target.exchange(
        await target.head(b"Content-Length: 100000000000", key=key) + b"[1,", seconds=wait
    )
    for status in declared.statuses[:1]:
        expect_refusal("100 GB", status, declared.summary())
    if not declared.statuses and not declared.is_closed:
        raise CheckFailedError(f"100 GB: not refused after {wait:g} seconds")
    chunk = b"40000\r\n" + b"1," * 0x20000 + b"\r\n"
    key = target.harness.new_key()
    endless = await target.exchange(
        await target.head(b"Transfer-Encoding: chunked", key=key) + b"2\r\n[1\r\n" + chunk * 64,
        seconds=wait,
    )
    for status in endless.statuses[:1]:
        expect_refusal("16 MB in chunks", status, endless.summary())
    if not endless.statuses and not endless.is_closed:
        raise CheckFailedError(f"16 MB in chunks: not refused after {wait:g} seconds")
    return f"{declared.summary()}; {endless.summary()}"


async def _expensive(target: Target) -> str:
    harness = target.harness
    found = Latencies()
    is_over = asyncio.Event()

    async def probe() -> None:
        while not is_over.is_set() or len(found.seconds) < _SAMPLES:
            one = await measure(target.health, seconds=0.02)
            found.seconds += one.seconds
            found.statuses += one.statuses

    async def send(what: str, body: bytes) -> None:
        request = await harness.new_request()
        response = await harness.send(request, harness.new_key(), content=body)
        expect_no_failure(what, response.status, response.summary())

    bodies = [
        (what, with_member(await harness.new_request(), fill(element, target.limits.body_bytes)))
        for what, element in EXPENSIVE.items()
    ]
    async with asyncio.TaskGroup() as group:
        group.create_task(probe())
        try:
            for start in range(0, len(bodies), _SENDERS):
                batch = bodies[start : start + _SENDERS]
                results = await asyncio.gather(
                    *(send(what, body) for what, body in batch), return_exceptions=True
                )
                errors = [error for error in results if isinstance(error, BaseException)]
                if errors:
                    break
        finally:
            is_over.set()
    if errors:
        raise errors[0]
    if _OK not in target.quiet.statuses:
        raise CheckSkippedError(f"GET {target.health_path} is not 200: give --health-path")
    return expect_health(target, found)


ATTACKS: Final = (
    Attack(
        "JSON with two meanings",
        _GROUP,
        "4xx",
        _ambiguous,
        why="The hash and the handler would read different values, so a changed request would pass "
        "as a retry; deep nesting overflows the stack.",
        change="Parse the body strictly, once, with a limit on its depth, before the key is "
        "claimed.",
    ),
    Attack(
        "JSON that is valid and difficult",
        _GROUP,
        "no error of the server",
        _difficult,
        why="A 500 is retried for ever by clients, and hides real failures.",
        change="Validate texts and numbers before they reach the database; limit digits.",
    ),
    Attack(
        "compressed bodies",
        _GROUP,
        "4xx",
        _compressed,
        why="20 kB become 20 MB in memory.",
        change="Refuse Content-Encoding, or limit the size after decompression.",
    ),
    Attack(
        "bodies that break off",
        _GROUP,
        "4xx, or the connection is closed, and the key is unused",
        _cut,
        why="A part of a body may be valid, with another meaning: 10 in place of 1000.",
        change="Compare what has arrived with Content-Length before the key is claimed.",
    ),
    Attack(
        "bodies that do not end",
        _GROUP,
        "4xx, or the connection is closed",
        _endless,
        why="The body is held in memory until it is complete.",
        change="Limit the declared size and the received size (max_body_bytes).",
    ),
    Attack(
        "large bodies that are expensive to read",
        _GROUP,
        "no error of the server, and health checks in time",
        _expensive,
        why="While one body is parsed on the event loop, all other requests wait.",
        change="Parse large bodies in a thread, one at a time; lower max_body_bytes.",
    ),
)
