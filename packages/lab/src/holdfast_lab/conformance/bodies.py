"""Checks of bodies that have no one meaning: refused with 400, never guessed, never stored."""

from typing import Final

import msgspec

from holdfast.core.canonical_json import MAX_DEPTH
from holdfast_lab.conformance.expect import expect_error, expect_fresh
from holdfast_lab.conformance.harness import Check, Kit

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
    async def run(kit: Kit) -> str:
        action, key = await kit.fresh(), kit.new_key()
        good = msgspec.json.encode(action.body)
        # A good body with one bad member: nothing but that member can be what is refused.
        bad = whole if added is None else good[:-1] + b"," + added + b"}"
        answer = await kit.send(action, key, content=bad)
        expect_error(kit, answer, "body_invalid")
        again = expect_fresh(await kit.send(action, key)) if whole is not None else None
        return answer.told() + (f"; the key is still free: {again.told()}" if again else "")

    return Check(name, "§3, §4", "400, in the operation's dialect", run)


CHECKS: Final = (
    *(_check(name, whole=text) for name, text in _WHOLE.items()),
    *(_check(name, added=text) for name, text in _ADDED.items()),
)
