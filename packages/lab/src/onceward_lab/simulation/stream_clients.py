"""Clients with strict sequences: one stream of numbered requests, single and in batches.

As the protocol has it: a request is numbered when it is first sent, an unknown outcome keeps its
number and holds the stream, and after a violation the details decide. Some users abandon a request
whose outcome is unknown; the stream has to go on without it.
"""

from functools import partial
from random import Random
from typing import Any, Final

import msgspec

from onceward_lab.history import Expect
from onceward_lab.simulation.batch_clients import BatchWorld
from onceward_lab.simulation.batches import BATCH_PATH, results_of
from onceward_lab.simulation.loop import NO_PROCESS
from onceward_lab.simulation.network import ELSEWHERE
from onceward_lab.simulation.user_actions import PlannedAction, make_uuid
from onceward_outbox.transport import NoResponse, Request, Response

__all__ = ["STRICT_PATH", "StreamClient"]

STRICT_PATH: Final = "/moves"
_USER: Final = "s0"
_PAUSE_SECONDS: Final = 4.0
_START_SECONDS: Final = 60.0
_BATCH_SHARE: Final = 0.5
_ABANDONED_SHARE: Final = 0.15
_REFUSED_SHARE: Final = 0.15
_OK: Final = range(200, 300)
_VIOLATION: Final = "sequence.violation"
_SKIPPED: Final = 424
_TEMPORARY: Final = frozenset({401, 403, 408, _SKIPPED, 425, 429, *range(500, 600)})
_IN_PROGRESS: Final = "idempotency.in_progress"


class StreamClient:
    """One stream of one user."""

    def __init__(self, world: BatchWorld, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self.client_id = f"phone-{rng.randint(0, 9)}"
        at = _START_SECONDS * rng.random()
        self._items = [self._plan(number, at) for number in range(rng.randint(3, 7))]
        # Those without a result.
        self._open = list(self._items)
        # The number after the last one whose use was acknowledged.
        self._next = 1
        # Of requests that were sent and may have run.
        self._numbers: dict[str, int] = {}
        # The numbers that refusals have used up.
        self.refused: set[int] = set()
        self._request = 0

    def _plan(self, position: int, at: float) -> PlannedAction:
        name = f"{ELSEWHERE}-{_USER}-{position}"
        action = PlannedAction(
            id=name,
            device=f"{ELSEWHERE}-{_USER}",
            user=_USER,
            at=at,
            kind="move",
            position=position,
            key=make_uuid(self._rng),
            payload={"action_id": name, "what": {"deep": {"n": position}}},
            first_try=True,
            is_direct=True,
            batch_lane=self.client_id,
        )
        if self._rng.random() < _REFUSED_SHARE:
            action.payload["refuse"] = True
            action.expect = Expect.REFUSAL
        return action

    @property
    def is_done(self) -> bool:
        """True if it sends nothing more."""
        return not self._open

    def schedule(self) -> None:
        """Start at the planned time."""
        for action in self._items:
            action.acknowledged = True
            self._world.actions[action.id] = action
        self._later(self._items[0].at)

    def unfinished(self) -> list[str]:
        """Return the requests without a result, in one line."""
        return [f"{len(self._open)} requests of a stream have no result"] if self._open else []

    def expire(self) -> None:
        """Give up what has no result: the keys are forgotten."""
        for action in self._open:
            _give_up(action)
        self._open = []
        self._request += 1  # a response of before does not count

    def send_next(self) -> None:
        """Send the next requests of the stream, or again those whose outcome is unknown."""
        if not self._open:
            return
        count = max(1, sum(action.id in self._numbers for action in self._open))
        if self._rng.random() < _BATCH_SHARE:
            count = max(count, self._rng.randint(1, len(self._open)))
        chosen = self._open[:count]
        number = self._next
        for action in chosen:
            number = self._numbers.setdefault(action.id, number) + 1
        self._request += 1
        if len(chosen) == 1:
            self._send_single(chosen[0])
        else:
            self._send_batch(chosen)

    def _send_single(self, action: PlannedAction) -> None:
        headers = {
            "Idempotency-Key": action.key or "",
            "Authorization": f"Bearer {_USER}",
            "Content-Type": "application/json",
            "X-Client-ID": self.client_id,
            "X-Sequence": str(self._numbers[action.id]),
        }
        request = Request("POST", STRICT_PATH, headers, msgspec.json.encode(action.payload))
        receive = partial(self._receive, self._request, [action])
        self._world.network.send(ELSEWHERE, request, receive)

    def _send_batch(self, chosen: list[PlannedAction]) -> None:
        items = [
            {
                "method": "POST",
                "path": STRICT_PATH,
                "key": action.key,
                "body": action.payload,
                "client_id": self.client_id,
                "sequence": self._numbers[action.id],
            }
            for action in chosen
        ]
        headers = {"Authorization": f"Bearer {_USER}", "Content-Type": "application/json"}
        request = Request("POST", BATCH_PATH, headers, msgspec.json.encode({"items": items}))
        receive = partial(self._receive, self._request, chosen)
        self._world.network.send(ELSEWHERE, request, receive)

    # -- responses --------------------------------------------------------------------------------

    def _receive(
        self, number: int, sent: list[PlannedAction], response: Response | NoResponse
    ) -> None:
        if number != self._request:
            return
        self._request += 1
        after = 0.0
        if isinstance(response, NoResponse):
            self._maybe_abandon(sent[0])
        elif len(sent) == 1:
            self._take(sent[0], response)
        elif response.status in _OK:
            results, pause = results_of(response)
            after = pause or 0.0
            for action, result in zip(sent, results, strict=False):
                self._take(action, result)
            for action in sent[len(results) :]:
                self._numbers.pop(action.id, None)  # it was not run
        self._later(after + _PAUSE_SECONDS * self._rng.random())

    def _maybe_abandon(self, action: PlannedAction) -> None:
        """Let the user give up a request that may have run; the next one takes its place."""
        if self._world.faults.is_stopped or self._rng.random() > _ABANDONED_SHARE:
            return
        self._world.note(action.device, f"{action.id} is abandoned")
        _give_up(action)
        self._end(action)

    def _take(self, action: PlannedAction, result: Response) -> None:
        number = self._numbers.get(action.id, 0)
        if result.code == _VIOLATION:
            self._heal(action, number, result)
        elif result.status == _SKIPPED:
            self._numbers.pop(action.id, None)
        elif result.status not in _TEMPORARY and result.code != _IN_PROGRESS:
            if result.status not in _OK:
                self.refused.add(number)
            self._next = max(self._next, number + 1)
            self._world.note(action.device, f"{action.id} has its result: {result.status}")
            self._end(action)

    def _heal(self, action: PlannedAction, number: int, result: Response) -> None:
        """Take another number, or none if the request may have happened."""
        details: dict[str, Any] = result.json()["details"]
        expected, used_by = details["expected"], details.get("used_by")
        self._world.note(action.device, f"{action.id} with number {number}: {details}")
        self._next = expected
        if "key_sequence" in details:
            self._numbers[action.id] = details["key_sequence"]
        elif used_by == "other_key" or (used_by is None and number > expected):
            self._numbers.clear()
        else:
            if not self._world.network.are_keys_forgotten:
                self._world.errors.append(
                    f"{action.id} with number {number} may have happened, and has no record"
                )
            _give_up(action)
            self._end(action)

    def _end(self, action: PlannedAction) -> None:
        self._numbers.pop(action.id, None)
        if action in self._open:
            self._open.remove(action)

    def _later(self, seconds: float) -> None:
        self._world.loop.call_later(seconds, self.send_next, context=NO_PROCESS.copy())


def _give_up(action: PlannedAction) -> None:
    """Expect one effect or none; others have taken its place in the order."""
    action.first_try = False
    if action.expect is Expect.EFFECT:
        action.expect = Expect.EITHER
