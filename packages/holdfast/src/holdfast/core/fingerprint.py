"""Fingerprints: what makes two requests the same request, and short names for keys. Pure."""

from collections.abc import Mapping
from hashlib import blake2b, sha256
from urllib.parse import parse_qsl

from holdfast.core.canonical_json import canonical_json

__all__ = ["body_hash", "lock_number", "request_fingerprint", "short_hash"]

_SHORT = 12
"""Hex digits of a short hash: 48 bits tell keys apart in a log and give none away."""


def body_hash(
    body: bytes, content_type: str | None, *, volatile: frozenset[str] = frozenset()
) -> str:
    """Return the SHA-256 of a body, in lowercase hex.

    JSON (``application/json`` or ``…+json``, with any parameters) is hashed in canonical form and
    without its volatile fields. Any other body, an empty one included, is hashed as it came, after
    its content type and a newline: the media type in lower case, as its case means nothing, and
    the parameters as sent, as theirs can (the boundary of a multipart body). No canonical JSON has
    a newline in it, so the two kinds never meet.
    """
    if body and content_type == "application/json":
        return sha256(canonical_json(body, volatile=volatile)).hexdigest()
    media_type, semicolon, parameters = (content_type or "").strip().partition(";")
    media_type = media_type.rstrip().lower()
    if body and (media_type == "application/json" or media_type.endswith("+json")):
        return sha256(canonical_json(body, volatile=volatile)).hexdigest()
    kind = f"{media_type}{semicolon}{parameters}\n".encode("utf-8", "surrogatepass")
    return sha256(kind + body).hexdigest()


def request_fingerprint(
    *, method: str, endpoint: str, path_params: Mapping[str, str], query: bytes, body_hash: str
) -> str:
    """Return the SHA-256 of everything that makes a request what it is, in lowercase hex.

    The order of path parameters does not count, nor does that of query parameters with different
    names or how they are percent-encoded; the order of equal names does (``?sort=a&sort=b``).
    """
    parts = [method, endpoint, body_hash]
    if path_params:
        parts.append(f"path {len(path_params)}")
        for name in sorted(path_params):
            parts += (name, path_params[name])
    if query:
        # Latin-1 keeps every byte apart; to decode UTF-8 here would make all bad bytes alike.
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
        pairs.sort(key=_name)
        parts.append(f"query {len(pairs)}")
        for pair in pairs:
            parts += pair
    return sha256(_joined(parts)).hexdigest()


def lock_number(tenant: str, endpoint: str, key: str) -> int:
    """Return a signed 64-bit number for a record, as PostgreSQL's advisory locks take.

    Two records may share a number, which costs a wait and never a wrong answer: the lock only
    lines requests up, the record decides.
    """
    digest = blake2b(_joined((tenant, endpoint, key)), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def short_hash(key: str) -> str:
    """Return twelve hex digits that stand for a key in logs, metrics and traces."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:_SHORT]


def _name(pair: tuple[str, str]) -> str:
    return pair[0]


def _joined(parts: list[str] | tuple[str, ...]) -> bytes:
    """Join texts so that no other list of texts gives the same bytes: each after its length."""
    text = "".join([f"{len(part)}:{part}" for part in parts])
    # A path decoded by a lenient server may hold half a surrogate pair; it still is a name.
    return text.encode("utf-8", "surrogatepass")
