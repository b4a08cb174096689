"""Send several entries in one request, and turn its results into responses to each of them.

::

    claims ──▶ assemble ──▶ one POST ──▶ receive ──▶ a response each  ──▶ Sender.receive
                  │                         │
                  └─ what has to go alone   └─ not sent, unknown, or to be sent alone

What a result means for its entry is decided where a single response is: in ``Sender.receive``.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from onceward_outbox.batch_offer import Batches
from onceward_outbox.batch_request import (
    MAX_BYTES,
    BatchRequest,
    Item,
    Part,
    encode,
    item_of,
    read_results,
    version_name,
)
from onceward_outbox.drain_state import DrainState
from onceward_outbox.entry import Claimed, Entry
from onceward_outbox.errors import EntryInvalidError
from onceward_outbox.events import EventKind
from onceward_outbox.outage import SERVER, TOO_MANY, Outages, is_outage, path_template
from onceward_outbox.outcome import AttemptResult, Outcome, Released, RetryLater
from onceward_outbox.profile import TimestampsInBody
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.sender import Sender
from onceward_outbox.transport import NoResponse, Request, Response
from onceward_outbox.versions import is_next_of
from onceward_protocol.ids import new_uuid4
from onceward_protocol.local_ids import is_local_id
from onceward_protocol.operation import Operation
from onceward_protocol.response_classification import AttestationNeeded
from onceward_protocol.retry import is_transient
from onceward_protocol.versions import ANY_TAG, if_match_in

__all__ = ["Assembled", "BatchSender", "Received", "sendable"]

_log = logging.getLogger(__name__)

_SKIPPED: Final = frozenset({"batch.skipped", "BATCH_SKIPPED"})
_OK, _BAD_REQUEST, _UNAUTHORIZED, _TOO_LARGE, _SKIPPED_STATUS = 200, 400, 401, 413, 424
_SERVER_ERROR: Final = 500
_MISSING: Final = frozenset({404, 405})
_LEAST_ENTRIES: Final = 2


class Assembled(NamedTuple):
    """A batch made of some claims."""

    # None if fewer than two entries could be in it.
    batch: BatchRequest | None
    # Claims that have to be sent alone, and could be now.
    alone: list[Claimed]
    # Claims that wait for others that are not in the batch, or did not fit.
    left: list[Claimed]


class Received(NamedTuple):
    """What came of a batch."""

    # For each entry its response, or its outcome if it has none.
    results: list[tuple[Claimed, Response | Outcome]]
    # When to send the rest, if the server has said so.
    pause_seconds: float = 0.0


class BatchSender:
    """Makes batches of claims, and reads their responses."""

    def __init__(
        self, queue: OutboxQueue, sender: Sender, batches: Batches, outages: Outages
    ) -> None:
        self._queue = queue
        self._sender = sender
        self._batches = batches
        self._outages = outages

    # ------------------------------------------------------------------ before the send

    def assemble(self, claims: Iterable[Claimed], state: DrainState) -> Assembled:
        """Make a batch of claims, in their order. Raises what the app's functions raise."""
        claims = list(claims)
        path, limit = self._batches.path, self._batches.limit
        token, is_signed_in = self._sender.token_of(claims[0].entry.user_id)
        alone: list[Claimed] = []
        left: list[Claimed] = []
        making = _Making(self._queue, self._sender, self._batches, token)
        for claimed in claims:
            if making.waits_for_others(claimed):
                left.append(claimed)
                making.leave(claimed)
            elif not is_signed_in or self._is_alone(claimed):
                alone.append(claimed)
                making.leave(claimed)
            elif making.count == limit:
                left.append(claimed)
                making.leave(claimed)
            else:
                item = making.item_of(claimed)
                if item is not None and making.fits(claimed, item):
                    making.add(claimed, item)
                    continue
                (alone if item is None else left).append(claimed)
                making.leave(claimed)
        alone, waiting = sendable(alone)
        left += waiting
        if path is None or making.count < _LEAST_ENTRIES:
            # The caller sends them one by one.
            batched, behind = sendable(making.claims)
            return Assembled(None, _sorted_as(claims, [*batched, *alone]), [*left, *behind])
        # They are sent after the batch, unless they are about the same as something in it.
        about = set().union(*(_brings(claimed.entry) for claimed in making.claims))
        left += [claimed for claimed in alone if not about.isdisjoint(_needs(claimed.entry))]
        alone = [claimed for claimed in alone if about.isdisjoint(_needs(claimed.entry))]
        batch = making.batch(path)
        self._sender.begin_batch((part.claimed for part in batch.parts), state)
        return Assembled(batch, alone, left)

    def _is_alone(self, claimed: Claimed) -> bool:
        entry = claimed.entry
        return (
            entry.forced
            or self._batches.is_alone(entry.id, entry.endpoint)
            or self._outages.probed_by(entry.endpoint) is not None
        )

    # ------------------------------------------------------------------ after the send

    def receive(
        self, batch: BatchRequest, result: Response | NoResponse, state: DrainState
    ) -> Received:
        """Return what came of a batch, in the order of its entries."""
        self._sender.reach("drain.after_send")
        if isinstance(result, NoResponse):
            if result.may_have_been_sent:
                self._batches.shrink(len(batch.parts))
                self._note_sent(batch.parts, state, result.reason)
            claims = [part.claimed for part in batch.parts]
            return _received(batch.parts, self._sender.no_response_to_batch(claims, state, result))
        if result.status == _OK:
            return self._results(batch, result, state)
        return self._refused(batch, result, state)

    def abandon(self, batch: BatchRequest, state: DrainState) -> Received:
        """Return the outcomes of entries whose batch the drain has no time to wait for."""
        state.report.sent += len(batch.parts)
        outcomes = [self._sender.abandon(part.claimed) for part in batch.parts]
        return _received(batch.parts, outcomes)

    def _results(self, batch: BatchRequest, response: Response, state: DrainState) -> Received:
        found = read_results(response, len(batch.parts))
        if found is None:
            return self._malformed(batch, response, state)
        self._batches.grow()
        results: list[tuple[Claimed, Response | Outcome]] = []
        seen: set[str] = set()
        has_failure = False
        for part, each in zip(batch.parts, found.responses, strict=False):
            if not _is_skipped(each):
                has_failure |= each.status >= _BAD_REQUEST
            elif not has_failure:
                # There is no reason to skip it: in each further batch it could be skipped again.
                self._batches.send_alone(part.claimed.entry.id)
            results.append((part.claimed, self._result(part, each, state, seen)))
        for part in batch.parts[len(results) :]:
            state.note_received(part.claimed.entry.id)
            results.append((part.claimed, _unsent("the server did not get to it")))
        return Received(results, found.retry_after_seconds)

    def _result(
        self, part: Part, response: Response, state: DrainState, seen: set[str]
    ) -> Response | Outcome:
        """Return the response to an entry, or its outcome if it was not run or is a repetition."""
        claimed = part.claimed
        entry, status = claimed.entry, response.status
        if _is_skipped(response):
            state.note_received(entry.id)
            return _unsent("an entry before it in the batch did not succeed")
        if status == _BAD_REQUEST:
            return self._send_alone(part, response, state)
        state.report.sent += 1
        key = self._pauses(entry, response)
        if key is not None:
            if key in seen:
                return self._sender.receive_again(claimed, state, response)
            seen.add(key)
        return response

    def _pauses(self, entry: Entry, response: Response) -> str | None:
        """Return what a response pauses: the sign-in, the server or an endpoint."""
        if is_outage(response):
            return path_template(entry.endpoint) if response.status == TOO_MANY else SERVER
        if response.status != _UNAUTHORIZED:
            return None
        codes = self._queue.profiles.get(entry.profile).codes
        if isinstance(codes.get(response.code or ""), AttestationNeeded):
            # The server may not take this header in a batch.
            self._batches.send_alone(entry.id)
            return None
        return "sign-in"

    def _send_alone(self, part: Part, response: Response, state: DrainState) -> Outcome:
        """Release an entry that may be refused in a batch only: its own response counts."""
        entry = part.claimed.entry
        state.note_received(entry.id)
        _log.info(
            "entry %s is sent again: in a batch the server responded 400 (%s)",
            entry.id,
            response.code,
        )
        if part.follows is not None:
            # Most likely the response of the one before it had no version.
            self._batches.note_version(part.follows, is_known=False)
        else:
            self._batches.send_alone(entry.id)
        return _unsent("the server does not take it in this batch: it is sent alone")

    def _malformed(self, batch: BatchRequest, response: Response, state: DrainState) -> Received:
        """Retry all: what has happened is not known. Smaller batches have smaller responses."""
        self._batches.shrink(len(batch.parts))
        self._note_sent(batch.parts, state, "the response is not that of a batch")
        claims = [part.claimed for part in batch.parts]
        outcomes = self._sender.foreign_response_to_batch(claims, state, response)
        return _received(batch.parts, outcomes)

    def _refused(self, batch: BatchRequest, response: Response, state: DrainState) -> Received:
        """Return the outcomes of entries whose batch as a whole got another response than 200."""
        claims = [part.claimed for part in batch.parts]
        status, sender = response.status, self._sender
        sender.learn_time_of(response, claims[0].entry, state)
        if is_outage(response):
            self._note_sent(batch.parts, state, str(status))
            return _received(batch.parts, sender.outage_of_batch(claims, state, response))
        if status >= _SERVER_ERROR or is_transient(status):
            return self._failed(batch, response, state)
        # In all other cases no item was run.
        if status == _UNAUTHORIZED:
            outcomes = sender.sign_in_for_batch(claims, state, response, batch.token)
            return _received(batch.parts, outcomes)
        if status in _MISSING:
            _log.warning("%s of %s: entries are sent one by one", status, batch.path)
            self._batches.forget_offer()
        elif status == _TOO_LARGE:
            self._batches.shrink(len(claims), for_good=True)
        else:
            _log.warning(
                "the server responded %d (%s) to a batch of %d entries: they are sent one by one",
                status,
                response.code,
                len(claims),
            )
            for claimed in claims:
                self._batches.send_alone(claimed.entry.id)
        for claimed in claims:
            state.note_received(claimed.entry.id)
        outcome = _unsent(f"the server responded {status} to the batch")
        return _received(batch.parts, [outcome for _ in claims])

    def _failed(self, batch: BatchRequest, response: Response, state: DrainState) -> Received:
        """Retry after a server error of the batch itself, which is none of an entry."""
        self._batches.shrink(len(batch.parts))
        self._note_sent(batch.parts, state, str(response.status))
        # The code says that it does not count against any of them.
        result = AttemptResult(
            response.status, "unrecognised", response.request_id, response.error_body
        )
        outcomes = self._sender.retry_batch(
            [part.claimed for part in batch.parts],
            state,
            result,
            retry_after_seconds=self._sender.retry_after_of(response),
        )
        return _received(batch.parts, outcomes)

    def _note_sent(self, parts: Sequence[Part], state: DrainState, detail: str) -> None:
        state.report.sent += len(parts)
        for part in parts:
            self._queue.emit_about(EventKind.SENT, part.claimed.entry, detail=detail)


class _Making:
    """A batch that is being made, and what is not in it."""

    def __init__(
        self, queue: OutboxQueue, sender: Sender, batches: Batches, token: str | None
    ) -> None:
        self._queue = queue
        self._sender = sender
        self._batches = batches
        self._token = token
        self._parts: list[Part] = []
        self._items: list[Item] = []
        self._size = 0
        # By entity: the last entry of the batch about it.
        self._last: dict[str, Claimed] = {}
        self._ids: set[str] = set()
        # The local ids that the batch creates.
        self._pending: set[str] = set()
        # Names by which items refer to others, by entry.
        self._names: dict[str, str] = {}
        self._referred: set[str] = set()
        # Of claims that are not in the batch.
        self._left: set[tuple[str, str]] = set()

    @property
    def count(self) -> int:
        return len(self._parts)

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
        """Note that a claim is not in the batch."""
        self._left.update(_brings(claimed.entry))

    def item_of(self, claimed: Claimed) -> Item | None:
        """Return the item of a claim; None if it has to be sent alone."""
        entry = claimed.entry
        profile = self._queue.profiles.get(entry.profile)
        before = self._before(claimed)
        if before is None and self._sender.has_to_read(claimed):
            return None
        is_open = any(local_id in self._pending for local_id in entry.local_refs)
        if is_open and not isinstance(profile.request_format, TimestampsInBody | None):
            return None  # the function of the app gets server ids
        version = claimed.version if before is None else self._version_after(before)
        following = msgspec.structs.replace(claimed, version=version)
        try:
            request = self._sender.request_of(following, self._token, mappings=self._mappings)
        except EntryInvalidError:
            return None  # sent alone, it fails for the same reason
        follows = before is not None and version is not None and _has_version(request)
        item = item_of(request, profile, pending=self._pending, follows=follows)
        is_other = item is not None and bool(self._items) and item.shared != self._items[0].shared
        return None if is_other else item

    def fits(self, claimed: Claimed, item: Item) -> bool:
        """Return whether an item can be in this batch, and not in a later one only."""
        entry, before = claimed.entry, self._before(claimed)
        if self._items and self._size + item.size > MAX_BYTES:
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

    def add(self, claimed: Claimed, item: Item) -> None:
        """Add an item to the batch."""
        entry, before = claimed.entry, self._before(claimed)
        follows = None if before is None else before.entry.endpoint
        self._parts.append(Part(claimed, follows))
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

    def batch(self, path: str) -> BatchRequest:
        """Return the request."""
        lanes = _lanes([part.claimed.entry for part in self._parts])
        # Only what others refer to.
        names = [
            name if name in self._referred else None
            for name in (self._names.get(part.claimed.entry.id) for part in self._parts)
        ]
        body = encode(zip(self._items, lanes, names, strict=True))
        headers = {"content-type": "application/json"} | self._items[0].shared
        return BatchRequest(path, headers, body, self._parts, self._token)

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
        return version_name(self._names[entry_id])

    def _mappings(self, user_id: str, local_ids: Iterable[str]) -> Mapping[str, str | int]:
        wanted = list(local_ids)
        known = self._queue.mappings(user_id, wanted)
        pending = {
            local_id: f"{{local:{local_id}}}" for local_id in wanted if local_id in self._pending
        }
        return pending | known


def _sorted_as(claims: list[Claimed], some: list[Claimed]) -> list[Claimed]:
    """Return some of the claims in the order of all."""
    ids = {claimed.entry.id for claimed in some}
    return [claimed for claimed in claims if claimed.entry.id in ids]


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


def _has_version(request: Request) -> bool:
    return if_match_in(request.headers) != ANY_TAG


def _is_skipped(response: Response) -> bool:
    """Return whether the server has not run an item, because one before it has failed."""
    return response.status == _SKIPPED_STATUS and response.code in _SKIPPED


def _unsent(why: str) -> Released:
    return Released(AttemptResult(error=why), sent=False)


def _received(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> Received:
    """Return outcomes; which version the followers of others were sent with is not known."""
    return Received(
        [
            (
                part.claimed,
                msgspec.structs.replace(outcome, keeps_version=False)
                if part.follows is not None and isinstance(outcome, RetryLater)
                else outcome,
            )
            for part, outcome in zip(parts, outcomes, strict=True)
        ]
    )


def _entity_of(entry: Entry) -> str | None:
    if entry.operation is not Operation.CREATE:
        return entry.entity
    return None if entry.local_id is None else f"{entry.entity_type}/{entry.local_id}"


def _brings(entry: Entry) -> set[tuple[str, str]]:
    """Return what later entries may wait for."""
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
    """Return what an entry waits for, in the words of ``_brings``."""
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
