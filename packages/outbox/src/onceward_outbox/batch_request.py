"""The request of a batch: its items from the requests of entries, and its results as responses.

An item is the request that the entry would be sent with alone. What only an earlier item of the
batch brings, a server's id or a version, is a placeholder, which the server replaces before it
computes the fingerprint; so a later send of the entry alone has the same fingerprint.
"""

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from onceward_outbox.entry import Claimed
from onceward_outbox.profile import Profile
from onceward_outbox.transport import Request, Response
from onceward_protocol.batch import ITEM_HEADERS, parse_results
from onceward_protocol.local_ids import strings_in

__all__ = [
    "MAX_BYTES",
    "BatchRequest",
    "BatchResults",
    "Item",
    "Part",
    "encode",
    "item_of",
    "read_results",
    "version_name",
]

MAX_BYTES: Final = 960 * 1024
"""How large the body of a batch may be: a server takes 1 MiB by default."""

_ITEM_BYTES: Final = 160
"""What the framing of an item takes, about."""

_MAX_HEADER_CHARS: Final = 8192
_OPENINGS: Final = ("{local:", "{version:")
_CLIENT_ID: Final = "x-client-id"
_SEQUENCE: Final = "x-sequence"
# About one request: as a header of the batch they would not be those of its items.
_OWN_HEADERS: Final = frozenset(
    {
        *("accept-encoding", "connection", "content-length", "cookie", "expect", "host"),
        *("if-modified-since", "if-none-match", "if-unmodified-since", "keep-alive", "range"),
        *("te", "trailer", "transfer-encoding", "upgrade", "x-request-id"),
    }
)


class Item(msgspec.Struct, frozen=True):
    """The request of one entry, as far as it does not depend on the others."""

    method: str
    path: str
    key: str
    headers: dict[str, str]
    body: bytes | None
    client_id: str | None
    sequence: int | None
    # Headers that items cannot have: the batch has them, so they must be the same for all.
    shared: dict[str, str]

    @property
    def size(self) -> int:
        """About how many bytes it takes in the batch."""
        headers = sum(len(name) + len(value) + 6 for name, value in self.headers.items())
        return len(self.path) + len(self.key) + headers + len(self.body or b"") + _ITEM_BYTES


class Part(msgspec.Struct, frozen=True):
    """One entry of a batch."""

    claimed: Claimed
    # The endpoint of the earlier entry of the batch whose version it is sent with; None for none.
    follows: str | None = None


class BatchRequest(msgspec.Struct, frozen=True):
    """One request with several entries, which are claimed."""

    path: str
    headers: dict[str, str]
    body: bytes
    parts: list[Part]
    # The token that was sent; None for none.
    token: str | None

    @property
    def request(self) -> Request:
        """The HTTP request."""
        return Request("POST", self.path, self.headers, self.body)


class _Sent(msgspec.Struct, omit_defaults=True):
    method: str
    path: str
    key: str
    headers: dict[str, str]
    body: msgspec.Raw | None = None
    lane: str | None = None
    local_id: str | None = None
    client_id: str | None = None
    sequence: int | None = None


def version_name(name: str) -> str:
    """Return the placeholder of the version that the item with this name produces."""
    return f"{{version:{name}}}"


def item_of(  # noqa: C901 - one branch for each kind of header
    request: Request, profile: Profile, *, pending: Collection[str], follows: bool
) -> Item | None:
    """Return the item of a request; None if it can only be sent alone.

    ``pending`` are the local ids that earlier items create, ``follows`` is whether ``If-Match`` is
    the version of an earlier item.
    """
    headers: dict[str, str] = {}
    shared: dict[str, str] = {}
    key = client_id = sequence = None
    for name, value in request.headers.items():
        lower = name.lower()
        if lower == profile.key_header.lower():
            key = value
        elif lower == _CLIENT_ID:
            client_id = value
        elif lower == _SEQUENCE and value.isdigit():
            sequence = int(value)
        elif lower in ITEM_HEADERS or lower in profile.batch_headers:
            headers[lower] = value
        elif lower in _OWN_HEADERS or not _is_sendable(value):
            return None
        else:
            shared[lower] = value
    path, body = _with_placeholders(request.target, pending), request.body
    if headers.get("content-type") == "application/json":
        del headers["content-type"]  # that of items without one
    is_json = "json" in headers.get("content-type", "json").lower()
    if key is None or not is_json or body == b"" or (body or b"").strip() == b"null":
        return None
    texts = [path, *(value for name, value in headers.items() if name != "if-match" or not follows)]
    if not all(map(_is_sendable, headers.values())) or not _has_only(texts, pending):
        return None
    if body is not None and not _body_has_only(body, pending):
        return None
    return Item(request.method, path, key, headers, body, client_id, sequence, shared)


def encode(items: Iterable[tuple[Item, str | None, str | None]]) -> bytes:
    """Return the body of a batch: items, each with its lane and the name that others refer to."""
    sent = [
        _Sent(
            method=item.method,
            path=item.path,
            key=item.key,
            headers=item.headers,
            body=None if item.body is None else msgspec.Raw(item.body),
            lane=lane,
            local_id=name,
            client_id=item.client_id,
            sequence=item.sequence,
        )
        for item, lane, name in items
    ]
    return msgspec.json.encode({"items": sent})


def _with_placeholders(path: str, pending: Collection[str]) -> str:
    """Return the path with placeholders that are not encoded."""
    for local_id in pending if "%7B" in path else ():
        path = path.replace(f"%7Blocal%3A{local_id}%7D", f"{{local:{local_id}}}")
    return path


def _is_sendable(value: str) -> bool:
    return value.isascii() and value.isprintable() and len(value) <= _MAX_HEADER_CHARS


def _body_has_only(body: bytes, pending: Collection[str]) -> bool:
    is_plain = b"{local:" not in body and b"{version:" not in body and b"\\u" not in body
    return is_plain or _has_only(strings_in(msgspec.json.decode(body)), pending)


def _has_only(texts: Iterable[str], pending: Collection[str]) -> bool:
    """Return whether texts have no other placeholders than those of pending local ids.

    The server would replace them, or refuse them.
    """
    for text in texts:
        rest = text
        for local_id in pending if _OPENINGS[0] in text else ():
            rest = rest.replace(f"{{local:{local_id}}}", "")
        if any(opening in rest for opening in _OPENINGS):
            return False
    return True


# -- results ---------------------------------------------------------------------------------------


class BatchResults(msgspec.Struct, frozen=True):
    """The responses to the first items of a batch, and when to send the rest."""

    responses: list[Response]
    retry_after_seconds: float


def read_results(response: Response, count: int) -> BatchResults | None:
    """Return the results of a batch of ``count`` items; None if the response is not that."""
    found = None if response.cut_short else parse_results(response.body, count)
    if found is None:
        return None
    results, seconds = found
    # The responses that single requests would have got.
    date = {"date": response.headers["date"]} if "date" in response.headers else {}
    responses = [Response(each.status, date | each.headers, each.body) for each in results]
    return BatchResults(responses, seconds if seconds is not None and seconds > 0 else 0.0)
