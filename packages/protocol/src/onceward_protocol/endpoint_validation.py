"""Validation of endpoints: relative paths that cannot lead to another server. Pure.

An entry may wait for days and is then sent with a user's token. A path that a URL library, a proxy
or the server reads as another host or directory would send the token there, so every path that can
be read in two ways is refused when it is queued, in every encoding.
"""

import re
from typing import Final
from unicodedata import normalize
from urllib.parse import unquote_to_bytes

from onceward_protocol.errors import EntryInvalidError

__all__ = ["MAX_LENGTH", "RULE", "check_endpoint"]

RULE: Final = "endpoint_must_be_relative_path"
MAX_LENGTH: Final = 2048
"""Length that servers and proxies commonly accept."""

_UUID: Final = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# The characters of RFC 3986 for paths and queries, and placeholders of local ids. Control
# characters, spaces, backslashes and fragments do not belong in a request target.
_CHARACTER: Final = rf"[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{{2}}|\{{local:{_UUID}\}}"
_ENDPOINT: Final = re.compile(rf"(/(?:{_CHARACTER}|/)*)(?:\?(?:{_CHARACTER}|[/?])*)?")
_DOTS: Final = frozenset({".", ".."})
# Some proxies decode twice; deeper encodings are refused.
_DECODINGS: Final = 4


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint as it is, or raise ``EntryInvalidError``."""
    if not isinstance(endpoint, str) or not endpoint.startswith("/"):
        raise _refused('must be a path that begins with "/", without scheme and host')
    if len(endpoint) > MAX_LENGTH:
        raise _refused(f"must have at most {MAX_LENGTH} characters")
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise _refused(
            "contains a character that is not allowed in a path, or a placeholder other than "
            "{local:UUID} with a UUID in lower case"
        )
    path = match[1]
    _check_path(path)
    if "%" in path:
        _check_encoded(path)
    return endpoint


def _check_path(path: str) -> None:
    if "//" in path:
        raise _refused('must not have "//"')
    # Some servers drop what follows a semicolon, as a parameter.
    if "/." in path and any(part.partition(";")[0] in _DOTS for part in path.split("/")):
        raise _refused('must not have "." or ".." as a part')


def _check_encoded(path: str) -> None:
    """Check the path after decoding, repeatedly until decoding changes nothing."""
    current = path
    for _ in range(_DECODINGS):
        try:
            decoded = unquote_to_bytes(current).decode()
        except UnicodeDecodeError:
            raise _refused("has an encoded byte that is not UTF-8") from None
        if decoded == current:
            return
        # Compatibility forms too: some servers and file systems turn a full-width dot into a dot.
        for form in (decoded, normalize("NFKC", decoded)):
            if any(character < " " or character in "\\\x7f" for character in form):
                raise _refused("has an encoded control character or backslash")
            _check_path(form)
        current = decoded
    raise _refused("is encoded too many times over")


def _refused(why: str) -> EntryInvalidError:
    # The endpoint is not repeated: it may contain user input.
    return EntryInvalidError(RULE, f"the endpoint {why}")
