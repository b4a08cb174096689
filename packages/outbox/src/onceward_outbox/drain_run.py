"""One drain of one user: claims entries, sends them, and records the outcomes.

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
from math import ceil
from threading import Event as Flag
from typing import Final

from onceward_outbox.batch_offer import OFFER_HEADER, Batches
from onceward_outbox.batch_request import BatchRequest
from onceward_outbox.batch_sender import BatchSender, sendable
from onceward_outbox.drain_state import DrainReport, DrainState, Ended
from onceward_outbox.entry import Claimed, Entry, Status
from onceward_outbox.errors import ClaimLostError
from onceward_outbox.events import Event, EventKind
from onceward_outbox.exchanges import Call, Exchanges, Result
from onceward_outbox.lease_renewer import LeaseRenewer
from onceward_outbox.outage import Outages
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
from onceward_outbox.requests_in_flight import BatchInFlight, RequestInFlight
from onceward_outbox.round_trips import RoundTrips
from onceward_outbox.sender import Sender
from onceward_outbox.transport import Request, Response
from onceward_outbox.versions import follow
from onceward_protocol.clock import Clock
from onceward_protocol.operation import Operation

__all__ = ["DrainRun"]

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


class DrainRun:
    """One drain of one user."""

    def __init__(
        self,
        queue: OutboxQueue,
        sender: Sender,
        user_id: str,
        *,
        batch_sender: BatchSender,
        batches: Batches,
        base_url: str,
        clock: Clock,
        exchanges: Exchanges,
        round_trips: RoundTrips,
        outages: Outages,
        server: str,
        stop: Flag,
        max_seconds: float,
        waits: bool,
    ) -> None:
        self._queue = queue
        self._sender = sender
        self._batch_sender = batch_sender
        self._batches = batches
        self._base_url = base_url
        self._clock = clock
        self._exchanges = exchanges
        self._round_trips = round_trips
        self._outages = outages
        self._server = server
        self._stop = stop
        self._user_id = user_id
        self._max_seconds = max_seconds
        self._waits = waits
        self._state = DrainState(user_id, clock.monotonic)
        self._started = clock.monotonic()
        # Claimed and not sent; sent and not recorded; claimed and not to be sent.
        self._claims: deque[Claimed] = deque()
        self._outcomes: list[tuple[Claimed, Outcome]] = []
        self._unsent: list[Claimed] = []
        # By entry, for a batch its first: claimed, sent, and without a response so far.
        self._in_flight: dict[str, RequestInFlight | BatchInFlight] = {}
        # The results of a batch that are not looked at so far.
        self._received: deque[tuple[Claimed, Response | Outcome]] = deque()
        # The token that the last batch was sent with.
        self._batch_token: str | None = None
        # Until when the server wants no more batches, and until when none are made here.
        self._paused_until = self._singles_until = float("-inf")
        # How many to claim at once: as many as can be sent in one commit interval.
        self._size = self._least_size = 1
        self._lanes = max(1, min(queue.settings.parallel_lanes, exchanges.connections))
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
                self._commit(renewer)
                while self._claims or self._in_flight or self._received or self._wait():
                    if self._claims or self._in_flight or self._received:
                        self._send_claims()
                    self._commit(renewer)
            except BaseException:
                state.end(Ended.STOPPED)
                self._abandon_all()
                self._commit(renewer)
                raise
        return self._finish()

    # ------------------------------------------------------------------ sending

    def _send_claims(self) -> None:
        """Send what is claimed, and receive responses, until it is time for a commit."""
        state, started = self._state, self._clock.monotonic()
        self._end_received()
        if self._may_batch():
            self._send_batch()
        elif any(claimed.entry.waiting_for for claimed in self._claims):
            # They were claimed for a batch, behind those that they wait for.
            claims, waiting = sendable(list(self._claims))
            self._claims, self._unsent = deque(claims), self._unsent + waiting
        while (claimed := self._next_claim()) is not None:
            self._advance(RequestInFlight(claimed, self._sender.send(claimed, state)))
            if state.hold_seconds is not None or state.has_aged:
                return
            if self._clock.monotonic() - started >= _COMMIT_SECONDS:
                self._size = max(self._least_size, len(self._outcomes))
                return
        if not self._in_flight:
            self._size = min(2 * self._size, _MAX_CLAIMS)
        elif not self._outcomes and (not self._may_claim_more or not self._has_free_lane()):
            self._receive()

    def _next_claim(self) -> Claimed | None:
        """Take the next claim that can be sent now: of a lane that has nothing in flight."""
        state = self._state
        if not self._claims or not self._has_free_lane() or self._is_over():
            return None
        if state.hold_seconds is not None or self._pause_seconds() > 0 or self._received:
            return None
        # Removed before it is sent: if the sender raises, it has ended the claim.
        if not self._in_flight:
            return self._claims.popleft()
        entries = [claimed.entry for claimed in self._sent_claims()]
        lanes = {entry.lane for entry in entries} - {None}
        # Edits of one entity in several lanes: the version of the next one is that of the last.
        entities = {entry.entity for entry in entries} - {None}
        for index, claimed in enumerate(self._claims):
            entry = claimed.entry
            if entry.lane not in lanes and entry.entity not in entities and self._may_probe(entry):
                del self._claims[index]
                return claimed
            if entry.lane is not None:
                lanes.add(entry.lane)
        return None

    def _may_probe(self, entry: Entry) -> bool:
        """Return whether no other request probes the same server or endpoint."""
        probed = self._outages.probed_by(entry.endpoint)
        return probed is None or all(
            self._outages.probed_by(claimed.entry.endpoint) != probed
            for claimed in self._sent_claims()
        )

    def _sent_claims(self) -> list[Claimed]:
        return [claimed for flight in self._in_flight.values() for claimed in flight.claims]

    def _has_free_lane(self) -> bool:
        """Return whether one more request may be sent: while a batch is in flight, none."""
        if any(isinstance(flight, BatchInFlight) for flight in self._in_flight.values()):
            return False
        return len(self._in_flight) < self._lanes

    # ------------------------------------------------------------------ batches

    def _batch_size(self) -> int:
        """Return how many entries the next batch may have; below 2, they are sent one by one."""
        is_paused = self._clock.monotonic() < self._singles_until
        return 0 if is_paused or self._is_probing() else self._batches.limit

    def _is_probing(self) -> bool:
        """Return whether the server was down, and the next request finds out if it still is."""
        return self._outages.probed_by("") is not None

    def _may_batch(self) -> bool:
        """Return whether to make a batch: nothing is in flight, and there are several claims."""
        return (
            len(self._claims) > 1
            and not self._in_flight
            and not self._received
            and self._batch_size() > 1
            and self._state.hold_seconds is None
            and self._pause_seconds() == 0
            and not self._is_over()
        )

    def _send_batch(self) -> None:
        """Send the claims in one request, as far as possible."""
        # Claims that are not in the batch are released if it raises, as after any exception.
        made = self._batch_sender.assemble(self._claims, self._state)
        self._unsent += made.left
        self._claims = deque(made.alone)
        batch = made.batch
        if batch is None:
            # Singles for a while: most of what is queued cannot be in a batch.
            self._singles_until = self._clock.monotonic() + _SINGLES_SECONDS
            return
        self._batch_token = batch.token
        first = batch.parts[0].claimed.entry
        request, began = batch.request, self._clock.monotonic()
        result = self._exchanges.start(request, self._batch_seconds(batch))
        if isinstance(result, Call):
            self._in_flight[first.id] = BatchInFlight(batch, result, began)
        else:
            self._end_batch(batch, result, self._clock.monotonic() - began)

    def _end_batch(self, batch: BatchRequest, result: Result, seconds: float) -> None:
        """Take the results of a batch apart, so that each entry gets its outcome."""
        if isinstance(result, BaseException):
            for part in batch.parts:
                self._end(part.claimed, self._sender.abandon(part.claimed))
            raise result
        if self._exchanges.connections and isinstance(result, Response):
            self._round_trips.observe(batch.path, seconds)
        received = self._batch_sender.receive(batch, result, self._state)
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
                self._advance(RequestInFlight(claimed, sending))
            else:
                self._end(claimed, result)

    def _batch_seconds(self, batch: BatchRequest) -> float:
        """Return how long the response to a batch may take."""
        if not self._exchanges.connections:
            return 0.0  # the transport has its own
        settings = self._queue.settings
        seconds = self._round_trips.timeout_seconds(batch.path, size=len(batch.body))
        seconds = min(seconds + len(batch.parts) * _ITEM_SECONDS, settings.response_ceiling_seconds)
        left = self._started + self._max_seconds - self._clock.monotonic()
        return min(seconds, max(left, 0.0) + 2 * _LAST_SECONDS)

    def _pause_seconds(self) -> float:
        """Return for how long nothing may be sent: the server is down, or wants a pause."""
        paused = self._paused_until - self._clock.monotonic()
        return max(0.0, self._outages.server_seconds(), paused)

    def _advance(self, flight: RequestInFlight, result: Result | None = None) -> None:
        """Continue the sending of an entry, until it waits for a response or has its outcome."""
        entry = flight.claimed.entry
        self._in_flight.pop(entry.id, None)
        while True:
            request = flight.resume(result)
            if not isinstance(request, Request):
                self._end(flight.claimed, request)
                return
            seconds = self._timeout_seconds(entry, request)
            began = self._clock.monotonic()
            result_or_call = self._exchanges.start(request, seconds)
            if isinstance(result_or_call, Call):
                repeat_at = None if request.method == "GET" else began + seconds / 2
                flight.wait_for(result_or_call, began, repeat_at)
                self._in_flight[entry.id] = flight
                return
            result = result_or_call
            self._observe(entry, result, self._clock.monotonic() - began)

    def _end(self, claimed: Claimed, outcome: Outcome) -> None:
        """Note the outcome of an entry, to be recorded with the next commit."""
        self._outcomes.append((claimed, outcome))
        if isinstance(outcome, Succeeded):
            self._note_success(claimed.entry, outcome)
            # The server responds: from now on as many as there are lanes are claimed.
            self._least_size = self._lanes
            self._size = max(self._size, self._lanes) if self._lanes > 1 else self._size
            self._follow(claimed, outcome)
        else:
            self._hold_back_lane(claimed.entry.lane)
            self._hold_back_held()

    def _note_success(self, entry: Entry, outcome: Succeeded) -> None:
        if self._batches.path is None:
            return
        self._batches.note_single_success(entry.id, entry.endpoint)
        if entry.operation is not Operation.DELETE:
            is_known = outcome.produced.version is not None
            self._batches.note_version(entry.endpoint, is_known=is_known)

    def _receive(self) -> None:
        """Wait for a response. Repeats silent requests, and gives up when the time is over."""
        now = self._clock.monotonic()
        repeats = [
            flight.repeat_at - now for flight in self._in_flight.values() if flight.repeat_at
        ]
        left = self._started + self._max_seconds + min(_LAST_SECONDS, self._max_seconds) - now
        if left <= 0:
            self._abandon_all()
            return
        found = self._exchanges.receive(max(0.0, min([_POLL_SECONDS, left, *repeats])))
        if found is None:
            # Silent so far: one more lane is tried, also before the first response of this drain.
            self._size = max(self._size, min(self._lanes, len(self._in_flight) + 1))
            self._repeat_silent()
            return
        call, result = found
        flight = next(one for one in self._in_flight.values() if one.has(call))
        if isinstance(flight, BatchInFlight):
            del self._in_flight[flight.claims[0].entry.id]
            self._end_batch(flight.batch, result, call.elapsed_seconds)
            return
        entry = flight.claimed.entry
        self._observe(entry, result, call.elapsed_seconds)
        final = flight.receive(call, result)
        if final is not None:
            self._advance(flight, final)

    def _repeat_silent(self) -> None:
        """Send requests once more, with the same key, on other connections."""
        now = self._clock.monotonic()
        for flight in self._in_flight.values():
            if isinstance(flight, BatchInFlight):
                continue
            if flight.repeat_at is None or flight.repeat_at > now:
                continue
            if self._is_over():
                flight.repeat_at = None
                continue
            if not self._may_repeat(flight.claimed.entry):
                flight.repeat_at = now + _POLL_SECONDS
                continue
            flight.repeat_at = None
            try:
                request = self._sender.repeat(flight.claimed)
            except Exception:  # noqa: BLE001 - the app's functions; the first request goes on
                _log.exception("a request could not be repeated")
                continue
            if request is not None:
                seconds = self._timeout_seconds(flight.claimed.entry, request)
                flight.repeat = self._exchanges.start_anew(request, seconds)
                self._state.report.sent += 1

    def _abandon_all(self) -> None:
        """Give up what is in flight: its outcome is unknown, and it is sent again."""
        for flight in list(self._in_flight.values()):
            if isinstance(flight, BatchInFlight):
                flight.call.abandon()
                abandoned = self._batch_sender.abandon(flight.batch, self._state)
                self._received.extend(abandoned.results)
                continue
            flight.abandon()
            self._state.report.sent += 1
            self._end(flight.claimed, self._sender.abandon(flight.claimed))
        self._in_flight.clear()
        for claimed, result in self._received:
            outcome = self._sender.abandon(claimed) if isinstance(result, Response) else result
            self._end(claimed, outcome)
        self._received.clear()

    def _may_repeat(self, entry: Entry) -> bool:
        """Return whether to repeat a silent request: others wait for it, or there are no others.

        Not while the server is held: a repeat is one more request.
        """
        if self._outages.is_held(entry.endpoint):
            return False
        profile = self._queue.profiles.get(entry.profile)
        is_idle = not self._claims and not self._may_claim_more and self._has_free_lane()
        return profile.strict_order or is_idle

    def _timeout_seconds(self, entry: Entry, request: Request) -> float:
        if not self._exchanges.connections:
            return 0.0  # the transport has its own
        profile = self._queue.profiles.get(entry.profile)
        seconds = self._round_trips.timeout_seconds(
            entry.endpoint,
            size=len(request.body or b""),
            silent=self._sender.attempts.failed(entry),
            floor_seconds=profile.response_floor_seconds,
            ceiling_seconds=profile.response_ceiling_seconds,
        )
        left = self._started + self._max_seconds - self._clock.monotonic()
        return min(seconds, max(left, 0.0) + 2 * _LAST_SECONDS)

    def _observe(self, entry: Entry, result: Result, seconds: float) -> None:
        if isinstance(result, Response):
            self._batches.note_offer(result.headers.get(OFFER_HEADER))
        if self._exchanges.connections and isinstance(result, Response):
            self._round_trips.observe(entry.endpoint, seconds)

    # ------------------------------------------------------------------ commits

    def _commit(self, renewer: LeaseRenewer) -> None:
        """Record the outcomes of the last entries, and claim the next ones, in one commit."""
        state, has_outcomes = self._state, bool(self._outcomes)
        with self._queue.transaction(savepoints=False):
            # Before the outcomes: recording one may change the entries behind it.
            self._release_unsent()
            for claimed, outcome in sorted(self._outcomes, key=_is_of_sent):
                self._record(claimed, outcome)
            self._outcomes.clear()
            if self._outages.is_unsaved:
                self._queue.save_holds(self._server, self._outages.to_store())
            if self._batches.is_unsaved:
                self._queue.save_batch_offer(self._base_url, self._batches.to_store())
            is_held = state.hold_seconds is not None or self._pause_seconds() > 0
            self._was_held = is_held
            if is_held:
                # The next request is a probe.
                self._size = self._least_size = 1
            if is_held or state.has_aged or self._is_over():
                self._hold_back_from(0)
            else:
                self._hold_back_waiting()
                # If the network has become slower, the rest can be cancelled meanwhile.
                size = max(self._size, self._batch_size() if self._batch_size() > 1 else 0)
                self._hold_back_from(max(0, size - len(self._in_flight)))
            self._release_unsent()
            if state.has_aged:
                state.has_aged = False
                state.report.expired += len(self._queue.expire_stale(self._user_id))
            before = len(self._claims)
            if not is_held:
                self._claim()
            self._may_claim_more = len(self._claims) > before
        received = (claimed for claimed, _ in self._received)
        renewer.hold((*self._claims, *self._sent_claims(), *received))
        if has_outcomes:
            self._sender.reach("drain.recorded")

    def _claim(self) -> None:
        state, batch_size = self._state, self._batch_size()
        wanted = self._size - len(self._claims) - len(self._in_flight)
        if batch_size > 1:
            # A batch is the only request in flight. The rest of the last claims goes first.
            wanted = 0 if self._claims or self._in_flight else batch_size
        if state.ended is not None or wanted <= 0 or self._received:
            return
        unknown = state.unknown_profiles
        known_before = len(unknown)
        again: list[Claimed] = []
        held_paths = self._outages.paths()
        self._was_held = bool(held_paths)
        for claimed in self._queue.claim_some(
            self._user_id,
            wanted,
            in_batch=batch_size > 1,
            skip_profiles=unknown,
            held_paths=held_paths,
        ):
            if self._queue.profiles.find(claimed.entry.profile) is None:
                # Never sent under the rules of another profile: later claims skip it.
                self._queue.record(claimed, Released())
                unknown.add(claimed.entry.profile)
            elif self._sender.attempts.are_exhausted(claimed.entry):
                self._queue.record(claimed, Released())
                state.end(Ended.WAITING, "an entry has had all attempts of one wake-up")
            elif claimed.entry.attempt_count > 1 and batch_size < 2:  # noqa: PLR2004 - no batch
                again.append(claimed)
            else:
                self._claims.append(claimed)
        for claimed in again:
            self._claims.insert(self._sender.retry_position(claimed, self._claims), claimed)
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
        _count(report, entry)

    def _follow(self, done: Claimed, outcome: Succeeded) -> None:
        """Give edits that are claimed already the version that an earlier one produced."""
        produced = outcome.produced
        if self._claims and done.entry.entity is not None:
            self._claims = deque(follow(behind, done, produced) for behind in self._claims)
        if self._received:
            self._received = deque(
                (follow(behind, done, produced), result) for behind, result in self._received
            )

    def _hold_back_lane(self, lane: str | None) -> None:
        """Send nothing more of a lane whose head has not succeeded."""
        if lane is not None:
            self._unsent += [behind for behind in self._claims if behind.entry.lane == lane]
            self._claims = deque(kept for kept in self._claims if kept.entry.lane != lane)

    def _hold_back_waiting(self) -> None:
        """Release what waits behind a request that is silent, so that other lanes are claimed."""
        now = self._clock.monotonic()
        for flight in self._in_flight.values():
            if now - flight.started >= _COMMIT_SECONDS:
                for claimed in flight.claims:
                    self._hold_back_lane(claimed.entry.lane)

    def _hold_back_held(self) -> None:
        """Send nothing more to an endpoint that is held, nor what is behind that in its lane."""
        lanes: set[str] = set()
        kept: deque[Claimed] = deque()
        for claimed in self._claims:
            entry = claimed.entry
            if entry.lane in lanes or self._outages.is_held(entry.endpoint):
                self._unsent.append(claimed)
                if entry.lane is not None:
                    lanes.add(entry.lane)
            else:
                kept.append(claimed)
        self._claims = kept

    def _hold_back_from(self, size: int) -> None:
        """Keep the first claims only."""
        while len(self._claims) > size:
            self._unsent.append(self._claims.pop())

    def _release_unsent(self) -> None:
        for claimed in self._unsent:
            try:
                self._queue.record(claimed, Released())
            except ClaimLostError:
                continue
        self._unsent.clear()

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
        left = self._max_seconds - (self._clock.monotonic() - self._started)
        if pause is None or not self._waits or pause > left:
            if held is not None:
                state.end(Ended.OFFLINE, state.report.detail)
            elif due is not None and self._outages.server_seconds() > 0:
                state.end(Ended.HELD, self._outages.server_why)
            elif due is not None:
                state.end(Ended.WAITING)
            return False
        self._stop.wait(pause)
        state.hold_seconds = None
        state.report.revived += len(self._queue.watchdog())
        return True

    def _due_seconds(self) -> float | None:
        """Return how long until something can be sent; None if nothing waits for that."""
        queue, user_id, outages = self._queue, self._user_id, self._outages
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
            if self._stop.is_set():
                state.end(Ended.STOPPED)
            elif self._clock.monotonic() - self._started >= self._max_seconds:
                state.end(Ended.TIME_UP)
        return state.ended is not None

    def _finish(self) -> DrainReport:
        queue, state, report = self._queue, self._state, self._state.report
        report.unsent = queue.unsent(self._user_id)
        report.next_due_seconds = self._due_seconds()
        report.ended = state.ended or (Ended.BLOCKED if report.unsent else Ended.EMPTY)
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


def _count(report: DrainReport, entry: Entry) -> None:
    match entry.status:
        case Status.SUCCEEDED:
            report.succeeded += 1
        case Status.FAILED:
            report.failed += 1
        case Status.CONFLICT:
            report.conflicts += 1
        case Status.EXPIRED:
            report.expired += 1
        case _:
            pass


def _may_need_ids(claimed: Claimed, result: Response | Outcome) -> bool:
    """Return whether the outcome of a result may need further requests about the entity."""
    is_error = isinstance(result, Response) and not 200 <= result.status < 300  # noqa: PLR2004
    return is_error and bool(claimed.entry.local_refs)
