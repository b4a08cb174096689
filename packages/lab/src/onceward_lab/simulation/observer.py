"""Sends, responses and reports of one device, for the rules about versions, chains and outages.

It outlives the processes of the device: what a process forgets in a crash has still happened.
"""

from collections import Counter
from typing import Any, Final, Protocol

from onceward_lab.history import Conflict, Contact, Exhausted, Idle, VersionSeen
from onceward_lab.simulation.batches import header_of
from onceward_outbox.entry import Attempt, Entry, Reason, Status, Transition
from onceward_outbox.events import Event, EventKind
from onceward_outbox.transport import NoResponse, Request, Response
from onceward_protocol.operation import Operation
from onceward_protocol.response_classification import UNREACHABLE

__all__ = ["DeviceObserver"]

_OK: Final = frozenset({200, 201})
_HOLDS: Final = frozenset({429, 502, 503, 504})
_OUTAGES: Final = frozenset({401, *_HOLDS})
_MADE_ANEW: Final = frozenset({EventKind.RETRIED, EventKind.EDITED, EventKind.RESOLVED})


class Entries(Protocol):
    """The parts of the queue that are read."""

    def get(self, entry_id: str) -> Entry:
        """Return one entry."""

    def entries(self, user_id: str | None = None, *, limit: int = 100) -> list[Entry]:
        """Return entries in order."""

    def attempts(self, entry_id: str) -> list[Attempt]:
        """Return the sends of an entry."""


class DeviceObserver:
    """Collects the facts of one device."""

    def __init__(self) -> None:
        self.seen: list[VersionSeen] = []
        self.conflicts: list[Conflict] = []
        self.exhausted: list[Exhausted] = []
        self.changed_retries: list[str] = []
        self.sent_after_refusal: list[str] = []
        self.contacts: list[Contact] = []
        self.idle: list[Idle] = []
        # By key: the version of the first send, and whether a result of it is in the file.
        self._version_of_key: dict[str, str | None] = {}
        self._frozen_keys: set[str] = set()
        # Keys whose first send has no result so far.
        self._unrun_keys: set[str] = set()
        # By action: the version sent last and the version read last, with its note.
        self._sent: dict[str, str | None] = {}
        self._read: dict[str, tuple[str, int]] = {}
        # By action: sends whose results are about the entry.
        self._sends: dict[str, int] = {}
        # When the service last responded; by action, when the send began that has no result yet,
        # and when the last one without a response had begun.
        self._last_response = float("-inf")
        self._began: dict[str, float] = {}
        self._silent_since: dict[str, float] = {}
        # By action: conflicts that were noted.
        self._conflict_counts: Counter[str] = Counter()
        # Entries that may not be sent, with the refused one of their chain.
        self._behind_refused: dict[str, str] = {}

    @property
    def has_response(self) -> bool:
        """True once the service has responded to the device."""
        return self._last_response >= 0.0

    def on_send(self, request: Request, action: str, at: float, *, is_parallel: bool) -> None:
        """Note the version that a request names.

        After a crash it is derived again, so ``is_parallel`` edits may get another one if no result
        was stored.
        """
        if request.method != "GET":
            self._began.setdefault(action, at)
        if request.method != "PATCH":
            return
        key, version = request.headers["Idempotency-Key"], header_of(request, "If-Match")
        if _is_placeholder(version):
            return  # the server replaces it by what an earlier item has produced
        if is_parallel and key not in self._frozen_keys:
            self._version_of_key[key] = version
        if key not in self._version_of_key:
            self._unrun_keys.add(key)
        first = self._version_of_key.setdefault(key, version)
        if first != version:
            self.changed_retries.append(f"{action} was sent with {first}, and then with {version}")
        self._sent[action] = version

    def on_result(
        self,
        request: Request,
        action: str,
        result: Response | NoResponse,
        user: str,
        at: float,
        *,
        reads_base: bool,
    ) -> None:
        """Note the version in a response, and whether a send counts as an attempt."""
        if request.method == "PATCH":
            if isinstance(result, NoResponse) and not result.may_have_been_sent:
                self._forget_unrun(request)
            self._unrun_keys.discard(request.headers["Idempotency-Key"])
            version = header_of(request, "If-Match")
            if not _is_placeholder(version):  # or what the server has made of it is known
                self._sent[action] = version
        if request.method != "GET":
            counts = self._is_about_entry(action, result, at)
            self._sends[action] = self._sends.get(action, 0) + counts
        if isinstance(result, Response) and result.status not in _HOLDS:
            is_service = isinstance(result.json(), dict)
            self._last_response = at if is_service else self._last_response
        if not isinstance(result, Response) or result.status not in _OK:
            return
        body = result.json()
        if isinstance(body, dict) and "version" in body:
            how = "response"
            if request.method == "GET":
                how = "base" if reads_base and action not in self._sent else "read"
            note, version = str(body["id"]), body["version"]
            if how != "response":
                self._read[action] = (note, version)
            self._add(user, note, version, at, how, action)

    def on_no_result(self, request: Request, action: str) -> None:
        """Note that the results of a batch say nothing about an entry: it was not run."""
        self._began.pop(action, None)
        self._forget_unrun(request)

    def _forget_unrun(self, request: Request) -> None:
        key = request.headers["Idempotency-Key"]
        if key in self._unrun_keys:  # the next send is the first one
            self._unrun_keys.discard(key)
            self._version_of_key.pop(key, None)

    def _is_about_entry(self, action: str, result: Response | NoResponse, at: float) -> bool:
        """Return whether a send counts as an attempt: outages and a silent server do not."""
        began = self._began.pop(action, None)
        if isinstance(result, Response):
            return result.status not in _OUTAGES and isinstance(result.json(), dict)
        since = self._silent_since.get(action, at if began is None else began)
        if began is not None:
            self._silent_since[action] = began
        # Otherwise the server has responded to nothing.
        return result.may_have_been_sent and self._last_response >= since

    def on_start(self, queue: Entries, users: list[str], at: float) -> None:
        """Note the conflicts that are in the file, and that a process was killed before reporting.

        Their events are lost. What was resolved on its own is sent all the same.
        """
        for user in users:
            for entry in queue.entries(user, limit=1000):
                if entry.operation is Operation.PATCH:
                    action = action_of(entry)
                    stored = sum(
                        attempt.outcome is Transition.CONFLICT
                        for attempt in queue.attempts(entry.id)
                    )
                    for _ in range(stored - self._conflict_counts[action]):
                        self._on_conflict(action, user, at)

    def on_decision(self, user: str, action: str, at: float) -> None:
        """Note that a person has seen the server's side of a conflict."""
        read = self._read.get(action)
        if read is not None:
            self._add(user, *read, at, "decided", None)

    def on_event(self, event: Event, queue: Entries, at: float) -> None:
        """Note what the app gets to know."""
        if event.entry_id is None or event.user_id is None:
            return
        entry_id = event.entry_id
        if event.kind is EventKind.SENT and entry_id in self._behind_refused:
            self.sent_after_refusal.append(
                f"{action_of(queue.get(entry_id))} was sent after the refusal of "
                f"{self._behind_refused[entry_id]}"
            )
        elif event.kind is EventKind.RETRYING:
            key = queue.get(entry_id).idempotency_key
            if key in self._version_of_key and _was_sent(event):
                self._frozen_keys.add(key)
        elif event.kind is EventKind.CONFLICT:
            self._on_conflict(action_of(queue.get(entry_id)), event.user_id, at)
        elif event.kind is EventKind.FAILED:
            self._on_failure(event, queue)
        elif event.kind in _MADE_ANEW:
            entry = queue.get(entry_id)
            self._sends.pop(action_of(entry), None)
            if not entry.outcome_unknown:  # the server has refused it, so it was not made
                self._version_of_key.pop(entry.idempotency_key, None)
                self._frozen_keys.discard(entry.idempotency_key)
            self._behind_refused = {
                behind: refused
                for behind, refused in self._behind_refused.items()
                if entry_id not in {refused, behind}
            }

    def _on_conflict(self, action: str, user: str, at: float) -> None:
        self._conflict_counts[action] += 1
        note, theirs = self._read.get(action, (None, None))
        if note is None or theirs is None:
            return
        sent = self._sent.get(action)
        number = None if sent in (None, "*") else int(str(sent).strip('"'))
        if number == theirs:  # read before it was sent: the server's side could not be read after
            return
        self.conflicts.append(Conflict(entity=note, action=action, sent=number, theirs=theirs))
        self._add(user, note, theirs, at, "conflict", action)

    def _on_failure(self, event: Event, queue: Entries) -> None:
        entry = queue.get(str(event.entry_id))
        if event.reason is Reason.ATTEMPTS:
            action = action_of(entry)
            sends = self._sends.get(action, 0)
            self.exhausted.append(
                Exhausted(action=action, max_attempts=entry.max_attempts, sends=sends)
            )
        if event.reason is not Reason.RESPONSE or entry.chain is None or entry.outcome_unknown:
            return
        for other in queue.entries(entry.user_id, limit=1000):
            is_behind = other.sequence_number > entry.sequence_number
            is_open = other.status in (Status.PENDING, Status.FAILED)
            if is_behind and is_open and other.chain == entry.chain:
                self._behind_refused[other.id] = entry.id

    def _add(  # noqa: PLR0917
        self, user: str, note: str, version: int, at: float, how: str, action: str | None
    ) -> None:
        self.seen.append(
            VersionSeen(user=user, entity=note, version=version, at=at, how=how, action=action)
        )


def _is_placeholder(version: str | None) -> bool:
    return version is not None and version.startswith("{version:")


def _was_sent(event: Event) -> bool:
    """Return whether an entry that is retried had reached the server, or may have."""
    return event.http_status is not None or event.code != UNREACHABLE


def action_of(entry: Entry) -> str:
    """Return the user action of an entry."""
    payload: dict[str, Any] = entry.decoded()
    name: str = payload["action_id"]
    return name
