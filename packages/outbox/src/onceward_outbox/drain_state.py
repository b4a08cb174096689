"""State of one drain of one user while it runs, and its report at the end."""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from onceward_outbox.entry import Status
from onceward_protocol.response_classification import (
    Misdirected,
    NotTheService,
    SignInNeeded,
    Verdict,
)


class Ended(StrEnum):
    """Why a drain ended."""

    EMPTY = "empty"
    """Nothing is left to send. There may be refused entries."""
    BLOCKED = "blocked"
    """The rest waits for a person, or for a profile."""
    WAITING = "waiting"
    """The rest waits for its next attempt, or for another process that has claimed it."""
    OFFLINE = "offline"
    """The server cannot be reached."""
    HELD = "held"
    """The server is down or overloaded: nothing is sent for a while."""
    SIGNED_OUT = "signed_out"
    """The server does not accept the token. No entry has failed because of that."""
    # ``max_seconds`` have passed.
    TIME_UP = "time_up"
    # The app stopped it.
    STOPPED = "stopped"


class DrainReport(msgspec.Struct, kw_only=True):
    """Report of one drain for one user."""

    # Whose queue it was.
    user_id: str
    # Why it ended.
    ended: Ended = Ended.EMPTY
    # Sends of entries that were begun, those that did not reach the server included.
    tried: int = 0
    # Sends of entries that reached the server, or may have: a refused connection is not one.
    sent: int = 0
    # Entries that happened.
    succeeded: int = 0
    # Entries that will be sent again later.
    retrying: int = 0
    # Entries that became failed: refused, or out of attempts.
    failed: int = 0
    # Left to a person.
    conflicts: int = 0
    # Resolved by the entry's strategy.
    resolved: int = 0
    # Entries that are older than the server accepts.
    expired: int = 0
    # Claims of ended processes that were returned to the queue.
    revived: int = 0
    # Chains that were rebuilt by the profile's recovery.
    rebuilt: int = 0
    # Another process had claimed the entry when the response came.
    lost: int = 0
    # Entries at the end that are still to be sent, or that wait for a decision before that.
    unsent: int = 0
    # Entries at the end that the server has refused for good; nothing waits for them.
    refused: int = 0
    # Profiles of entries that were not sent, because they are not registered.
    unknown_profiles: tuple[str, ...] = ()
    # When the next retry is due.
    next_due_seconds: float | None = None
    # How long the drain took.
    elapsed_seconds: float = 0.0
    # A few words for a person about why it ended.
    detail: str | None = None

    def count_sends(self, count: int, *, reached: bool = True) -> None:
        """Count sends; ``reached``: they reached the server, or may have."""
        self.tried += count
        self.sent += count if reached else 0

    def count(self, status: Status) -> None:
        """Count an entry by its status after a send."""
        match status:
            case Status.SUCCEEDED:
                self.succeeded += 1
            case Status.FAILED:
                self.failed += 1
            case Status.CONFLICT:
                self.conflicts += 1
            case Status.EXPIRED:
                self.expired += 1
            case _:
                pass


class DrainState:
    """State of one drain of one user."""

    def __init__(self, user_id: str, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.report = DrainReport(user_id=user_id)
        # Why to end; None while the drain goes on.
        self.ended: Ended | None = None
        # The network is down: nothing is sent for this long. None if it is up.
        self.hold_seconds: float | None = None
        # Sends in a row without a response, each begun after the last response.
        self.silent_sends = 0
        self._last_response = float("-inf")
        # By entry: when its send began.
        self._sent: dict[str, float] = {}
        # By entry: when a response to the repeat of its request came, which decides nothing so far.
        self._undecided: dict[str, float] = {}
        # The device was off for longer than was counted, so entries may be older than recorded.
        self.has_aged = False
        self.refused_tokens: set[str | None] = set()
        # Sends in a row that got a 401.
        self.refusals = 0
        # Profiles of entries that are not sent, because they are not registered.
        self.unknown_profiles: set[str] = set()

    def note_verdict(self, verdict: Verdict) -> None:
        """Reset the counters that a response of the service ends."""
        if not isinstance(verdict, Misdirected | NotTheService):
            self.silent_sends = 0
            self._last_response = self._monotonic()
        if not isinstance(verdict, SignInNeeded):
            self.refusals = 0

    def note_sent(self, entry_id: str) -> None:
        self._sent[entry_id] = self._monotonic()
        self.forget_undecided(entry_id)

    def sent_at(self, entry_id: str) -> float:
        """Return when the send of an entry began that has no response yet."""
        return self._sent.get(entry_id, self._monotonic())

    def note_received(self, entry_id: str) -> None:
        self._sent.pop(entry_id, None)

    def note_undecided(self, entry_id: str) -> None:
        """Note a response to a repeated request that counts only if the first one gets none."""
        self._undecided[entry_id] = self._monotonic()

    def forget_undecided(self, entry_id: str) -> None:
        self._undecided.pop(entry_id, None)

    def received_at(self, entry_id: str) -> float:
        """Return when the response to an entry came that is looked at now."""
        return self._undecided.pop(entry_id, None) or self._monotonic()

    def count_silent_send(self, entry_id: str) -> bool:
        """Count a send without a response; False if another response came since it began."""
        if self._sent.pop(entry_id, self._last_response) < self._last_response:
            return False
        self.silent_sends += 1
        return True

    def note_refused_token(self, token: str | None) -> None:
        """Count a 401, and remember the token that got it."""
        self.refused_tokens.add(token)
        self.refusals += 1

    def end(self, why: Ended, detail: str | None = None) -> None:
        """End the drain after the current entry."""
        self.ended = why
        self.report.detail = detail

    def hold(self, seconds: float, why: str) -> None:
        self.hold_seconds = seconds
        self.report.detail = why
