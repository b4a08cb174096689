"""Checks of invalid and ambiguous JSON bodies: 400, and nothing is stored."""

from typing import Final

import msgspec

from onceward_lab.conformance.expect import expect_error, expect_first
from onceward_lab.conformance.harness import Check, Harness
from onceward_protocol.fingerprint import MAX_DEPTH

__all__ = ["CHECKS"]

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


CHECKS: Final = (
    *(_check(name, why, whole=text) for name, (text, why) in _WHOLE.items()),
    *(_check(name, why, added=text) for name, (text, why) in _ADDED.items()),
)
