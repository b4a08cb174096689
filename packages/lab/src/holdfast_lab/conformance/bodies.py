"""Checks of invalid and ambiguous JSON bodies: 400, and nothing is stored."""

from typing import Final

import msgspec

from holdfast.core.canonical_json import MAX_DEPTH
from holdfast_lab.conformance.expect import expect_error, expect_first
from holdfast_lab.conformance.harness import Check, Harness

__all__ = ["CHECKS"]

_NESTED: Final = b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1)
_ADDED: Final[dict[str, bytes]] = {
    "duplicate keys in JSON": b'"twice":1,"twice":1',
    "nested deeper than 128": b'"deep":' + _NESTED,
    "invalid UTF-8": b'"bad":"\xff"',
    "a number too large for a double": b'"huge":1e400',
    "NaN": b'"n":NaN',
    "half a surrogate pair": b'"s":"\\ud800"',
}
_WHOLE: Final[dict[str, bytes]] = {
    "malformed JSON": b'{"unfinished":',
    "a byte order mark": b"\xef\xbb\xbf{}",
}


def _check(name: str, *, added: bytes | None = None, whole: bytes | None = None) -> Check:
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

    return Check(name, "Fingerprint", "400, in the operation's error format", run)


CHECKS: Final = (
    *(_check(name, whole=text) for name, text in _WHOLE.items()),
    *(_check(name, added=text) for name, text in _ADDED.items()),
)
