"""Bugs of the outbox: its queue, its drain, its clock."""

import re
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import msgspec

from holdfast.core import response_classification as classify
from holdfast.core.outbox_entry import Action, Claimed, Entry, Reason, Status
from holdfast.core.response_classification import Done
from holdfast.outbox import adding, claiming, database, dispatch, placing, sending, unit, upkeep
from holdfast.outbox.dispatch import Dispatcher
from holdfast.outbox.exchange import NoAnswer
from holdfast.outbox.hands import put_aside
from holdfast.outbox.lease import LeaseKeeper
from holdfast.outbox.settings import QueueSettings
from holdfast.outbox.transactions import Transactions
from holdfast_lab.planted.planting import Replacement, bug, inside
from holdfast_lab.simulation.determinism import SteppedKeeper

ADDING, CLAIMING, CLASSIFY, DATABASE, DISPATCH, PLACING, SENDING, UNIT, UPKEEP = (
    inside(module)
    for module in (adding, claiming, classify, database, dispatch, placing, sending, unit, upkeep)
)


def _sql(changes: Mapping[str, tuple[str, str]]) -> list[Replacement]:
    """Change the text of some statements of the outbox."""
    right = UNIT.statement
    wrong = {}
    for name, (old, new) in changes.items():
        assert old in right(name), name
        wrong[name] = right(name).replace(old, new)
    return [(UNIT, "statement", lambda name: wrong.get(name) or right(name))]


@bug
def key_regenerated_on_retry() -> list[Replacement]:
    right = DISPATCH.request_for

    def request_for(entry: Entry, *args: Any, **options: Any) -> Any:
        request = right(entry, *args, **options)
        if entry.attempt_count < 2:
            return request
        key = request.headers["Idempotency-Key"]
        headers = dict(request.headers) | {
            "Idempotency-Key": f"{key[:-2]}{entry.attempt_count % 256:02x}"
        }
        return msgspec.structs.replace(request, headers=headers)

    return [(DISPATCH, "request_for", request_for)]


@bug
def acknowledged_before_the_disk_has_it() -> list[Replacement]:
    lazy = tuple(
        pragma.replace("synchronous = FULL", "synchronous = NORMAL") for pragma in DATABASE._PRAGMAS
    )
    assert lazy != DATABASE._PRAGMAS
    return [(DATABASE, "_PRAGMAS", lazy)]


@bug
def acknowledged_before_the_commit() -> list[Replacement]:
    right = Transactions.end

    def end(self: Any, operation: str, work: Any, *, undo: bool) -> None:
        if operation != "enqueue" or undo:
            right(self, operation, work, undo=undo)
            return
        try:
            self._reach("enqueue.before_commit")
            self._database.rows("COMMIT")
            self._reach("enqueue.after_commit")
        except Exception:  # noqa: BLE001 - "the next write will take it along"
            self._database.rollback()
        finally:
            self._lock.release()

    return [(Transactions, "end", end)]


@bug
def watchdog_frees_live_claims() -> list[Replacement]:
    right = CLAIMING.watchdog

    def watchdog(work: Any) -> Any:
        work.rows("set_clock", **msgspec.structs.asdict(work.moment.row))
        work._database.rows("UPDATE offline_sync_queue SET lease_ms = 0 WHERE status = 'in_flight'")
        return right(work)

    return [(CLAIMING, "watchdog", watchdog)]


@bug
def leases_not_renewed() -> list[Replacement]:
    # The send takes longer than the lease, which nobody renews.
    right = QueueSettings.__init__

    def short(self: Any, **options: Any) -> None:
        right(self, **{"lease_seconds": 10.0} | options)

    return [
        (QueueSettings, "__init__", short),
        (SteppedKeeper, "_beat", lambda _self: False),
        (LeaseKeeper, "_renew_all", lambda _self: None),
    ]


@bug
def in_flight_guessed_as_success() -> list[Replacement]:
    def watchdog(work: Any) -> list[Entry]:
        answer = CLAIMING.Answer(None, None, None, None)
        back = []
        for entry_id, number in work.rows("lapsed", ms=work.ms):
            claimed = Claimed(work.entry(entry_id), number, 0.0)
            back.append(CLAIMING.succeed(work, claimed, answer, server_id=None))
        return back

    return [(CLAIMING, "watchdog", watchdog)]


@bug
def silence_taken_for_success() -> list[Replacement]:
    def unanswered(self: Any, claimed: Claimed, progress: Any, silence: NoAnswer) -> Any:
        if not silence.left:
            return self._unreached(claimed, progress, silence.why)
        return lambda: self._queue.succeed(claimed)

    return [(Dispatcher, "_unanswered", unanswered)]


@bug
def in_progress_taken_for_success() -> list[Replacement]:
    wrong = dict(CLASSIFY.BY_CODE)
    wrong["idempotency.in_progress"] = wrong["IDEMPOTENCY_IN_PROGRESS"] = Done()
    return [(CLASSIFY, "BY_CODE", MappingProxyType(wrong))]


@bug
def order_of_walk_not_kept() -> list[Replacement]:
    def own_lane(draft: Any) -> str | None:
        if draft.new.lane is not None:
            lane: str = draft.new.lane
            return lane
        return None if draft.local_id is None else f"{draft.new.entity_type}/{draft.local_id}"

    return [(PLACING, "own_lane", own_lane)]


@bug
def newest_first() -> list[Replacement]:
    backwards = ("ORDER BY priority DESC, sequence_number", "ORDER BY sequence_number DESC")
    last = ("ORDER BY sequence_number LIMIT 1", "ORDER BY sequence_number DESC LIMIT 1")
    return _sql({"claim": backwards, "claim_some": backwards, "pass_turn": last})


@bug
def followers_go_on_without_their_head() -> list[Replacement]:
    # An entry that is put back no longer keeps those behind it waiting.
    return [(CLAIMING, "_give_back", _giving_the_turn_away(CLAIMING._give_back))]


def _giving_the_turn_away(right: Any) -> Any:
    def give_back(work: Any, claimed: Claimed, action: Action, *args: Any, **options: Any) -> Any:
        entry = right(work, claimed, action, *args, **options)
        if entry.lane is not None and action is Action.RETRY_LATER:
            work._database.rows(
                "UPDATE offline_sync_queue SET turn = 1 WHERE user_id = ? AND lane = ?",
                (entry.user_id, entry.lane),
            )
        return entry

    return give_back


@bug
def retry_after_ignored() -> list[Replacement]:
    return [(Dispatcher, "_floor", lambda _self, _answer: None)]


@bug
def local_ids_not_resolved() -> list[Replacement]:
    return [(SENDING, "replace_in_path", lambda path, _ids: path.replace("{", "").replace("}", ""))]


@bug
def outcome_without_its_mapping() -> list[Replacement]:
    right = CLAIMING._map
    seen: list[int] = []

    def sometimes(*args: Any, **options: Any) -> None:
        seen.append(1)
        if len(seen) % 2:
            right(*args, **options)

    return [(CLAIMING, "_map", sometimes)]


@bug
def same_key_queued_twice() -> list[Replacement]:
    def another(*_: Any) -> Any:
        raise _AgainError

    class _AgainError(Exception):
        pass

    right = ADDING.Batch.add

    def add(self: Any, draft: Any, entry_id: str, *, coalesce: bool) -> Any:
        try:
            return right(self, draft, entry_id, coalesce=coalesce)
        except _AgainError:
            key = f"{draft.key[:-2]}{'00' if draft.key[-2:] != '00' else '01'}"
            fresh = msgspec.structs.replace(draft, key=key)
            return right(self, fresh, entry_id, coalesce=coalesce)

    return [(ADDING, "_same_request", another), (ADDING.Batch, "add", add)]


@bug
def unknown_outcomes_forgotten() -> list[Replacement]:
    right = UNIT.statement("give_back")
    kept = re.search(r"outcome_unknown = (CASE.*?END|coalesce\(.*?\)),", right, re.DOTALL)
    assert kept is not None
    return _sql({"give_back": (kept[0], "outcome_unknown = 0,")})


@bug
def forgotten_keys_sent_again() -> list[Replacement]:
    # What got no answer is sent until one comes, however long the server remembers its key.
    never = lambda *_: False  # noqa: E731
    return [(UPKEEP, "is_forgotten", never), (UPKEEP, "_is_forgotten", never)]


@bug
def age_by_the_wall_clock() -> list[Replacement]:
    def expire_stale(work: Any, user_id: str, cap: timedelta) -> list[Entry]:
        old = []
        for _, entry_id, *_ in work.rows("pending_by_age", user_id=user_id, after=0, limit=200):
            entry = work.entry(entry_id)
            if work.now - entry.created_at > cap and entry.status is Status.PENDING:
                old.append(put_aside(work, entry, Status.EXPIRED, Reason.STALE, None))
        return old

    return [(UPKEEP, "expire_stale", expire_stale)]


@bug
def full_disk_ignored() -> list[Replacement]:
    right = DATABASE.Database.rows

    def rows(self: Any, sql: str, params: Any = ()) -> Any:
        try:
            return right(self, sql, params)
        except DATABASE.DiskFullError:
            return []  # "it will be better next time"

    return [(DATABASE.Database, "rows", rows)]
