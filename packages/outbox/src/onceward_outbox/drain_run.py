"""One drain of one user: claims entries, sends them, and records the outcomes.

::

    COMMIT ──▶ SEND ──▶ RECEIVE        what is claimed is sent, until it is time for a commit
      ▲  │       │         │
      │  │       ▼         ▼
      │  │     COMMIT ◀────┘           outcomes are recorded, and the next entries claimed
      │  ▼
      └─ WAIT ──▶ END                  there is nothing to send now

An entry is claimed durably before it is sent; its outcome may be recorded a little later. So the
outcomes of some entries and the claims on the next ones are one commit, as many as fit into a
twentieth of a second: a fast network does not wait for the disk each time. A crash between two
commits loses nothing: an entry that was claimed and not recorded returns with its key, and the
server replays its response.

The same holds for entries of one lane. Each is sent only when the one before has succeeded on the
server; its success need not be on disk by then, because after a crash both are sent again in the
same order, and the server knows their keys.
"""

import logging
from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from math import ceil
from threading import Event as Flag
from threading import Thread
from typing import Final, NamedTuple, Self

from onceward_outbox.backoff import Outages, RoundTrips
from onceward_outbox.batch_offer import OFFER_HEADER, Batches
from onceward_outbox.drain_state import DrainReport, DrainState, Ended
from onceward_outbox.entry import Claimed, Entry, Status
from onceward_outbox.errors import ClaimLostError, OncewardError
from onceward_outbox.events import Event, EventKind
from onceward_outbox.exchanges import Call, Exchanges, Flight, Result
from onceward_outbox.outcome import (
    Conflicted,
    Outcome,
    Released,
    RetryLater,
    Succeeded,
    WrongOrder,
)
from onceward_outbox.profile import unknown_profile
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.requests import sendable
from onceward_outbox.sender import Received, Sender
from onceward_outbox.transport import Request, Response
from onceward_outbox.versions import Produced, follow
from onceward_protocol.clock import Clock
from onceward_protocol.operation import Operation

_log = logging.getLogger(__name__)

_COMMIT_SECONDS: Final = 0.05
"""How long an outcome may wait to be recorded."""

_MAX_CLAIMS: Final = 64
"""Entries claimed at once. They cannot be edited or cancelled meanwhile."""

_LAST_SECONDS: Final = 1.0
"""How long to wait for responses when the time of a drain is over."""

_ITEM_SECONDS: Final = 0.1
"""How much longer the response to a batch may take for each of its entries."""

_SINGLES_SECONDS: Final = 1.0
"""How long to send single requests after no batch could be made."""

_POLL_SECONDS: Final = 0.5
"""How often to check whether another process has ended its claims."""


class _Step(Enum):
    """Next step of a drain."""

    COMMIT = auto()
    SEND = auto()
    RECEIVE = auto()
    WAIT = auto()
    END = auto()


class Server(NamedTuple):
    """State of the server. Drains of one outbox share it."""

    origin: str
    base_url: str
    outages: Outages
    round_trips: RoundTrips
    batches: Batches


class Limits(NamedTuple):
    """When a drain ends, besides when there is nothing to send."""

    max_seconds: float
    # Whether it waits for retries that fall due in that time.
    waits: bool
    stop: Flag


class _ClaimSize:
    """How many entries to claim at once: as many as can be sent in one commit interval."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self.now = self._least = 1

    def grow(self) -> None:
        self.now = min(2 * self.now, _MAX_CLAIMS)

    def fit(self, outcomes: int) -> None:
        self.now = max(self._least, outcomes)

    def note_success(self) -> None:
        # The server responds: from now on as many as there are lanes are claimed.
        self._least = self._lanes
        if self._lanes > 1:
            self.now = max(self.now, self._lanes)

    def note_silence(self, in_flight: int) -> None:
        # One more lane is tried, also before the first response of a drain.
        self.now = max(self.now, min(self._lanes, in_flight + 1))

    def note_hold(self) -> None:
        # The next request is a probe.
        self.now = self._least = 1


class _Claims:
    """The claims of a drain that are not sent."""

    def __init__(self) -> None:
        # To be sent, in this order.
        self.waiting: deque[Claimed] = deque()
        # Not to be sent: released with the next commit.
        self.unsent: list[Claimed] = []

    def follow(self, done: Claimed, produced: Produced) -> None:
        """Give edits the version that an earlier one produced."""
        if self.waiting and done.entry.entity is not None:
            self.waiting = deque(follow(behind, done, produced) for behind in self.waiting)

    def hold_back_lane(self, lane: str | None) -> None:
        """Send nothing more of a lane whose head has not succeeded."""
        if lane is not None:
            self.unsent += [behind for behind in self.waiting if behind.entry.lane == lane]
            self.waiting = deque(kept for kept in self.waiting if kept.entry.lane != lane)

    def hold_back_held(self, outages: Outages) -> None:
        """Send nothing more to an endpoint that is held, nor what is behind that in its lane."""
        lanes: set[str] = set()
        kept: deque[Claimed] = deque()
        for claimed in self.waiting:
            entry = claimed.entry
            if entry.lane in lanes or outages.is_held(entry.endpoint):
                self.unsent.append(claimed)
                if entry.lane is not None:
                    lanes.add(entry.lane)
            else:
                kept.append(claimed)
        self.waiting = kept

    def hold_back_silent(self, flights: Iterable[Flight], now: float) -> None:
        """Release what waits behind a request that is silent, so that other lanes are claimed."""
        for flight in flights:
            if now - flight.started >= _COMMIT_SECONDS:
                for claimed in flight.claims:
                    self.hold_back_lane(claimed.entry.lane)

    def hold_back_from(self, size: int) -> None:
        while len(self.waiting) > size:
            self.unsent.append(self.waiting.pop())


class DrainRun:
    """One drain of one user."""

    def __init__(
        self,
        queue: OutboxQueue,
        sender: Sender,
        user_id: str,
        *,
        server: Server,
        clock: Clock,
        exchanges: Exchanges,
        limits: Limits,
    ) -> None:
        self._queue = queue
        self._sender = sender
        self._user_id = user_id
        self._server = server
        self._clock = clock
        self._exchanges = exchanges
        self._limits = limits
        self._state = DrainState(user_id, clock.monotonic)
        self._started = clock.monotonic()
        self._claims = _Claims()
        # Sent and not recorded.
        self._outcomes: list[tuple[Claimed, Outcome]] = []
        # By entry, for a batch its first: claimed, sent, and without a response so far.
        self._in_flight: dict[str, Flight] = {}
        # The results of a batch that are not looked at so far, and the token it was sent with.
        self._received: deque[tuple[Claimed, Response | Outcome]] = deque()
        self._batch_token: str | None = None
        # Until when the server wants no more batches, and until when none are made here.
        self._paused_until = self._singles_until = float("-inf")
        self._lanes = max(1, min(queue.settings.parallel_lanes, exchanges.connections))
        self._size = _ClaimSize(self._lanes)
        # The last claim found something, so there may be more.
        self._may_claim_more = True
        # Something was held at the last claim, so it may have left out what is ready.
        self._was_held = False

    def run(self) -> DrainReport:
        """Send what the queue holds, and report. Called once."""
        queue, state = self._queue, self._state
        state.report.revived = len(queue.watchdog())
        state.report.expired = len(queue.expire_stale(self._user_id))
        with LeaseRenewer(queue) as renewer:
            try:
                step = _Step.COMMIT
                while step is not _Step.END:
                    match step:
                        case _Step.COMMIT:
                            self._commit(renewer)
                            has_work = self._claims.waiting or self._in_flight or self._received
                            step = _Step.SEND if has_work else _Step.WAIT
                        case _Step.SEND:
                            step = self._send_claims()
                        case _Step.RECEIVE:
                            self._receive()
                            step = _Step.COMMIT
                        case _Step.WAIT:
                            step = _Step.COMMIT if self._wait() else _Step.END
            except BaseException:
                state.end(Ended.STOPPED)
                self._abandon_all()
                self._commit(renewer)
                raise
        return self._finish()

    # ------------------------------------------------------------------ sending

    def _send_claims(self) -> _Step:
        """Send what is claimed, until it is time for a commit, or for the responses."""
        state, started = self._state, self._clock.monotonic()
        self._end_received()
        if self._may_batch():
            self._send_batch()
        elif any(claimed.entry.waiting_for for claimed in self._claims.waiting):
            # They were claimed for a batch, behind those that they wait for.
            claims, waiting = sendable(list(self._claims.waiting))
            self._claims.waiting = deque(claims)
            self._claims.unsent += waiting
        while (claimed := self._next_claim()) is not None:
            self._advance(Flight(claimed, self._sender.send(claimed, state)))
            if state.hold_seconds is not None or state.has_aged:
                return _Step.COMMIT
            if self._clock.monotonic() - started >= _COMMIT_SECONDS:
                self._size.fit(len(self._outcomes))
                return _Step.COMMIT
        if not self._in_flight:
            self._size.grow()
        elif not self._outcomes and (not self._may_claim_more or not self._has_free_lane()):
            return _Step.RECEIVE
        return _Step.COMMIT

    def _next_claim(self) -> Claimed | None:
        """Take the next claim that can be sent now: of a lane that has nothing in flight."""
        waiting = self._claims.waiting
        if not waiting or not self._has_free_lane() or self._is_over():
            return None
        if self._is_held() or self._received:
            return None
        # Removed before it is sent: if the sender raises, it has ended the claim.
        if not self._in_flight:
            return waiting.popleft()
        entries = [claimed.entry for claimed in self._sent_claims()]
        lanes = {entry.lane for entry in entries} - {None}
        # Edits of one entity in several lanes: the version of the next one is that of the last.
        entities = {entry.entity for entry in entries} - {None}
        for index, claimed in enumerate(waiting):
            entry = claimed.entry
            if entry.lane not in lanes and entry.entity not in entities and self._may_probe(entry):
                del waiting[index]
                return claimed
            if entry.lane is not None:
                lanes.add(entry.lane)
        return None

    def _may_probe(self, entry: Entry) -> bool:
        """Return whether no other request probes the same server or endpoint."""
        outages = self._server.outages
        probed = outages.probed_by(entry.endpoint)
        return probed is None or all(
            outages.probed_by(claimed.entry.endpoint) != probed for claimed in self._sent_claims()
        )

    def _sent_claims(self) -> list[Claimed]:
        return [claimed for flight in self._in_flight.values() for claimed in flight.claims]

    def _has_free_lane(self) -> bool:
        """Return whether one more request may be sent: while a batch is in flight, none."""
        if any(flight.batch is not None for flight in self._in_flight.values()):
            return False
        return len(self._in_flight) < self._lanes

    def _batch_size(self) -> int:
        """Return how many entries the next batch may have; below 2, they are sent one by one."""
        is_paused = self._clock.monotonic() < self._singles_until
        # After an outage the next request finds out if the server is still down.
        is_probing = self._server.outages.probed_by("") is not None
        return 0 if is_paused or is_probing else self._server.batches.limit

    def _may_batch(self) -> bool:
        """Return whether to make a batch: nothing is in flight, and there are several claims."""
        return (
            len(self._claims.waiting) > 1
            and not self._in_flight
            and not self._received
            and self._batch_size() > 1
            and not self._is_held()
            and not self._is_over()
        )

    def _send_batch(self) -> None:
        # Claims that are not in the batch are released if it raises, as after any exception.
        made = self._sender.assemble(self._claims.waiting)
        self._claims.unsent += made.left
        self._claims.waiting = deque(made.alone)
        batch = made.batch
        if batch is None:
            # Singles for a while: most of what is queued cannot be in a batch.
            self._singles_until = self._clock.monotonic() + _SINGLES_SECONDS
            return
        sending = self._sender.send_batch(batch, self._state)
        self._advance(Flight(batch.parts[0].claimed, sending, batch))

    def _advance(self, flight: Flight, result: Result | None = None) -> None:
        """Continue a sending, until it waits for a response or its entries have outcomes."""
        self._in_flight.pop(flight.claimed.entry.id, None)
        while True:
            step = flight.resume(result)
            if isinstance(step, Received):
                self._take(step)
                return
            if not isinstance(step, Request):
                self._end(flight.claimed, step)
                return
            seconds = self._timeout_seconds(flight, step)
            began = self._clock.monotonic()
            result_or_call = self._exchanges.start(step, seconds)
            if isinstance(result_or_call, Call):
                # A batch is not repeated on another connection: the first copy claims its keys.
                is_once = step.method == "GET" or flight.batch is not None
                flight.wait_for(result_or_call, began, None if is_once else began + seconds / 2)
                self._in_flight[flight.claimed.entry.id] = flight
                return
            result = result_or_call
            self._observe(flight, result, self._clock.monotonic() - began)

    def _timeout_seconds(self, flight: Flight, request: Request) -> float:
        if not self._exchanges.connections:
            return 0.0  # the transport has its own
        entry, round_trips, size = flight.claimed.entry, self._server.round_trips, request.body
        if flight.batch is None:
            profile = self._queue.profiles.get(entry.profile)
            seconds = round_trips.timeout_seconds(
                flight.path,
                size=len(size or b""),
                silent=self._sender.backoff.failed(entry),
                floor_seconds=profile.response_floor_seconds,
                ceiling_seconds=profile.response_ceiling_seconds,
            )
        else:
            ceiling = self._queue.settings.response_ceiling_seconds
            seconds = round_trips.timeout_seconds(flight.path, size=len(size or b""))
            seconds = min(seconds + len(flight.claims) * _ITEM_SECONDS, ceiling)
        left = self._started + self._limits.max_seconds - self._clock.monotonic()
        return min(seconds, max(left, 0.0) + 2 * _LAST_SECONDS)

    def _observe(self, flight: Flight, result: Result, seconds: float) -> None:
        if not isinstance(result, Response):
            return
        if flight.batch is None:
            self._server.batches.note_offer(result.headers.get(OFFER_HEADER))
        if self._exchanges.connections:
            self._server.round_trips.observe(flight.path, seconds)

    # ------------------------------------------------------------------ receiving

    def _take(self, received: Received) -> None:
        """Take the results of a batch, so that each entry gets its outcome."""
        self._batch_token = received.token
        if received.pause_seconds > 0:
            pause = min(received.pause_seconds, self._queue.settings.max_probe_seconds)
            self._paused_until = self._clock.monotonic() + pause
        self._received.extend(received.results)
        self._end_received()

    def _end_received(self) -> None:
        """Give entries the outcomes of their results, as far as connections are free for reads."""
        while self._received and self._has_free_lane():
            claimed, result = self._received[0]
            if self._outcomes and _may_need_ids(claimed, result):
                return  # the ids that earlier results have brought are recorded first
            self._received.popleft()
            if isinstance(result, Response):
                sending = self._sender.receive(claimed, self._state, result, self._batch_token)
                self._advance(Flight(claimed, sending))
            else:
                self._end(claimed, result)

    def _end(self, claimed: Claimed, outcome: Outcome) -> None:
        """Note the outcome of an entry, to be recorded with the next commit."""
        self._outcomes.append((claimed, outcome))
        if not isinstance(outcome, Succeeded):
            self._claims.hold_back_lane(claimed.entry.lane)
            self._claims.hold_back_held(self._server.outages)
            return
        entry, batches, produced = claimed.entry, self._server.batches, outcome.produced
        if batches.path is not None:
            batches.note_single_success(entry.id, entry.endpoint)
            if entry.operation is not Operation.DELETE:
                batches.note_version(entry.endpoint, is_known=produced.version is not None)
        self._size.note_success()
        self._claims.follow(claimed, produced)
        if self._received:
            self._received = deque(
                (follow(behind, claimed, produced), result) for behind, result in self._received
            )

    def _receive(self) -> None:
        """Wait for a response. Repeats silent requests, and gives up when the time is over."""
        now, max_seconds = self._clock.monotonic(), self._limits.max_seconds
        repeats = [
            flight.repeat_at - now for flight in self._in_flight.values() if flight.repeat_at
        ]
        left = self._started + max_seconds + min(_LAST_SECONDS, max_seconds) - now
        if left <= 0:
            self._abandon_all()
            return
        found = self._exchanges.receive(max(0.0, min([_POLL_SECONDS, left, *repeats])))
        if found is None:
            self._size.note_silence(len(self._in_flight))
            self._repeat_silent()
            return
        call, result = found
        flight = next(one for one in self._in_flight.values() if one.has(call))
        self._observe(flight, result, call.elapsed_seconds)
        final, entry_id = flight.receive(call, result), flight.claimed.entry.id
        if final is result:
            self._state.forget_undecided(entry_id)
        elif final is None and isinstance(result, Response):
            self._state.note_undecided(entry_id)
        if final is not None:
            self._advance(flight, final)

    def _repeat_silent(self) -> None:
        """Send requests once more, with the same key, on other connections."""
        now = self._clock.monotonic()
        for flight in self._in_flight.values():
            if flight.repeat_at is None or flight.repeat_at > now:
                continue
            if self._is_over():
                flight.repeat_at = None
                continue
            if not self._may_repeat(flight):
                flight.repeat_at = now + _POLL_SECONDS
                continue
            flight.repeat_at = None
            try:
                request = self._sender.repeat(flight.claimed)
            except Exception:  # noqa: BLE001 - the app's functions; the first request goes on
                _log.exception("a request could not be repeated")
                continue
            if request is not None:
                seconds = self._timeout_seconds(flight, request)
                flight.repeat = self._exchanges.start_anew(request, seconds)
                self._state.report.count_sends(1)

    def _may_repeat(self, flight: Flight) -> bool:
        """Return whether to repeat a silent request: others wait for it, or there are no others.

        Not while the server is held: a repeat is one more request. After a hold it is a probe, and
        there is one at a time.
        """
        entry, outages = flight.claimed.entry, self._server.outages
        if outages.is_held(entry.endpoint):
            return False
        probed = outages.probed_by(entry.endpoint)
        if probed is not None and any(
            other.repeat is not None and outages.probed_by(other.path) == probed
            for other in self._in_flight.values()
        ):
            return False
        profile = self._queue.profiles.get(entry.profile)
        is_idle = not self._claims.waiting and not self._may_claim_more and self._has_free_lane()
        return profile.strict_order or is_idle

    def _abandon_all(self) -> None:
        """Give up what is in flight: its outcome is unknown, and it is sent again."""
        for flight in list(self._in_flight.values()):
            self._abandon(flight)
        for claimed, result in self._received:
            outcome = self._sender.abandon(claimed) if isinstance(result, Response) else result
            self._end(claimed, outcome)
        self._received.clear()

    def _abandon(self, flight: Flight) -> None:
        del self._in_flight[flight.claimed.entry.id]
        flight.abandon()
        self._state.report.count_sends(len(flight.claims))
        if flight.batch is None:
            self._end(flight.claimed, self._sender.abandon(flight.claimed))
        else:
            self._received.extend(self._sender.abandon_batch(flight.batch).results)

    def _abandon_expired(self, claimed_ids: set[str]) -> None:
        """Give up requests of entries that are claimed again: their leases have expired.

        That happens after a pause of the process. The new claims count.
        """
        for flight in list(self._in_flight.values()):
            if any(claimed.entry.id in claimed_ids for claimed in flight.claims):
                self._abandon(flight)

    # ------------------------------------------------------------------ commits

    def _commit(self, renewer: "LeaseRenewer") -> None:
        """Record the outcomes of the last entries, and claim the next ones, in one commit."""
        state, has_outcomes, claims = self._state, bool(self._outcomes), self._claims
        server = self._server
        with self._queue.transaction(savepoints=False):
            # Before the outcomes: recording one may change the entries behind it.
            self._release_unsent()
            for claimed, outcome in sorted(self._outcomes, key=_is_of_sent):
                self._record(claimed, outcome)
            self._outcomes.clear()
            if server.outages.is_unsaved:
                self._queue.save_holds(server.origin, server.outages.to_store())
            if server.batches.is_unsaved:
                self._queue.save_batch_offer(server.base_url, server.batches.to_store())
            is_held = self._was_held = self._is_held()
            if is_held:
                self._size.note_hold()
            if is_held or state.has_aged or self._is_over():
                claims.hold_back_from(0)
            else:
                claims.hold_back_silent(self._in_flight.values(), self._clock.monotonic())
                # If the network has become slower, the rest can be cancelled meanwhile.
                size = max(self._size.now, self._batch_size() if self._batch_size() > 1 else 0)
                claims.hold_back_from(max(0, size - len(self._in_flight)))
            self._release_unsent()
            if state.has_aged:
                state.has_aged = False
                state.report.expired += len(self._queue.expire_stale(self._user_id))
            before = len(claims.waiting)
            if not is_held:
                self._claim()
            self._may_claim_more = len(claims.waiting) > before
        received = (claimed for claimed, _ in self._received)
        renewer.hold((*claims.waiting, *self._sent_claims(), *received))
        if has_outcomes:
            self._sender.reach("drain.recorded")

    def _claim(self) -> None:
        state, batch_size, waiting = self._state, self._batch_size(), self._claims.waiting
        wanted = self._size.now - len(waiting) - len(self._in_flight)
        if batch_size > 1:
            # A batch is the only request in flight. The rest of the last claims goes first.
            wanted = 0 if waiting or self._in_flight else batch_size
        if state.ended is not None or wanted <= 0 or self._received:
            return
        unknown = state.unknown_profiles
        known_before = len(unknown)
        again: list[Claimed] = []
        held_paths = self._server.outages.paths()
        self._was_held = bool(held_paths)
        found = self._queue.claim_some(
            self._user_id,
            wanted,
            in_batch=batch_size > 1,
            skip_profiles=unknown,
            held_paths=held_paths,
        )
        self._abandon_expired({claimed.entry.id for claimed in found})
        for claimed in found:
            if self._queue.profiles.find(claimed.entry.profile) is None:
                # Never sent under the rules of another profile: later claims skip it.
                self._queue.record(claimed, Released())
                unknown.add(claimed.entry.profile)
            elif self._sender.backoff.is_exhausted(claimed.entry):
                self._queue.record(claimed, Released())
                state.end(Ended.WAITING, "an entry has had all attempts of one wake-up")
            elif claimed.entry.attempt_count > 1 and batch_size < 2:  # noqa: PLR2004 - no batch
                again.append(claimed)
            else:
                waiting.append(claimed)
        for claimed in again:
            waiting.insert(self._sender.retry_position(claimed, waiting), claimed)
        if len(unknown) > known_before:
            self._claim()

    def _record(self, claimed: Claimed, outcome: Outcome) -> None:
        report = self._state.report
        report.retrying += isinstance(outcome, RetryLater) and not outcome.give_up
        try:
            entry = self._queue.record(claimed, outcome)
        except ClaimLostError:
            # The lease expired and another process has it: its outcome counts.
            report.lost += 1
            return
        if isinstance(outcome, Conflicted):
            report.resolved += entry.status is not Status.CONFLICT
        report.rebuilt += isinstance(outcome, WrongOrder)
        report.count(entry.status)

    def _release_unsent(self) -> None:
        for claimed in self._claims.unsent:
            try:
                self._queue.record(claimed, Released())
            except ClaimLostError:
                continue
        self._claims.unsent.clear()

    # ------------------------------------------------------------------ waiting and the end

    def _is_held(self) -> bool:
        """Return whether nothing may be sent: the network or the server is down."""
        return self._state.hold_seconds is not None or self._pause_seconds() > 0

    def _pause_seconds(self) -> float:
        """Return for how long nothing may be sent: the server is down, or wants a pause."""
        paused = self._paused_until - self._clock.monotonic()
        return max(0.0, self._server.outages.server_seconds(), paused)

    def _wait(self) -> bool:
        """Wait until there may be something to send; False if the drain is over."""
        if self._is_over():
            return False
        state, held = self._state, self._state.hold_seconds
        due = self._due_seconds() if held is None else None
        if due == 0:
            return True
        pause = due if held is None else held
        if pause is None and self._queue.in_flight(self._user_id):
            # Another process is sending. What it releases, or leaves when it dies, is sent here.
            pause = min(_POLL_SECONDS, self._queue.settings.lease_seconds / 2)
        left = self._limits.max_seconds - (self._clock.monotonic() - self._started)
        if pause is None or not self._limits.waits or pause > left:
            if held is not None:
                state.end(Ended.OFFLINE, state.report.detail)
            elif due is not None and self._server.outages.server_seconds() > 0:
                state.end(Ended.HELD, self._server.outages.server_why)
            elif due is not None:
                state.end(Ended.WAITING)
            return False
        self._limits.stop.wait(pause)
        state.hold_seconds = None
        state.report.revived += len(self._queue.watchdog())
        return True

    def _due_seconds(self) -> float | None:
        """Return how long until something can be sent; None if nothing waits for that."""
        queue, user_id, outages = self._queue, self._user_id, self._server.outages
        due, server, paths = (
            queue.next_due_seconds(user_id),
            self._pause_seconds(),
            outages.paths(),
        )
        if not server and not paths and not self._was_held:
            return due
        is_ready = queue.next_eligible(user_id) is not None
        if not server and not paths:
            # The hold has passed since the last claim.
            return 0.0 if is_ready else due
        if server:
            return server if is_ready else None if due is None else max(due, server)
        # What is ready and was not claimed is held.
        held = min(paths.values()) if is_ready else None
        return min((seconds for seconds in (due, held) if seconds is not None), default=None)

    def _is_over(self) -> bool:
        state = self._state
        if state.ended is None:
            if self._limits.stop.is_set():
                state.end(Ended.STOPPED)
            elif self._clock.monotonic() - self._started >= self._limits.max_seconds:
                state.end(Ended.TIME_UP)
        return state.ended is not None

    def _finish(self) -> DrainReport:
        queue, state, report = self._queue, self._state, self._state.report
        report.unsent, report.refused, was_out = queue.unsettled_at_end(self._user_id)
        report.next_due_seconds = self._due_seconds()
        report.ended = state.ended or (Ended.BLOCKED if report.unsent else Ended.EMPTY)
        is_out = report.ended is Ended.SIGNED_OUT
        if is_out is not was_out and (is_out or report.sent):
            queue.note_sign_in(self._user_id, signed_in=not is_out)
        leases = queue.lease_seconds_left(self._user_id)
        if leases is not None:
            # Claimed by another process. If that one has ended and this is not known here,
            # only a later drain notices, when the lease has expired.
            due = report.next_due_seconds
            report.next_due_seconds = leases[0] if due is None else min(due, leases[0])
            if report.ended is Ended.BLOCKED and not state.unknown_profiles:
                count = queue.in_flight(self._user_id)
                report.ended = Ended.WAITING
                report.detail = (
                    f"{count} {'entry is' if count == 1 else 'entries are'} claimed by another "
                    f"process, for at most {ceil(leases[1])} s if that has ended"
                )
        report.unknown_profiles = tuple(sorted(state.unknown_profiles))
        for name in report.unknown_profiles:
            _log.error("entries of %s were not sent: %s", self._user_id, unknown_profile(name))
            if report.ended is Ended.BLOCKED:
                report.detail = unknown_profile(name)
        if report.ended is Ended.BLOCKED and not queue.blocked_by(self._user_id):
            report.detail = report.detail or "no entry creates a local id that is referred to"
        report.elapsed_seconds = self._clock.monotonic() - self._started
        queue.emit(
            Event(
                kind=EventKind.DRAINED,
                at=self._clock.now(),
                user_id=self._user_id,
                count=report.sent,
                detail=report.ended,
            )
        )
        return report


def _is_of_sent(ended: tuple[Claimed, Outcome]) -> bool:
    """Return whether an entry was sent; what was skipped in a batch has to be pending first."""
    return not (isinstance(ended[1], Released) and not ended[1].sent)


def _may_need_ids(claimed: Claimed, result: Response | Outcome) -> bool:
    """Return whether the outcome of a result may need further requests about the entity."""
    is_error = isinstance(result, Response) and not 200 <= result.status < 300  # noqa: PLR2004
    return is_error and bool(claimed.entry.local_refs)


class LeaseRenewer:
    """Renews the leases of the claims it holds, three times per lease, on a thread."""

    def __init__(self, queue: OutboxQueue) -> None:
        self._queue = queue
        self._held: tuple[Claimed, ...] = ()
        self._ended = Flag()
        self._every_seconds = queue.settings.lease_seconds / 3
        self._thread = Thread(target=self._run, name="outbox-lease", daemon=True)

    def hold(self, claims: tuple[Claimed, ...]) -> None:
        self._held = claims

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_seconds):
            self._renew_all()

    def _renew_all(self) -> None:
        if not self._held:
            return
        try:
            # Without those whose outcome was just recorded, or that another process has: recording
            # finds out.
            self._queue.renew_all(self._held)
        except OncewardError:
            _log.warning("leases could not be renewed", exc_info=True)
