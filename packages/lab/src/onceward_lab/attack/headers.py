"""Attacks with headers: keys that conflict, lengths that disagree, lines that are injected."""

from typing import Final

from onceward_lab.attack.target import (
    Attack,
    RawResponse,
    Target,
    expect_no_failure,
    expect_refusal,
)
from onceward_lab.conformance.harness import CheckFailedError, CheckSkippedError

__all__ = ["ATTACKS"]

_GROUP: Final = "headers"
_EVIL: Final = "attack.example"
_TOO_LARGE: Final = (400, 413, 414, 431)


async def _keys(target: Target) -> str:
    harness = target.harness
    cases: dict[str, list[str | bytes]] = {
        "an empty key": [""],
        "two different keys": [harness.new_key(), harness.new_key()],
        "a key and an empty one": [harness.new_key(), ""],
        "a key of 10,000 characters": ["k" * 10_000],
        "a key with bytes above ASCII": [b"\xff\xfe" * 8],
        "a key with a tab": [b"a\tb"],
    }
    if not harness.profile.key_required:
        raise CheckSkippedError("the operation does not require a key")
    for what, keys in cases.items():
        response = await harness.send(await harness.new_request(), keys=keys)
        expect_refusal(what, response.status, response.summary())
    return f"{len(cases)} requests refused"


def _refused(what: str, response: RawResponse, allowed: tuple[int, ...] = ()) -> None:
    """Expect a client error or a closed connection."""
    for status in response.statuses[:1]:
        expect_refusal(what, status, response.summary(), allowed)
    if not response.statuses and not response.is_closed:
        raise CheckFailedError(f"{what}: no response, and the connection is still open")


async def _malformed_lines(target: Target) -> str:
    body, key = await target.body(), target.harness.new_key()
    length = f"Content-Length: {len(body)}".encode()
    name = target.harness.profile.key_header.encode()
    lines = {
        "a NUL": name + b": a\x00b",
        "a folded line": name + b": a\r\n b",
        "a space before the colon": name + b" : " + key.encode(),
        "a line without a colon": b"attack",
        "a name with a parenthesis": b"X-(attack): 1",
    }
    for what, line in lines.items():
        _refused(what, await target.exchange(await target.head(length, line) + body))
    return f"{len(lines)} requests refused"


async def _injected(target: Target) -> str:
    """Send line breaks, plain and encoded, in headers whose values a server sends back."""
    body = await target.body()
    length = f"Content-Length: {len(body)}".encode()
    for mark in (b"\r", b"\n", b"%0d%0a", b"\\r\\n", "嘊嘍".encode()):
        for name in (b"X-Request-ID", b"X-Correlation-ID", b"traceparent"):
            key = target.harness.new_key()
            line = name + b": a" + mark + b"X-Injected-By: attack"
            raw = await target.head(length, b"Connection: close", line, key=key) + body
            response = await target.exchange(raw)
            for status in response.statuses:
                expect_no_failure(f"{mark!r} in {name.decode()}", status, response.summary())
            head = response.data.partition(b"\r\n\r\n")[0].lower()
            if any(each.startswith(b"x-injected-by") for each in head.splitlines()):
                raise CheckFailedError(f"{mark!r} in {name.decode()}: a header was injected")
    return "no header was injected"


async def _smuggled(target: Target) -> str:
    """Send a second request inside the body of the first, with lengths that disagree."""
    key = target.harness.new_key()
    hidden = b"GET /attack-smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    chunked = b"0\r\n\r\n" + hidden
    whole = f"Content-Length: {len(chunked)}".encode()
    cases = {
        "Content-Length and Transfer-Encoding": (whole, b"Transfer-Encoding: chunked"),
        "Transfer-Encoding and Content-Length": (b"Transfer-Encoding: chunked", whole),
        "two lengths": (b"Content-Length: 0", whole),
        "a list of lengths": (f"Content-Length: 0, {len(chunked)}".encode(),),
        "an unknown Transfer-Encoding": (whole, b"Transfer-Encoding: attack"),
        "a space in Transfer-Encoding": (whole, b"Transfer-Encoding : chunked"),
        "chunked twice": (b"Transfer-Encoding: chunked, chunked",),
    }
    for what, lines in cases.items():
        raw = await target.head(*lines, key=key) + chunked
        response = await target.exchange(raw)
        if len(response.statuses) > 1:
            raise CheckFailedError(f"{what}: {response.summary()}: the hidden request was served")
        for status in response.statuses:
            expect_no_failure(what, status, response.summary())
    return f"{len(cases)} requests, one response each at most"


async def _lengths(target: Target) -> str:
    body = await target.body()
    cases = {
        "a negative length": (b"Content-Length: -1", body),
        "a length that is no number": (b"Content-Length: ten", body),
        "a length of 400 digits": (b"Content-Length: " + b"9" * 400, body),
        "a length with a plus": (b"Content-Length: +%d" % len(body), body),
        "a chunk size that is no number": (b"Transfer-Encoding: chunked", b"zz\r\n" + body),
        "a chunk size of 400 digits": (b"Transfer-Encoding: chunked", b"f" * 400 + b"\r\n" + body),
        "a negative chunk size": (b"Transfer-Encoding: chunked", b"-1\r\n" + body + b"\r\n"),
    }
    for what, (line, sent) in cases.items():
        raw = await target.head(line, key=target.harness.new_key()) + sent
        _refused(what, await target.exchange(raw))
    return f"{len(cases)} requests refused"


async def _large_heads(target: Target) -> str:
    cases = {
        "a header of 1 MB": (b"X-Attack: " + b"a" * 1_000_000,),
        "10,000 headers": tuple(b"X-Attack-%d: a" % number for number in range(10_000)),
        "a token of 200 kB": (b"Authorization: Bearer " + b"a" * 200_000,),
        "a key of 200 kB": (target.harness.profile.key_header.encode() + b": " + b"a" * 200_000,),
    }
    for what, lines in cases.items():
        raw = await target.head(b"Content-Length: 0", *lines)
        _refused(what, await target.exchange(raw), _TOO_LARGE)
    path = await target.exchange(b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    _refused("a path of 1 MB", path, _TOO_LARGE)
    return f"{len(cases) + 1} heads refused"


async def _forged_host(target: Target) -> str:
    """Name another host in the headers from which servers build addresses."""
    own, forged = f"Host: {target.netloc}".encode(), f"Host: {_EVIL}".encode()
    for what in ("X-Forwarded-Host", "Host"):
        body = await target.body()
        head = await target.head(
            f"Content-Length: {len(body)}".encode(),
            b"Connection: close",
            f"X-Forwarded-Host: {_EVIL}".encode(),
            f"Forwarded: host={_EVIL}".encode(),
            b"X-Original-URL: /attack",
            key=target.harness.new_key(),
        )
        raw = head.replace(own, forged) if what == "Host" else head
        response = await target.exchange(raw + body)
        for status in response.statuses:
            expect_no_failure(what, status, response.summary())
        for line in response.data.partition(b"\r\n\r\n")[0].lower().splitlines():
            if line.startswith(b"location:") and _EVIL.encode() in line:
                raise CheckFailedError(f"{what}: Location names the forged host")
    return "the forged host is not used"


ATTACKS: Final = (
    Attack(
        "keys that conflict or are invalid",
        _GROUP,
        "4xx",
        _keys,
        why="A request whose key is ignored runs unrecorded, and every retry runs again.",
        change="Read all values of the header; refuse an empty, an invalid and a second key.",
    ),
    Attack(
        "malformed header lines",
        _GROUP,
        "4xx, or the connection is closed",
        _malformed_lines,
        why="A proxy and a server that read a line differently see two different requests.",
        change="Use an HTTP server that refuses what RFC 9112 does not allow.",
    ),
    Attack(
        "line breaks in values that are sent back",
        _GROUP,
        "no header of the attacker in the response",
        _injected,
        why="An injected header can set a cookie, or split one response into two.",
        change="Accept only visible ASCII characters in ids that are sent back.",
    ),
    Attack(
        "a request hidden in a body",
        _GROUP,
        "one response at most",
        _smuggled,
        why="Behind a proxy, the hidden request would get the response and the rights of another "
        "client.",
        change="Refuse a request with both lengths or with two; close the connection after it.",
    ),
    Attack(
        "lengths that are no lengths",
        _GROUP,
        "4xx, or the connection is closed",
        _lengths,
        why="A length that wraps around or is ignored shifts the start of the next request.",
        change="Accept only digits in Content-Length and hexadecimal digits in chunk sizes.",
    ),
    Attack(
        "large heads",
        _GROUP,
        "400, 413, 414 or 431, or the connection is closed",
        _large_heads,
        why="A head is held in memory before anyone has signed in.",
        change="Limit the size of a head to some 64 KB.",
    ),
    Attack(
        "a forged host",
        _GROUP,
        "Location does not name it",
        _forged_host,
        why="A client would send its next request, and its token, to another host.",
        change="Send a path in Location, or build it from a configured address.",
    ),
)
