"""Bugs of the outbox about holds: while a server is down, and after it."""

from typing import Any

from onceward_lab.mutations.planting import Replacement, bug, untyped
from onceward_outbox import drain_run, responses
from onceward_outbox.backoff import Outages
from onceward_outbox.drain import Drain

DRAIN_RUN, RESPONSES = untyped(drain_run), untyped(responses)


@bug
def two_probes_at_once() -> list[Replacement]:
    return [(DRAIN_RUN.DrainRun, "_may_probe", lambda _self, _entry: True)]


@bug
def hold_ignored_by_the_next_user() -> list[Replacement]:
    # Each user has holds of their own; after a restart those in the file still count.
    right_run, right_restore = Drain.run, Outages.restore
    restored: list[Outages] = []
    holds: dict[tuple[int, str], Any] = {}

    def run(self: Any, user_id: str, **options: Any) -> Any:
        own = holds.setdefault((id(self), user_id), (self, {}))
        self.outages._holds = own[1]
        return right_run(self, user_id, **options)

    def restore(self: Outages, stored: Any) -> None:
        if not any(known is self for known in restored):
            restored.append(self)
            right_restore(self, stored)

    return [(Drain, "run", run), (Outages, "restore", restore)]


@bug
def retry_after_forgotten_after_a_restart() -> list[Replacement]:
    def to_store(self: Outages) -> dict[str, Any]:
        self.is_unsaved = False
        return {}

    return [(Outages, "to_store", to_store)]


@bug
def hold_that_passes_after_the_claim_ends_the_drain() -> list[Replacement]:
    def due_seconds(self: Any) -> float | None:
        queue, user_id, outages = self._queue, self._user_id, self._server.outages
        due, server, paths = (
            queue.next_due_seconds(user_id),
            outages.server_seconds(),
            outages.paths(),
        )
        if not server and not paths:
            return due  # type: ignore[no-any-return]
        is_ready = queue.next_eligible(user_id) is not None
        if server:
            return server if is_ready else None if due is None else max(due, server)
        held = min(paths.values()) if is_ready else None
        return min((seconds for seconds in (due, held) if seconds is not None), default=None)

    return [(DRAIN_RUN.DrainRun, "_due_seconds", due_seconds)]


@bug
def failed_probe_begins_no_hold() -> list[Replacement]:
    # The next request follows the failed probe at once, as forty did before there were holds.
    right = Outages.begin

    def begin(self: Outages, *args: Any, **options: Any) -> Any:
        before = dict(self._holds)
        untils = {key: hold.until for key, hold in before.items()}
        result = right(self, *args, **options)
        for key, until in untils.items():
            self._holds[key].until = until
        return result

    return [(Outages, "begin", begin)]


@bug
def read_during_an_outage_is_followed_by_the_write() -> list[Replacement]:
    # Also a read before an entry holds the server.
    right = RESPONSES.Responses._ask_time

    def ask_time(self: Any, send: Any) -> Any:
        outcome = yield from right(self, send)
        result = getattr(outcome, "result", None)
        is_down = result is not None and "responded" in str(result.error)
        return None if is_down else outcome

    return [(RESPONSES.Responses, "_ask_time", ask_time)]
