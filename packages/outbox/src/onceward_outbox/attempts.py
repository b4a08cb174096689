"""The attempts of entries: which of them count, when the next one is, and which was the last.

An attempt counts if it says something about its entry. A server or a network that responds to
nothing says nothing about it: no outage makes an entry fail.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from onceward_outbox.completion import ABANDONED
from onceward_outbox.drain_state import DrainState
from onceward_outbox.entry import Entry, Transition
from onceward_outbox.outcome import AttemptResult, RetryLater
from onceward_outbox.profile import Profile
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.sequences import VIOLATION_CODES
from onceward_protocol.clock import Clock
from onceward_protocol.response_classification import (
    BY_CODE,
    SILENT,
    UNREACHABLE,
    counts_as_attempt,
)
from onceward_protocol.retry import RetryPolicy

__all__ = ["Attempts", "Retry"]

_MAX_SILENT_ENTRIES: Final = 10_000
_UNPROCESSABLE: Final = 422
_UNCOUNTED: Final = frozenset({Transition.RELEASE, Transition.WATCHDOG})

Retry = RetryPolicy | Callable[[Profile], RetryPolicy]
"""One policy for all entries, or one by profile."""


class Attempts:
    """The attempts of one wake-up, and those that the queue has recorded."""

    def __init__(
        self, queue: OutboxQueue, retry: Retry | None, clock: Clock, chance: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._retry = retry
        self._clock = clock
        self._chance = chance
        self._failed: Counter[str] = Counter()
        # When the service last responded, and by entry id: when its last silent send began.
        self._last_response = float("-inf")
        self._silent_since: dict[str, float] = {}

    def reset(self) -> None:
        """Begin a new wake-up."""
        self._failed.clear()

    def failed(self, entry: Entry) -> int:
        """Return how many attempts of this wake-up have failed."""
        return self._failed[entry.id]

    def are_exhausted(self, entry: Entry) -> bool:
        """Return whether an entry has had all its attempts of this wake-up."""
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
        for attempt in reversed(self._queue.attempts(entry.id)):
            if left <= 0:
                return False
            is_known = (
                attempt.code in BY_CODE
                or attempt.code in codes
                or attempt.code in VIOLATION_CODES
                or attempt.code == UNREACHABLE
            )
            if attempt.status == _UNPROCESSABLE and not is_known:
                return True
            left -= attempt.outcome not in _UNCOUNTED
        return False

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

    def note_response(self, entry: Entry) -> None:
        """Note that the service has responded to an entry."""
        self._last_response = self._clock.monotonic()
        self._silent_since.pop(entry.id, None)

    def _probing(self, policy: RetryPolicy) -> RetryPolicy:
        """Return a policy with the longest delay between two probes.

        For an attempt that says nothing about the entry, such as a silent server. The delay grows
        with all attempts, also those of an outage, and would keep the lane waiting long after it.
        """
        ceiling = max(policy.first_seconds, self._queue.settings.max_probe_seconds)
        if policy.ceiling_seconds <= ceiling:
            return policy
        return replace(policy, ceiling_seconds=ceiling)
