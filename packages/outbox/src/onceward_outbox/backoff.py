"""When to send again: attempts and their delays, outages and their holds, silence and time-outs.

An attempt counts if it says something about its entry. A server or a network that responds to
nothing says nothing about it: no outage makes an entry fail.

An outage is held against the server, not against the entry that met it. 503 and gateway errors hold
everything, 429 holds one endpoint. When a hold has passed, one request is sent as a probe; the rest
follows if it gets any other response, otherwise the hold begins anew and is longer.

Time-outs follow the round trips seen, as TCP sets its retransmission time-out: for each endpoint
the smoothed round trip and its mean deviation are kept (Jacobson and Karels, RFC 6298). The
time-out is the smoothed round trip and four deviations, within a floor and a ceiling. Each silent
send of the same entry in a row doubles it.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Final, Self

import msgspec

from onceward_outbox.claims import VIOLATION_CODES
from onceward_outbox.completion import ABANDONED
from onceward_outbox.drain_state import DrainState
from onceward_outbox.entry import Entry, Transition
from onceward_outbox.events import Event, EventKind
from onceward_outbox.outcome import AttemptResult, RetryLater
from onceward_outbox.profile import Profile
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transaction import Transaction
from onceward_outbox.transport import Response
from onceward_protocol.clock import Clock
from onceward_protocol.response_classification import (
    BY_CODE,
    SILENT,
    UNREACHABLE,
    UNRECOGNISED,
    counts_as_attempt,
)
from onceward_protocol.retry import RetryPolicy, parse_retry_after

if TYPE_CHECKING:
    from onceward_outbox.queue import OutboxQueue

SERVER: Final = ""
"""The key of a hold on the whole server. Those on endpoints have the template of the path."""

TOO_MANY: Final = 429
"""Holds its endpoint, all others hold the server."""

OUTAGE_STATUSES: Final = frozenset({429, 502, 503, 504})
"""Other server errors are outages if the response is a gateway's page."""

_SERVER_ERROR: Final = 500
_UNPROCESSABLE: Final = 422
_VERSION: Final = re.compile(r"v\d+", re.IGNORECASE)
_MAX_BLAME: Final = 6
_MAX_BLAMED: Final = 1000
_LATER: Final = 1.1
"""The entry that met an outage waits a little longer than the others, so that one of those is the
next probe: if only this entry makes the server fail, they go on."""

_MAX_SILENT_SENDS: Final = 3
"""After this many consecutive sends without a response, the network counts as down."""

_MAX_SILENT_ENTRIES: Final = 10_000
_UNCOUNTED: Final = frozenset({Transition.RELEASE, Transition.WATCHDOG})

_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4
_DEVIATIONS: Final = 4
_FIRST_SHARE: Final = 1 / 3
"""Before the first response the time-out is this part of the ceiling."""

_BYTES_PER_SECOND: Final = 16_384
"""A body is given the time that it takes on a slow mobile network."""

_MAX_ENDPOINTS: Final = 256
_MAX_DOUBLINGS: Final = 16
_ALL: Final = ""

Retry = RetryPolicy | Callable[[Profile], RetryPolicy]
"""One policy for all entries, or one by profile."""


# -- responses ------------------------------------------------------------------------------------


def is_outage(response: Response) -> bool:
    """Return whether a response says that the server is overloaded or not there.

    Also an HTML page with a server error that has no sign of the service: a gateway's.
    """
    status, headers = response.status, response.headers
    if status in OUTAGE_STATUSES:
        return True
    is_page = status >= _SERVER_ERROR and "html" in headers.get("content-type", "")
    return is_page and "x-request-id" not in headers and "idempotency-replayed" not in headers


def result_of(response: Response, error: str | None = None) -> AttemptResult:
    """Return the record of an attempt with this response."""
    return AttemptResult(response.status, response.code, response.request_id, error)


def outage_result(response: Response) -> AttemptResult:
    """Return the record of an attempt during an outage; it does not count."""
    result = result_of(response, response.error_body)
    # The status of a gateway's page does not say that it is one.
    counts = counts_as_attempt(result.http_status, result.code)
    return result._replace(code=UNRECOGNISED) if counts else result


@lru_cache(maxsize=1024)
def path_template(endpoint: str) -> str:
    """Return a path with ``*`` for the segments that look like ids, as a pattern for GLOB.

    A segment with a digit counts as an id, except for versions such as ``v1``.
    """
    path = endpoint.partition("?")[0]
    return "/".join(_segment(part) for part in path.split("/"))


def _segment(part: str) -> str:
    is_id = part.startswith("{") or any(character.isdigit() for character in part)
    if is_id and _VERSION.fullmatch(part) is None:
        return "*"
    return re.sub(r"([\[*?])", r"[\1]", part)


# -- attempts -------------------------------------------------------------------------------------


class Backoff:
    """When entries are sent again: by the attempts of one wake-up, those recorded, and outages."""

    def __init__(
        self,
        queue: "OutboxQueue",
        retry: Retry | None,
        clock: Clock,
        chance: Callable[[], float],
        outages: "Outages",
    ) -> None:
        self._queue = queue
        self._retry = retry
        self._clock = clock
        self._chance = chance
        self._outages = outages
        self._failed: Counter[str] = Counter()
        # When the service last responded, and by entry id: when its last silent send began.
        self._last_response = float("-inf")
        self._silent_since: dict[str, float] = {}

    def reset(self) -> None:
        self._failed.clear()

    def failed(self, entry: Entry) -> int:
        """Return how many attempts of this wake-up have failed."""
        return self._failed[entry.id]

    def is_exhausted(self, entry: Entry) -> bool:
        most = self.policy(entry).attempts
        return most is not None and self._failed[entry.id] >= most

    def policy(self, entry: Entry) -> RetryPolicy:
        """Return when an entry is retried, and how often."""
        chosen = self._retry
        if isinstance(chosen, RetryPolicy):
            return chosen
        profile = self._queue.profiles.get(entry.profile)
        return profile.retry if chosen is None else chosen(profile)

    def delay(self, entry: Entry) -> float:
        """Return how many seconds after this attempt the next one is."""
        return self.policy(entry).delay_seconds(self._failed[entry.id] + 1, random=self._chance())

    def retry_after(self, response: Response) -> float | None:
        """Return the seconds of ``Retry-After``; None without one."""
        value = response.headers.get("retry-after")
        return None if value is None else parse_retry_after(value, self._queue.server_now())

    def retry_later(
        self,
        entry: Entry,
        result: AttemptResult,
        *,
        outcome_unknown: bool,
        delay_seconds: float | None = None,
        retry_after_seconds: float | None = None,
        counts: bool = True,
    ) -> RetryLater:
        """Return the entry to the queue. ``counts``: as one of the attempts of this wake-up."""
        policy = self.policy(entry)
        is_about_entry = counts_as_attempt(result.http_status, result.code)
        give_up = is_about_entry and self.was_last(entry)
        self._failed[entry.id] += counts
        return RetryLater(
            result=result,
            policy=policy if is_about_entry else self._probing(policy),
            give_up=give_up,
            outcome_unknown=outcome_unknown,
            delay_seconds=delay_seconds,
            retry_after_seconds=retry_after_seconds,
        )

    def was_last(self, entry: Entry) -> bool:
        """Return whether an entry has used up ``max_attempts`` with the attempt that just ended.

        Attempts that say nothing about the entry do not count.
        """
        if self.policy(entry).attempts is not None or entry.attempt_count < entry.max_attempts:
            return False
        before = [
            attempt
            for attempt in self._queue.attempts(entry.id)
            if attempt.outcome not in _UNCOUNTED
        ]
        # Those since a person has retried the entry, without the one that just ended.
        recent = before[max(0, len(before) - entry.attempt_count + 1) :]
        counted = sum(
            attempt.code != ABANDONED and counts_as_attempt(attempt.status, attempt.code)
            for attempt in recent
        )
        return counted + 1 >= entry.max_attempts

    def had_unclear_422(self, entry: Entry) -> bool:
        """Return whether an entry has had its second attempt after a 422 with an unknown code."""
        left = entry.attempt_count - 1
        codes = self._queue.profiles.get(entry.profile).codes
        known = BY_CODE.keys() | codes.keys() | VIOLATION_CODES | {UNREACHABLE}
        for attempt in reversed(self._queue.attempts(entry.id)):
            if left <= 0:
                return False
            if attempt.status == _UNPROCESSABLE and attempt.code not in known:
                return True
            left -= attempt.outcome not in _UNCOUNTED
        return False

    def _probing(self, policy: RetryPolicy) -> RetryPolicy:
        """Return a policy with the longest delay between two probes.

        For an attempt that says nothing about the entry, such as a silent server. The delay grows
        with all attempts, also those of an outage, and would keep the lane waiting long after it.
        """
        ceiling = max(policy.first_seconds, self._queue.settings.max_probe_seconds)
        if policy.ceiling_seconds <= ceiling:
            return policy
        return replace(policy, ceiling_seconds=ceiling)

    # ------------------------------------------------------------------ silence

    def silence_code(self, entry: Entry, state: DrainState) -> str | None:
        """Return the code of a send without a response; None if it counts as an attempt.

        It counts only if the service has responded to others since the entry's last silent send.
        """
        began = state.sent_at(entry.id)
        since = self._silent_since.get(entry.id, began)
        if len(self._silent_since) >= _MAX_SILENT_ENTRIES:
            self._silent_since.clear()
        self._silent_since[entry.id] = began
        return None if self._last_response > since else SILENT

    def count_silent_send(self, entry: Entry, state: DrainState, why: str) -> bool:
        """Hold the drain after some; returns False if another response came meanwhile."""
        if not state.count_silent_send(entry.id):
            return False
        if state.silent_sends >= _MAX_SILENT_SENDS:
            state.hold(self.delay(entry), why)
        return True

    def note_response(self, entry: Entry, state: DrainState) -> None:
        """Note that the service responds, and end the holds that this disproves."""
        at = state.received_at(entry.id)
        for key in self._outages.end(entry.id, entry.endpoint, at=at):
            self._emit(EventKind.RESUMED, f"{key or 'the server'} responds again")
        self._last_response = max(self._last_response, at)
        self._silent_since.pop(entry.id, None)

    # ------------------------------------------------------------------ outages

    def hold(self, entry: Entry, response: Response) -> float:
        """Note an outage; returns how long this entry should wait."""
        policy, ceiling = self.policy(entry), self._queue.settings.max_probe_seconds

        def delay(failures: int) -> float:
            return min(policy.delay_seconds(failures, random=self._chance()), ceiling)

        retry_after = self.retry_after(response)
        seconds, is_new = self._outages.begin(
            entry.id, entry.endpoint, response, delay=delay, retry_after_seconds=retry_after
        )
        if is_new:
            what = path_template(entry.endpoint) if response.status == TOO_MANY else "the server"
            detail = f"{response.status}: nothing is sent to {what}"
            self._emit(EventKind.HELD, detail, response.status, seconds)
        return seconds

    def _emit(
        self,
        kind: EventKind,
        detail: str,
        http_status: int | None = None,
        seconds: float | None = None,
    ) -> None:
        self._queue.emit(
            Event(
                kind=kind,
                at=self._clock.now(),
                http_status=http_status,
                delay_seconds=seconds,
                detail=detail,
            )
        )


# -- outages --------------------------------------------------------------------------------------


class StoredHold(msgspec.Struct, frozen=True):
    """A hold that the server has set by ``Retry-After``, as it is stored in the file."""

    seconds: float
    why: str


class _Hold:
    """One hold: until when, and the probes that have failed."""

    def __init__(self, why: str) -> None:
        self.why = why
        # When the last response that says so came.
        self.at = 0.0
        self.until = 0.0
        self.failures = 0
        # Set by Retry-After: kept when the app calls `online` or `wake`, and stored.
        self.is_fixed = False


class Outages:
    """The holds on one server. Thread-safe: drains of one outbox share them."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._holds: dict[str, _Hold] = {}
        # By entry: how often it has met an outage while others did not.
        self._blame: dict[str, int] = {}
        # Holds that the server has set were changed and not stored since.
        self.is_unsaved = False

    # ------------------------------------------------------------------ what is held

    def server_seconds(self) -> float:
        """Return for how long nothing may be sent; 0 if something may."""
        hold = self._holds.get(SERVER)
        return 0.0 if hold is None else max(0.0, hold.until - self._monotonic())

    @property
    def server_why(self) -> str | None:
        hold = self._holds.get(SERVER)
        return None if hold is None else hold.why

    def paths(self) -> Mapping[str, float]:
        """Return the templates of the endpoints that are held, each with the seconds left."""
        if not self._holds:
            return {}
        now = self._monotonic()
        with self._lock:
            return {
                key: hold.until - now
                for key, hold in self._holds.items()
                if key != SERVER and hold.until > now
            }

    def is_held(self, endpoint: str) -> bool:
        if not self._holds:
            return False
        hold = self._holds.get(path_template(endpoint))
        is_held = hold is not None and hold.until > self._monotonic()
        return is_held or self.server_seconds() > 0

    def probed_by(self, endpoint: str) -> str | None:
        """Return the key of the hold that a request to this endpoint probes; None if there is none.

        Until its response there should be no other request with the same key.
        """
        if not self._holds:
            return None
        if SERVER in self._holds:
            return SERVER
        template = path_template(endpoint)
        return template if template in self._holds else None

    # ------------------------------------------------------------------ changes

    def begin(
        self,
        entry_id: str,
        endpoint: str,
        response: Response,
        *,
        delay: Callable[[int], float],
        retry_after_seconds: float | None,
    ) -> tuple[float, bool]:
        """Hold the server or the endpoint after an outage's response to an entry.

        ``delay`` returns how long to wait after so many failed probes. Returns how long this entry
        should wait, and whether the hold is a new one.
        """
        is_endpoint = response.status == TOO_MANY
        key = path_template(endpoint) if is_endpoint else SERVER
        with self._lock:
            hold = self._holds.get(key)
            is_new = hold is None
            if hold is None:
                hold = self._holds[key] = _Hold("")
                self._blame_for(entry_id)
            hold.failures += 1
            seconds = max(delay(hold.failures), retry_after_seconds or 0.0)
            hold.at = self._monotonic()
            until = hold.at + seconds
            # A response to an earlier request does not shorten what a later one has set.
            hold.until = max(hold.until, until) if hold.is_fixed else until
            hold.is_fixed = bool(retry_after_seconds) or hold.until > until
            self.is_unsaved |= hold.is_fixed
            hold.why = f"the server responded {response.status}"
            if is_endpoint:
                return seconds, is_new
            blame = self._blame.get(entry_id, 1) - 1
            return seconds * _LATER * 2 ** min(blame, _MAX_BLAME), is_new

    def end(self, entry_id: str, endpoint: str, *, at: float) -> list[str]:
        """End the holds that a response of the service disproves; returns their keys.

        ``at`` is when it came: a hold that has begun since goes on.
        """
        if not self._holds and not self._blame:
            return []
        with self._lock:
            self._blame.pop(entry_id, None)
            keys = [
                key
                for key in (SERVER, path_template(endpoint))
                if key in self._holds and self._holds[key].at <= at
            ]
            for key in keys:
                self.is_unsaved |= self._holds.pop(key).is_fixed
            return keys

    def probe_now(self) -> None:
        """Let a probe be sent at once, unless the server has named a time."""
        with self._lock:
            for hold in self._holds.values():
                if not hold.is_fixed:
                    hold.until = 0.0

    def _blame_for(self, entry_id: str) -> None:
        if len(self._blame) >= _MAX_BLAMED:
            self._blame.clear()
        self._blame[entry_id] = self._blame.get(entry_id, 0) + 1

    # ------------------------------------------------------------------ across processes

    def to_store(self) -> dict[str, StoredHold]:
        """Return the holds that the server has set, by key, to be stored now."""
        now = self._monotonic()
        with self._lock:
            self.is_unsaved = False
            return {
                key: StoredHold(hold.until - now, hold.why)
                for key, hold in self._holds.items()
                if hold.is_fixed and hold.until > now
            }

    def restore(self, stored: Mapping[str, StoredHold]) -> None:
        """Add the holds of an earlier process, or of another one."""
        now = self._monotonic()
        with self._lock:
            for key, found in stored.items():
                hold = self._holds.get(key)
                if found.seconds > 0 and (hold is None or hold.until < now + found.seconds):
                    hold = self._holds.setdefault(key, _Hold(found.why))
                    hold.until, hold.is_fixed, hold.why = now + found.seconds, True, found.why
                    hold.at = now


# -- holds in the file ----------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True):
    """A hold in the file: its end by the file's clock and by the device's."""

    until_ms: int
    until_at: datetime
    why: str


def read_holds(tx: Transaction, stored: str | None) -> dict[str, StoredHold]:
    """Return the holds in the row of a server that have not passed, by key."""
    if stored is None:
        return {}
    rows = msgspec.json.decode(stored, type=dict[str, _Row])
    left = {
        # The file's clock stops while the device is off, the other one can be set. At worst a
        # request is sent too early.
        key: min((row.until_ms - tx.ms) / 1000, (row.until_at - tx.now).total_seconds())
        for key, row in rows.items()
    }
    return {key: StoredHold(left[key], row.why) for key, row in rows.items() if left[key] > 0}


def write_holds(tx: Transaction, server: str, holds: Mapping[str, StoredHold]) -> None:
    """Store these holds on a server, and no others."""
    if not holds:
        tx.rows("forget_holds", row=holds_row(server))
        return
    rows = {
        key: _Row(
            tx.ms + int(hold.seconds * 1000), tx.now + timedelta(seconds=hold.seconds), hold.why
        )
        for key, hold in holds.items()
    }
    tx.rows("save_holds", row=holds_row(server), value=msgspec.json.encode(rows).decode())


def holds_row(server: str) -> str:
    """Return the name of the row with the holds on a server."""
    return f"holds {server}"


# -- time-outs ------------------------------------------------------------------------------------


class RoundTrips:
    """Knowledge of how fast a server responds. Drains of one outbox share it."""

    def __init__(self, *, floor_seconds: float, ceiling_seconds: float) -> None:
        self._floor = floor_seconds
        self._ceiling = ceiling_seconds
        # By path template: smoothed round trip and deviation.
        self._known: dict[str, tuple[float, float]] = {}

    @classmethod
    def of(cls, settings: QueueSettings) -> Self:
        """Return an estimate without samples, with the limits of a queue."""
        return cls(
            floor_seconds=settings.response_floor_seconds,
            ceiling_seconds=settings.response_ceiling_seconds,
        )

    def observe(self, endpoint: str, seconds: float) -> None:
        if len(self._known) >= _MAX_ENDPOINTS:
            self._known.clear()
        for key in (path_template(endpoint), _ALL):
            known = self._known.get(key)
            if known is None:
                self._known[key] = (seconds, seconds / 2)
            else:
                smoothed, deviation = known
                self._known[key] = (
                    smoothed + _GAIN * (seconds - smoothed),
                    deviation + _DEVIATION_GAIN * (abs(seconds - smoothed) - deviation),
                )

    def timeout_seconds(
        self,
        endpoint: str,
        *,
        size: int = 0,
        silent: int = 0,
        floor_seconds: float | None = None,
        ceiling_seconds: float | None = None,
    ) -> float:
        """Return how long to wait for a response to a body of this size.

        ``silent`` is how many sends in a row of the same entry had no response. The limits are the
        queue's, unless they are given; the ceiling holds in any case.
        """
        floor = self._floor if floor_seconds is None else floor_seconds
        ceiling = self._ceiling if ceiling_seconds is None else ceiling_seconds
        known = self._known.get(path_template(endpoint)) or self._known.get(_ALL)
        if known is None:
            seconds = ceiling * _FIRST_SHARE
        else:
            smoothed, deviation = known
            seconds = smoothed + _DEVIATIONS * deviation
        seconds = max(seconds, floor) * float(2 ** min(silent, _MAX_DOUBLINGS))
        return min(seconds + size / _BYTES_PER_SECOND, ceiling)
