"""The request of an entry, alone or as an item of a batch, and the results of a batch.

An item is the request that the entry would be sent with alone. What only an earlier item of the
batch brings, a server's id or a version, is a placeholder, which the server replaces before it
computes the fingerprint; so a later send of the entry alone has the same fingerprint.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, Protocol

import msgspec

from onceward_outbox.batch_offer import Batches
from onceward_outbox.entry import Claimed, Entry, instant
from onceward_outbox.errors import EntryInvalidError
from onceward_outbox.profile import Profile, TimestampsInBody
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.transport import Request, Response
from onceward_outbox.versions import is_next_of
from onceward_protocol.batch import ITEM_HEADERS, parse_results
from onceward_protocol.correlation import CORRELATION_HEADER, TRACEPARENT_HEADER
from onceward_protocol.ids import new_uuid4
from onceward_protocol.local_ids import (
    is_local_id,
    replace_in_body,
    replace_in_headers,
    replace_in_path,
    strings_in,
)
from onceward_protocol.operation import METHODS, Operation
from onceward_protocol.sequence import CLIENT_HEADER, SEQUENCE_HEADER, SequenceNumber
from onceward_protocol.versions import ANY_TAG, if_match_in, without_if_match

_LEAST_ENTRIES: Final = 2
_MAX_BYTES: Final = 960 * 1024
"""How large the body of a batch may be: a server takes 1 MiB by default."""

_ITEM_BYTES: Final = 160
"""Approximate bytes of the framing of an item."""

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

_CORRELATION: Final = frozenset({CORRELATION_HEADER.lower(), TRACEPARENT_HEADER})

_Ids = Mapping[str, str | int]
Mappings = Callable[[str, Iterable[str]], _Ids]
"""Returns the server ids of a user's local ids, those that have one."""


def build_request(
    entry: Entry,
    profile: Profile,
    mappings: Mappings,
    *,
    now: Callable[[], datetime],
    extra: Mapping[str, str],
    version: str | None = None,
    sequence: SequenceNumber | None = None,
) -> Request:
    """Return the request of an entry; ``extra`` are headers made anew at each send.

    ``version`` is sent as ``If-Match``, unless the entry itself has ``If-Match: *``. ``sequence``
    is its number in a strict sequence.

    ``now`` returns the server's time, for request formats that carry the submission time. Raises
    ``EntryInvalidError`` if a local id has no server id yet, or one that cannot be written there.
    """
    ids = _resolve_ids(entry, mappings)
    target = replace_in_path(entry.endpoint, ids) if ids else entry.endpoint
    headers = replace_in_headers(entry.headers, ids) if ids else dict(entry.headers)
    if version is not None and if_match_in(headers) != ANY_TAG:
        headers = without_if_match(headers) | {"If-Match": version}
    headers = without_correlation(headers) | correlation_headers(entry)
    headers[profile.key_header] = entry.idempotency_key
    if sequence is not None:
        headers[CLIENT_HEADER] = sequence.client_id
        headers[SEQUENCE_HEADER] = str(sequence.number)
    if profile.request_format is None:
        headers["X-Client-Generated-At"] = instant(entry.client_generated_at)
        body = _body(entry, ids)
    else:
        payload = replace_in_body(entry.decoded(), ids)
        # Not before it was made, even if the device's clock was set back in between.
        submitted_at = max(now(), entry.client_generated_at)
        added, value = profile.request_format.build(entry, payload, submitted_at)
        headers |= added
        body = None if value is None else msgspec.json.encode(value)
    if body is not None and not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = "application/json"
    return Request(METHODS[entry.operation], target, headers | dict(extra), body)


def correlation_headers(entry: Entry) -> dict[str, str]:
    """Return headers that connect every request about an entry with its user action.

    The entry's id, and its trace context if it has one. They are the same on every attempt, and no
    part of the fingerprint.
    """
    headers = {CORRELATION_HEADER: entry.id}
    if entry.traceparent is not None:
        headers[TRACEPARENT_HEADER] = entry.traceparent
    return headers


def without_correlation(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers without those of ``correlation_headers``, in any case of their letters."""
    return {name: value for name, value in headers.items() if name.lower() not in _CORRELATION}


def entity_path(entry: Entry, mappings: Mappings) -> str:
    """Return the path of the entity that an entry changes, without a query."""
    ids = _resolve_ids(entry, mappings)
    target = replace_in_path(entry.endpoint, ids) if ids else entry.endpoint
    return target.partition("?")[0]


def _resolve_ids(entry: Entry, mappings: Mappings) -> _Ids:
    if not entry.local_refs:
        return {}
    ids = mappings(entry.user_id, entry.local_refs)
    missing = [local_id for local_id in entry.local_refs if local_id not in ids]
    if missing:
        raise EntryInvalidError(
            "local_id_resolution_before_replay",
            f"the local id {missing[0]} has no server id yet",
        )
    return ids


def _body(entry: Entry, ids: _Ids) -> bytes | None:
    if entry.payload is None:
        return None
    if not ids:
        return entry.payload.encode()
    return msgspec.json.encode(replace_in_body(entry.decoded(), ids))


# -- the items of a batch --------------------------------------------------------------------------


class _Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request of one entry, as it is sent in a batch."""

    method: str
    path: str
    key: str
    headers: dict[str, str]
    body: msgspec.Raw | None = None
    client_id: str | None = None
    sequence: int | None = None
    # What depends on the other items: the lane, and the name that they refer to.
    lane: str | None = None
    local_id: str | None = None

    @property
    def size(self) -> int:
        """About how many bytes it takes in the batch."""
        headers = sum(len(name) + len(value) + 6 for name, value in self.headers.items())
        body = b"" if self.body is None else bytes(self.body)
        return len(self.path) + len(self.key) + headers + len(body) + _ITEM_BYTES


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
        return Request("POST", self.path, self.headers, self.body)


class RequestOf(Protocol):
    """Builds the request of an entry, with the server ids that ``mappings`` returns."""

    def __call__(
        self, claimed: Claimed, token: str | None, *, mappings: Mappings | None = None
    ) -> Request: ...


def _item_of(  # noqa: C901 - one branch for each kind of header
    request: Request, profile: Profile, *, pending: Collection[str], follows: bool
) -> tuple[_Item, dict[str, str]] | None:
    """Return the item of a request, and headers for the batch; None if it can only be sent alone.

    Items cannot have those headers, so they must be the same for all of the batch.
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
    raw = None if body is None else msgspec.Raw(body)
    return _Item(request.method, path, key, headers, raw, client_id, sequence), shared


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


# -- the entries of a batch -----------------------------------------------------------------------


class BatchMaker:
    """A batch that is being made, and what is not in it."""

    def __init__(
        self,
        queue: OutboxQueue,
        batches: Batches,
        token: str | None,
        *,
        request_of: RequestOf,
        has_to_read: Callable[[Claimed], bool],
    ) -> None:
        self._queue = queue
        self._batches = batches
        self._path, self._limit = batches.path, batches.limit
        self._token = token
        self._request_of = request_of
        self._has_to_read = has_to_read
        self._parts: list[Part] = []
        self._items: list[_Item] = []
        # Headers that all of them have.
        self._shared: dict[str, str] = {}
        self._size = 0
        # By entity: the last entry of the batch about it.
        self._last: dict[str, Claimed] = {}
        self._ids: set[str] = set()
        # The local ids that the batch creates.
        self._pending: set[str] = set()
        # Names by which items refer to others, by entry.
        self._names: dict[str, str] = {}
        self._referred: set[str] = set()
        # What later entries may wait for: of claims that are not in the batch, and that are in it.
        self._left: set[tuple[str, str]] = set()
        self._brought: set[tuple[str, str]] = set()

    @property
    def is_full(self) -> bool:
        return len(self._parts) == self._limit

    @property
    def claims(self) -> list[Claimed]:
        """The claims as they were, without what they would follow."""
        return [part.claimed for part in self._parts]

    def waits_for_others(self, claimed: Claimed) -> bool:
        """Return whether a claim has to wait for one that is not in the batch."""
        entry = claimed.entry
        if not self._left.isdisjoint(_needs(entry)):
            return True
        parents = sum(entry_id in self._ids for entry_id in entry.dependency_ids)
        parents += sum(local_id in self._pending for local_id in entry.local_refs)
        return parents < entry.waiting_for

    def leave(self, claimed: Claimed) -> None:
        self._left.update(_brings(claimed.entry))

    def item_of(self, claimed: Claimed) -> _Item | None:
        """Return the item of a claim; None if it has to be sent alone."""
        entry = claimed.entry
        profile = self._queue.profiles.get(entry.profile)
        before = self._before(claimed)
        if before is None and self._has_to_read(claimed):
            return None
        is_open = any(local_id in self._pending for local_id in entry.local_refs)
        if is_open and not isinstance(profile.request_format, TimestampsInBody | None):
            return None  # the function of the app gets server ids
        version = claimed.version if before is None else self._version_after(before)
        following = msgspec.structs.replace(claimed, version=version)
        try:
            request = self._request_of(following, self._token, mappings=self._mappings)
        except EntryInvalidError:
            return None  # sent alone, it fails for the same reason
        follows = (
            before is not None and version is not None and if_match_in(request.headers) != ANY_TAG
        )
        made = _item_of(request, profile, pending=self._pending, follows=follows)
        if made is None:
            return None
        item, shared = made
        if not self._items:
            self._shared = shared
        return item if shared == self._shared else None

    def fits(self, claimed: Claimed, item: _Item) -> bool:
        """Return whether an item can be in this batch, and not in a later one only."""
        entry, before = claimed.entry, self._before(claimed)
        if self._items and self._size + item.size > _MAX_BYTES:
            return False
        last = self._last.get(entry.entity or "")
        if last is None:
            return True
        if last.entry.lane != entry.lane:
            return False  # edits of one entity in two lanes: one after the other
        if before is None:
            # It has the version of its first send. Otherwise it is not based on what the one before
            # it will produce, whose conflict has to be resolved first.
            return entry.sent_version is not None
        if before.entry.operation is Operation.DELETE:
            return True
        # Without a version in the response before, it could not be sent.
        return self._batches.has_versions(before.entry.endpoint)

    def add(self, claimed: Claimed, item: _Item) -> None:
        entry, before = claimed.entry, self._before(claimed)
        follows = None if before is None else before.entry.endpoint
        self._parts.append(Part(claimed, follows))
        self._brought.update(_brings(entry))
        self._ids.add(entry.id)
        self._referred.update(self._pending.intersection(entry.local_refs))
        if before is not None:
            self._referred.add(self._names.get(before.entry.id, ""))
        self._items.append(item)
        self._size += item.size
        entity = _entity_of(entry)
        if entity is not None:
            self._last[entity] = claimed
        if entry.operation is Operation.CREATE and entry.local_id is not None:
            self._pending.add(entry.local_id)
            self._names[entry.id] = entry.local_id

    def is_about_the_same(self, claimed: Claimed) -> bool:
        return not self._brought.isdisjoint(_needs(claimed.entry))

    def batch(self) -> BatchRequest | None:
        """Return the request; None with fewer than two entries."""
        if self._path is None or len(self._parts) < _LEAST_ENTRIES:
            return None
        lanes = _lanes([part.claimed.entry for part in self._parts])
        # Only what others refer to.
        names = [
            name if name in self._referred else None
            for name in (self._names.get(part.claimed.entry.id) for part in self._parts)
        ]
        items = [
            msgspec.structs.replace(item, lane=lane, local_id=name)
            for item, lane, name in zip(self._items, lanes, names, strict=True)
        ]
        body = msgspec.json.encode({"items": items})
        headers = {"content-type": "application/json"} | self._shared
        return BatchRequest(self._path, headers, body, self._parts, self._token)

    def _before(self, claimed: Claimed) -> Claimed | None:
        """Return the entry of the batch whose version a claim is sent with."""
        before = self._last.get(claimed.entry.entity or "")
        return before if before is not None and is_next_of(claimed, before) else None

    def _version_after(self, before: Claimed) -> str | None:
        if before.entry.operation is Operation.DELETE:
            return None
        entry_id = before.entry.id
        if entry_id not in self._names:
            self._names[entry_id] = entry_id if is_local_id(entry_id) else new_uuid4()
        return f"{{version:{self._names[entry_id]}}}"

    def _mappings(self, user_id: str, local_ids: Iterable[str]) -> Mapping[str, str | int]:
        wanted = list(local_ids)
        known = self._queue.mappings(user_id, wanted)
        pending = {
            local_id: f"{{local:{local_id}}}" for local_id in wanted if local_id in self._pending
        }
        return pending | known


def sendable(claims: list[Claimed]) -> tuple[list[Claimed], list[Claimed]]:
    """Split claims into those that can be sent one by one, and those that wait for another."""
    sendable: list[Claimed] = []
    waiting: list[Claimed] = []
    lanes: set[str | None] = set()
    for claimed in claims:
        if claimed.entry.waiting_for or claimed.entry.lane in lanes:
            waiting.append(claimed)
            lanes.add(claimed.entry.lane)
            lanes.discard(None)
        else:
            sendable.append(claimed)
    return sendable, waiting


def _entity_of(entry: Entry) -> str | None:
    if entry.operation is not Operation.CREATE:
        return entry.entity
    return None if entry.local_id is None else f"{entry.entity_type}/{entry.local_id}"


def _brings(entry: Entry) -> set[tuple[str, str]]:
    """Return the names that later entries may wait for."""
    found = {("entry", entry.id)}
    found |= {
        (kind, name)
        for kind, name in (
            ("lane", entry.lane),
            ("chain", entry.chain),
            ("entity", _entity_of(entry)),
            ("local", entry.local_id if entry.operation is Operation.CREATE else None),
        )
        if name is not None
    }
    return found


def _needs(entry: Entry) -> set[tuple[str, str]]:
    """Return the names that an entry waits for, in the words of ``_brings``."""
    found = {("entry", entry_id) for entry_id in entry.dependency_ids}
    found |= {("local", local_id) for local_id in entry.local_refs}
    found |= {
        (kind, name)
        for kind, name in (
            ("lane", entry.lane),
            ("chain", entry.chain),
            ("entity", entry.entity),
        )
        if name is not None
    }
    return found


def _lanes(entries: Sequence[Entry]) -> list[str | None]:
    """Return the lane of each item: after one that did not succeed the rest of its lane is skipped.

    Entries share one if they are of one lane or chain, or depend on each other; references to
    local ids are found by the server. One that shares with no other has none.
    """
    groups: dict[tuple[str, str], int] = {}
    parents = list(range(len(entries)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    positions = {entry.id: index for index, entry in enumerate(entries)}
    for index, entry in enumerate(entries):
        for kind, name in (("lane", entry.lane), ("chain", entry.chain)):
            if name is not None:
                parents[root(index)] = root(groups.setdefault((kind, name), index))
        for entry_id in entry.dependency_ids:
            if entry_id in positions:
                parents[root(index)] = root(positions[entry_id])
    roots = [root(index) for index in range(len(entries))]
    sizes: dict[int, int] = {}
    for each in roots:
        sizes[each] = sizes.get(each, 0) + 1
    return [str(each) if sizes[each] > 1 else None for each in roots]


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
