"""Checks of invalid and ambiguous JSON bodies: 400, and nothing is stored."""

import asyncio
from typing import Final

import msgspec

from onceward_lab.conformance.expect import expect_error, expect_first
from onceward_lab.conformance.harness import Check, Harness
from onceward_protocol.fingerprint import MAX_DEPTH

__all__ = ["CHECKS"]

_LENGTH_REQUIRED: Final = 411
# A server may notice later that the client has gone.
_CUT_SECONDS: Final = 0.2
_NESTED: Final = b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1)
_ADDED: Final[dict[str, tuple[bytes, str]]] = {
    "duplicate keys in JSON": (
        b'"twice":1,"twice":1',
        "One parser uses the first member and another the last: they see two requests in one body.",
    ),
    "nested deeper than 128": (
        b'"deep":' + _NESTED,
        "Deep nesting exhausts the stack of a recursive parser: one request ends the process.",
    ),
    "invalid UTF-8": (
        b'"bad":"\xff"',
        "Parsers replace such bytes differently, so two servers hash one request differently.",
    ),
    "a number too large for a double": (
        b'"huge":1e400',
        "Many parsers read it as infinity, which has no JSON form and no canonical hash.",
    ),
    "NaN": (b'"n":NaN', "It is not JSON; some parsers accept it and others fail."),
    "half a surrogate pair": (
        b'"s":"\\ud800"',
        "It cannot be encoded as UTF-8: storing or hashing it fails later, inside the handler.",
    ),
}
_WHOLE: Final[dict[str, tuple[bytes, str]]] = {
    "malformed JSON": (
        b'{"unfinished":',
        "A truncated request must not use up its key: the complete one follows with the same key.",
    ),
    "a byte order mark": (
        b"\xef\xbb\xbf{}",
        "JSON on the network has none (RFC 8259); some parsers skip it and others fail.",
    ),
}
_CHANGE: Final = (
    "Parse the body strictly before the key is claimed (RFC 8785 requires I-JSON) and respond 400 "
    "in the operation's error format; store nothing."
)


def _check(name: str, why: str, *, added: bytes | None = None, whole: bytes | None = None) -> Check:
    async def run(harness: Harness) -> str:
        request, key = await harness.new_request(), harness.new_key()
        good = msgspec.json.encode(request.body)
        # A valid body plus one invalid member, so that nothing else can be the reason.
        bad = whole if added is None else good[:-1] + b"," + added + b"}"
        response = await harness.send(request, key, content=bad)
        expect_error(harness, response, "body_invalid")
        again = expect_first(await harness.send(request, key)) if whole is not None else None
        return response.summary() + (
            f"; the key is still unused: {again.summary()}" if again else ""
        )

    return Check(
        name, "Fingerprint", "400, in the operation's error format", run, why=why, change=_CHANGE
    )


async def _cut(harness: Harness) -> str:
    text = []
    for has_length in (True, False):
        request, key = await harness.new_request(), harness.new_key()
        # What arrives is valid JSON: only its length tells that it is not all.
        whole = msgspec.json.encode(request.body).ljust(100_000)
        cut = await harness.send_cut(request, key, whole, len(whole) - 10, has_length=has_length)
        if cut is not None and cut.status != _LENGTH_REQUIRED:
            expect_error(harness, cut, "body_invalid")
        await asyncio.sleep(_CUT_SECONDS)
        again = expect_first(await harness.send(request, key, content=whole))
        text.append(f"{'no response' if cut is None else cut.summary()}; then {again.summary()}")
    return "; ".join(text)


CHECKS: Final = (
    Check(
        "a body that breaks off",
        "Fingerprint",
        "nothing runs, and the key is unused",
        _cut,
        why="A part of a form or a document may be a valid one, with another meaning.",
        change="Compare the bytes received with Content-Length, wait for the last chunk, and "
        "respond 400 without claiming the key. Some WSGI servers end the input where it broke.",
    ),
    *(_check(name, why, whole=text) for name, (text, why) in _WHOLE.items()),
    *(_check(name, why, added=text) for name, (text, why) in _ADDED.items()),
)
