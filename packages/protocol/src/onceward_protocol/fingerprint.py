"""Hashes that identify requests, keys and locks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, sha256
from urllib.parse import parse_qsl

from onceward_protocol.canonical_json import canonical_json

__all__ = [
    "FingerprintInput",
    "body_hash",
    "lock_number",
    "request_fingerprint",
    "short_hash",
]

_SHORT = 12
"""Hex digits of a short hash: 48 bits distinguish keys in a log and reveal none."""


@dataclass(frozen=True, slots=True)
class FingerprintInput:
    """One request, as ``Policy.fingerprint`` gets it."""

    # In upper case.
    method: str
    # Decoded, without the query.
    path: str
    # As it was sent.
    query: bytes
    # Names in lower case, and values.
    headers: Iterable[tuple[bytes, bytes]]
    # As it was sent.
    body: bytes

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None."""
        wanted = name.lower().encode("latin-1")
        for key, value in self.headers:
            if key == wanted:
                return value.decode("latin-1")
        return None


def body_hash(
    body: bytes, content_type: str | None, *, volatile: frozenset[str] = frozenset()
) -> str:
    """Return the SHA-256 of a body, in lowercase hex.

    JSON (``application/json`` or ``…+json``, with any parameters) is hashed in canonical form,
    without the volatile fields. Any other body, including an empty one, is hashed as sent, after
    its content type and a newline: the media type in lower case, as it is case-insensitive, and
    the parameters as sent, as they may not be (the boundary of a multipart body). Canonical JSON
    contains no newline, so the two kinds never collide.
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
    """Return the SHA-256 of method, endpoint, path parameters, query and body, in lowercase hex.

    The order of path parameters does not matter, nor do the order of query parameters with
    different names and their percent-encoding. The order of equal names does (``?sort=a&sort=b``).
    """
    if not path_params and not query:
        text = f"{_operation(method, endpoint)}{len(body_hash)}:{body_hash}"
        return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    parts = [method, endpoint, body_hash]
    if path_params:
        parts.append(f"path {len(path_params)}")
        for name in sorted(path_params):
            parts += (name, path_params[name])
    if query:
        # Latin-1 keeps every byte distinct; decoding as UTF-8 would make all invalid bytes equal.
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
        pairs.sort(key=_name)
        parts.append(f"query {len(pairs)}")
        for pair in pairs:
            parts += pair
    return sha256(_joined(parts)).hexdigest()


def lock_number(tenant: str, endpoint: str, key: str) -> int:
    """Return a signed 64-bit number for a record, for PostgreSQL's advisory locks.

    Two records may share a number, which costs a wait and nothing else: the lock only serializes
    requests, the record decides.
    """
    # As ``_joined``, in one step: this runs for every request.
    text = f"{len(tenant)}:{tenant}{len(endpoint)}:{endpoint}{len(key)}:{key}"
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def short_hash(key: str) -> str:
    """Return the twelve hex digits that identify a key in logs, metrics and traces."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:_SHORT]


def _name(pair: tuple[str, str]) -> str:
    return pair[0]


@lru_cache(maxsize=1024)
def _operation(method: str, endpoint: str) -> str:
    """Return the beginning of the text that is hashed, which an operation's requests share."""
    return f"{len(method)}:{method}{len(endpoint)}:{endpoint}"


def _joined(parts: list[str]) -> bytes:
    """Join strings unambiguously: each is preceded by its length."""
    text = "".join([f"{len(part)}:{part}" for part in parts])
    # A path decoded by a lenient server may contain a lone surrogate.
    return text.encode("utf-8", "surrogatepass")
