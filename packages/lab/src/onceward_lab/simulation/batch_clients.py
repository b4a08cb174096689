"""Clients that send batches, without an outbox: cut, doubled, overlapping, mixed with single sends.

A client sends what it has no result of, one request at a time, until everything has one. Two
clients of a user may have the same items, in opposite order.
"""

from functools import partial
from random import Random
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from onceward.batch.options import BatchOptions
from onceward_lab.history import Expect
from onceward_lab.simulation.batches import BATCH_PATH, results_of
from onceward_lab.simulation.faults import Faults
from onceward_lab.simulation.loop import NO_PROCESS, VirtualLoop
from onceward_lab.simulation.network import ELSEWHERE, Network
from onceward_lab.simulation.user_actions import PlannedAction, make_uuid
from onceward_outbox.transport import NoResponse, Request, Response

__all__ = ["BatchClient", "BatchClients", "BatchWorld", "batch_options"]

_PAUSE_SECONDS: Final = 5.0
_SINGLE_SHARE: Final = 0.25
_REPEAT_SHARE: Final = 0.2
_HOSTILE_SHARE: Final = 0.1
_AGAIN_SHARE: Final = 0.5
_REFUSED_SHARE: Final = 0.15
_START_SECONDS: Final = 60.0
_OK: Final = range(200, 300)
_BAD_REQUEST: Final = 400
_SKIPPED: Final = 424
_TOO_LARGE: Final = 413
# Another attempt may get another response.
_TEMPORARY: Final = frozenset({401, 403, 408, _SKIPPED, 425, 429, *range(500, 600)})
_IN_PROGRESS: Final = frozenset({"IDEMPOTENCY_IN_PROGRESS", "idempotency.in_progress"})
_MISMATCH: Final = frozenset({"IDEMPOTENCY_CONFLICT", "idempotency.payload_mismatch"})
# Each of them must be refused, and must not affect the items around it.
_HOSTILE: Final[tuple[dict[str, Any], ...]] = (
    {"method": "POST", "path": BATCH_PATH, "body": {"items": []}},
    {"method": "GET", "path": "/notes/1"},
    {"method": "POST", "path": "//elsewhere.example/notes", "body": {}},
    {"method": "POST", "path": "https://elsewhere.example/notes", "body": {}},
    {"method": "POST", "path": "/unguarded", "body": {}},
    {"method": "POST", "path": "/notes", "headers": {"Authorization": "Bearer u0a"}, "body": {}},
    {"method": "POST", "path": "/notes/{local:00000000-0000-4000-8000-000000000000}", "body": {}},
)


class BatchWorld(Protocol):
    """The parts of the world that clients use."""

    loop: VirtualLoop
    faults: Faults
    network: Network
    errors: list[str]
    actions: dict[str, PlannedAction]

    def now(self) -> Any:
        """Return the true time."""

    def note(self, source: str, event: str) -> None:
        """Append an event to the timeline."""


def batch_options(rng: Random) -> BatchOptions:
    """Return the options of one world: small chunks, and results that end early, are frequent."""
    return BatchOptions(
        path=BATCH_PATH,
        chunk_items=rng.choice((None, 2, 3)),
        max_response_bytes=rng.choice((4 * 1024 * 1024, 4 * 1024 * 1024, 900)),
    )


class BatchAction(NamedTuple):
    """One item of a client, and the item with the note that it changes."""

    action: PlannedAction
    parent: "BatchAction | None"
    lane: str | None


class BatchClients:
    """The clients of one world."""

    def __init__(self, world: BatchWorld, rng: Random) -> None:
        self._world = world
        items = _plan(rng, f"{ELSEWHERE}-b0", "b0")
        self.clients = [BatchClient(world, items, Random(rng.getrandbits(64)))]  # noqa: S311
        # Without lanes and notes, every order is as good.
        loose = [item for item in items if item.lane is None and item.action.kind != "change"]
        if loose and rng.random() < 0.5:  # noqa: PLR2004
            other = Random(rng.getrandbits(64))  # noqa: S311
            self.clients.append(BatchClient(world, loose[::-1], other))
        self._items = items

    def schedule(self) -> None:
        """Start all clients at random times, close to each other."""
        for item in self._items:
            item.action.acknowledged = True
            if item.action.kind == "step":
                item.action.payload["clientGeneratedAt"] = self._world.now().isoformat()
            self._world.actions[item.action.id] = item.action
        for client in self.clients:
            seconds = self._items[0].action.at + 2.0 * client.random()
            self._world.loop.call_later(seconds, client.send_next, context=NO_PROCESS.copy())

    @property
    def is_done(self) -> bool:
        """True once every item of every client has a result."""
        return all(client.is_done for client in self.clients)

    def expire(self) -> None:
        """Give up what has no result: the keys are forgotten."""
        for client in self.clients:
            client.expire()

    def unfinished(self) -> list[str]:
        """Return the requests without a result, one line each."""
        return [
            f"{len(client.open_items)} items of a client of batches have no result"
            for client in self.clients
            if client.open_items
        ]


class BatchClient:
    """One client: it sends its items in order until each has a result."""

    def __init__(self, world: BatchWorld, items: list[BatchAction], rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._items = items
        # By action, once it has a result; that of a success is the id and version of its note.
        self._results: dict[str, dict[str, Any] | None] = {}
        # Notes that a restored backup had lost, and that were made again with another id.
        self._remade: set[str] = set()
        self._request = 0
        self._is_repeated = False

    def random(self) -> float:
        """Return a number between 0 and 1."""
        return self._rng.random()

    @property
    def open_items(self) -> list[BatchAction]:
        """The items without a result."""
        return [item for item in self._items if item.action.id not in self._results]

    @property
    def is_done(self) -> bool:
        """True if it sends nothing more."""
        return not self.open_items and (self._is_repeated or self._world.faults.is_stopped)

    def expire(self) -> None:
        """Give up the items without a result: each has one effect or none."""
        for item in self.open_items:
            if item.action.expect is Expect.EFFECT:
                item.action.expect = Expect.EITHER
            self._results[item.action.id] = None
        self._is_repeated = True
        self._request += 1  # a response of before does not count

    def send_next(self) -> None:
        """Send some of the items without a result, or, once, some that have one."""
        todo = self.open_items
        if not todo:
            if not self._is_repeated and self._rng.random() < _AGAIN_SHARE:
                todo = self._repeatable()
            self._is_repeated = True
        if not todo:
            return
        chosen = todo[: self._rng.randint(1, len(todo))]
        if self._rng.random() < _SINGLE_SHARE:
            self._send_single(chosen[0])
        else:
            self._send_batch(chosen)

    def _repeatable(self) -> list[BatchAction]:
        """Return items that have happened, as a device sends them that was set up from a backup."""
        return [item for item in self._items if self._results[item.action.id] is not None]

    # -- requests ---------------------------------------------------------------------------------

    def _send_single(self, item: BatchAction) -> None:
        parts = self._parts(item, frozenset())
        action = item.action
        headers = {
            "Idempotency-Key": action.key or "",
            "Authorization": f"Bearer {action.user}",
            "Content-Type": "application/json",
            **parts["headers"],
        }
        body = msgspec.json.encode(parts["body"])
        request = Request(parts["method"], parts["path"], headers, body)
        self._request += 1
        self._world.network.send(ELSEWHERE, request, partial(self._on_single, self._request, item))

    def _send_batch(self, chosen: list[BatchAction]) -> None:
        items: list[tuple[BatchAction | None, dict[str, Any]]] = []
        before: set[str] = set()
        for item in chosen:
            items.append((item, self._parts(item, before)))
            before.add(item.action.id)
        if self._rng.random() < _REPEAT_SHARE:  # one key twice, after its first place
            place = self._rng.randrange(len(items))
            items.append(items[place])
        if self._rng.random() < _HOSTILE_SHARE:
            place = self._rng.randint(0, len(items))
            items.insert(place, (None, self._rng.choice(_HOSTILE)))
        headers = {
            "Authorization": f"Bearer {chosen[0].action.user}",
            "Content-Type": "application/json",
        }
        body = msgspec.json.encode({"items": [parts for _, parts in items]})
        request = Request("POST", BATCH_PATH, headers, body)
        self._request += 1
        sent = [item for item, _ in items]
        self._world.network.send(ELSEWHERE, request, partial(self._on_batch, self._request, sent))

    def _parts(self, item: BatchAction, before: "frozenset[str] | set[str]") -> dict[str, Any]:
        """Return an item as JSON, with placeholders for what ``before`` makes."""
        action, parent = item.action, item.parent
        parts: dict[str, Any] = {
            "method": "PATCH" if action.kind == "change" else "POST",
            "path": "/steps" if action.kind == "step" else "/notes",
            "key": action.key,
            "headers": {},
            "body": action.payload,
        }
        if item.lane is not None:
            parts["lane"] = item.lane
        if parent is not None:
            note = parent.action
            parts["local_id"] = note.local_id
            if note.id in before:
                parts["path"] = f"/notes/{{local:{note.local_id}}}"
            else:
                known = self._results[note.id] or {}
                parts["path"] = f"/notes/{known.get('id', 0)}"
            parts["headers"] = {"If-Match": self._version(item, before)}
        elif action.local_id is not None:
            parts["local_id"] = action.local_id
        return parts

    def _version(self, item: BatchAction, before: "frozenset[str] | set[str]") -> str:
        """Return the version that the item before has produced: its own, or a placeholder."""
        place = next(number for number, other in enumerate(self._items) if other is item)
        earlier = [i for i in self._items[:place] if item.parent in (i, i.parent)]
        # What was refused has produced none.
        earlier = [i for i in earlier if self._results.get(i.action.id, {}) is not None]
        last = earlier[-1].action if earlier else item.action
        if last.id in before:
            assert item.parent is not None  # noqa: S101 - it has a version
            return f"{{version:{item.parent.action.local_id}}}"
        known = self._results.get(last.id) or {}
        return f'"{known.get("version", 0)}"'

    # -- responses --------------------------------------------------------------------------------

    def _on_single(self, number: int, item: BatchAction, response: Response | NoResponse) -> None:
        if number != self._request:
            return
        self._request += 1
        if isinstance(response, Response):
            self._take(item, response)
        self._continue(None)

    def _on_batch(
        self, number: int, sent: list[BatchAction | None], response: Response | NoResponse
    ) -> None:
        if number != self._request:
            return
        self._request += 1
        after: float | None = None
        if isinstance(response, Response) and response.status in _OK:
            try:
                results, after = results_of(response)
            except msgspec.DecodeError as error:
                self._world.errors.append(f"a batch got an unreadable response: {error}")
                return
            if not results or len(results) > len(sent):
                self._world.errors.append(
                    f"a batch of {len(sent)} items got {len(results)} results"
                )
            if len(results) < len(sent) and after is None:
                self._world.errors.append("results end early, and retry_after is null")
            for item, result in zip(sent, results, strict=False):
                if item is not None:
                    self._take(item, result)
                elif result.status != _BAD_REQUEST:
                    self._world.errors.append(f"a malformed item got {result.status}")
        elif isinstance(response, Response) and _is_refusal(response):
            self._world.errors.append(f"a batch got {response.status}: {response.error_body}")
        self._continue(after)

    def _continue(self, after: float | None) -> None:
        seconds = (after or 0.0) + _PAUSE_SECONDS * self._rng.random()
        self._world.loop.call_later(seconds, self.send_next, context=NO_PROCESS.copy())

    def _take(self, item: BatchAction, result: Response) -> None:
        """Note the result of an item, unless it is temporary."""
        action = item.action
        if result.status in _TEMPORARY or result.code in _IN_PROGRESS:
            return
        body = result.json()
        is_success = result.status in _OK and isinstance(body, dict)
        # A change of a note that was made again is another request: it has another path.
        # A batch that ran during a restore may have sent the id that was lost.
        is_remade = item.parent is not None and (
            item.parent.action.id in self._remade
            or self._world.network.was_around_restore(action.key or "")
        )
        if result.code in _MISMATCH and not is_remade:
            self._world.errors.append(f"{action.id} got {result.code} for its own request")
        if action.id in self._results:
            known = self._results[action.id]
            if known is not None and is_success and body.get("id") != known.get("id"):
                self._remade.add(action.id)
            return
        self._results[action.id] = body if is_success else None
        self._world.note(action.device, f"{action.id} has its result: {result.status}")
        if not is_success and action.kind == "note":
            for other in self._items:  # they change a note that does not exist
                if other.parent is item:
                    self._results[other.action.id] = None


def _is_refusal(response: Response) -> bool:
    """Return whether the server has refused a batch; a proxy may do so on purpose."""
    return response.status in {_BAD_REQUEST, _TOO_LARGE} and response.code != "unavailable"


# -- the plan -------------------------------------------------------------------------------------


def _plan(rng: Random, device: str, user: str) -> list[BatchAction]:
    """Return the items of one user: notes with their changes, and steps."""
    at = _START_SECONDS * rng.random()
    lane = rng.choice((None, "lane"))
    items: list[BatchAction] = []
    for _ in range(rng.randint(2, 4)):
        own_lane = lane if rng.random() < 0.8 else None  # noqa: PLR2004
        kind = rng.choice(("note", "note", "step"))
        first = _item(rng, device, user, at, kind, len(items), None, own_lane)
        items.append(first)
        for _ in range(rng.choice((0, 0, 1, 2)) if kind == "note" else 0):
            items.append(_item(rng, device, user, at, "change", len(items), first, own_lane))
    return items


def _item(  # noqa: PLR0917
    rng: Random,
    device: str,
    user: str,
    at: float,
    kind: str,
    position: int,
    parent: BatchAction | None,
    lane: str | None,
) -> BatchAction:
    action = PlannedAction(
        id=f"{device}-{position}",
        device=device,
        user=user,
        at=at,
        kind=kind,
        position=position,
        key=make_uuid(rng),
        payload={"action_id": f"{device}-{position}", "what": {"deep": {"n": rng.randint(0, 99)}}},
        first_try=True,
        is_direct=True,
        batch_lane=lane,
    )
    if parent is not None:
        action.note = parent.action.local_id
        action.expect = parent.action.expect
    elif rng.random() < _REFUSED_SHARE:
        action.payload["refuse"] = True
        action.expect = Expect.REFUSAL
    if kind == "note":
        action.local_id = make_uuid(rng)
    return BatchAction(action, parent, lane)
