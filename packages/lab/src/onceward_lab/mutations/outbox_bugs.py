"""Bugs of the outbox: queue, drain, clock."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from onceward_lab.mutations.planting import Replacement, bug, untyped
from onceward_lab.simulation.determinism import SimulatedLeaseRenewer
from onceward_outbox import (
    completion,
    database,
    enqueue,
    maintenance,
    requests,
    sender,
    transaction,
)
from onceward_outbox.backoff import Backoff
from onceward_outbox.drain_run import LeaseRenewer
from onceward_outbox.entry import Claimed, Entry, Reason, Status, Transition
from onceward_outbox.outcome import Succeeded
from onceward_outbox.resolution import settle_unclaimed
from onceward_outbox.responses import Responses
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transaction import Transactions
from onceward_outbox.transport import NoResponse
from onceward_protocol import response_classification as classify
from onceward_protocol.response_classification import Done
from onceward_protocol.staleness import CAP

COMPLETION, CLASSIFY, DATABASE, ENQUEUE, MAINTENANCE, REQUEST, SENDER, TRANSACTION = (
    untyped(module)
    for module in (
        completion,
        classify,
        database,
        enqueue,
        maintenance,
        requests,
        sender,
        transaction,
    )
)


def _sql(changes: Mapping[str, tuple[str, str]]) -> list[Replacement]:
    """Change the text of some statements of the outbox."""
    right = TRANSACTION.statement
    wrong = {}
    for name, (old, new) in changes.items():
        assert old in right(name), name
        wrong[name] = right(name).replace(old, new)
    return [(TRANSACTION, "statement", lambda name: wrong.get(name) or right(name))]


@bug
def key_regenerated_on_retry() -> list[Replacement]:
    right = SENDER.build_request

    def build_request(entry: Entry, *args: Any, **options: Any) -> Any:
        request = right(entry, *args, **options)
        if entry.attempt_count < 2:
            return request
        key = request.headers["Idempotency-Key"]
        headers = dict(request.headers) | {
            "Idempotency-Key": f"{key[:-2]}{entry.attempt_count % 256:02x}"
        }
        return msgspec.structs.replace(request, headers=headers)

    return [(SENDER, "build_request", build_request)]


@bug
def acknowledged_before_the_sync() -> list[Replacement]:
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
        except Exception:  # noqa: BLE001 - "the next write will commit it"
            self._database.rollback()
        finally:
            self._lock.release()

    return [(Transactions, "end", end)]


@bug
def watchdog_frees_live_claims() -> list[Replacement]:
    right = COMPLETION.return_expired_claims

    def watchdog(work: Any) -> Any:
        work.rows("set_clock", **msgspec.structs.asdict(work.clock.row))
        work._database.rows("UPDATE offline_sync_queue SET lease_ms = 0 WHERE status = 'in_flight'")
        return right(work)

    return [(COMPLETION, "return_expired_claims", watchdog)]


@bug
def leases_not_renewed() -> list[Replacement]:
    # The send takes longer than the lease.
    right = QueueSettings.__init__

    def short(self: Any, **options: Any) -> None:
        right(self, **{"lease_seconds": 10.0} | options)

    return [
        (QueueSettings, "__init__", short),
        (SimulatedLeaseRenewer, "_renew", lambda _self: False),
        (LeaseRenewer, "_renew_all", lambda _self: None),
    ]


@bug
def in_flight_guessed_as_success() -> list[Replacement]:
    def watchdog(work: Any) -> list[Entry]:
        back = []
        for entry_id, number in work.rows("lapsed", ms=work.ms):
            claimed = Claimed(work.entry(entry_id), number, 0.0)
            back.append(COMPLETION._succeed(work, claimed, Succeeded()))
        return back

    return [(COMPLETION, "return_expired_claims", watchdog)]


@bug
def missing_response_taken_for_success() -> list[Replacement]:
    right = Responses.no_response

    def no_response(self: Any, sends: Any, failure: NoResponse) -> Any:
        if not failure.may_have_been_sent or len(sends) > 1:
            return right(self, sends, failure)
        return [Succeeded()]

    return [(Responses, "no_response", no_response)]


@bug
def in_progress_taken_for_success() -> list[Replacement]:
    wrong = dict(CLASSIFY.BY_CODE)
    wrong["idempotency.in_progress"] = wrong["IDEMPOTENCY_IN_PROGRESS"] = Done()
    return [(CLASSIFY, "BY_CODE", MappingProxyType(wrong))]


@bug
def order_of_walk_ignored() -> list[Replacement]:
    def explicit_lane(draft: Any) -> str | None:
        if draft.new.lane is not None:
            lane: str = draft.new.lane
            return lane
        return None if draft.local_id is None else f"{draft.new.entity_type}/{draft.local_id}"

    return [(ENQUEUE, "_explicit_lane", explicit_lane)]


@bug
def newest_first() -> list[Replacement]:
    backwards = ("ORDER BY priority DESC, sequence_number", "ORDER BY sequence_number DESC")
    last = ("ORDER BY sequence_number LIMIT 1", "ORDER BY sequence_number DESC LIMIT 1")
    return _sql({"claim_some": backwards, "pass_turn": last})


@bug
def followers_do_not_wait() -> list[Replacement]:
    # The entries after one that is retried later do not wait for it.
    return [(COMPLETION, "_end_claim", _passing_the_turn(COMPLETION._end_claim))]


def _passing_the_turn(right: Any) -> Any:
    def end_claim(
        work: Any, claimed: Claimed, transition: Transition, *args: Any, **options: Any
    ) -> Any:
        entry = right(work, claimed, transition, *args, **options)
        if entry.lane is not None and transition is Transition.RETRY_LATER:
            work._database.rows(
                "UPDATE offline_sync_queue SET turn = 1 WHERE user_id = ? AND lane = ?",
                (entry.user_id, entry.lane),
            )
        return entry

    return end_claim


@bug
def retry_after_ignored() -> list[Replacement]:
    return [(Backoff, "retry_after", lambda _self, _response: None)]


@bug
def local_ids_not_resolved() -> list[Replacement]:
    return [(REQUEST, "replace_in_path", lambda path, _ids: path.replace("{", "").replace("}", ""))]


@bug
def outcome_without_its_mapping() -> list[Replacement]:
    right = COMPLETION._map
    seen: list[int] = []

    def sometimes(*args: Any, **options: Any) -> None:
        seen.append(1)
        if len(seen) % 2:
            right(*args, **options)

    return [(COMPLETION, "_map", sometimes)]


@bug
def same_key_queued_twice() -> list[Replacement]:
    def another(*_: Any) -> Any:
        raise _AgainError

    class _AgainError(Exception):
        pass

    right = ENQUEUE._add

    def add(tx: Any, draft: Any, *args: Any, **options: Any) -> Any:
        try:
            return right(tx, draft, *args, **options)
        except _AgainError:
            key = f"{draft.key[:-2]}{'00' if draft.key[-2:] != '00' else '01'}"
            return right(tx, msgspec.structs.replace(draft, key=key), *args, **options)

    return [(ENQUEUE, "_same_request", another), (ENQUEUE, "_add", add)]


@bug
def unknown_outcomes_forgotten() -> list[Replacement]:
    right = TRANSACTION.statement("end_claim")
    kept = re.search(r"outcome_unknown = (CASE.*?END|coalesce\(.*?\)),", right, re.DOTALL)
    assert kept is not None
    return _sql({"end_claim": (kept[0], "outcome_unknown = 0,")})


@bug
def forgotten_keys_sent_again() -> list[Replacement]:
    # Sends without a response are repeated, even after the server has forgotten the key.
    never = lambda *_: False  # noqa: E731
    return [(MAINTENANCE, "_key_expired", never)]


@bug
def age_by_the_wall_clock() -> list[Replacement]:
    def expire_stale(work: Any, user_id: str, settings: QueueSettings) -> list[Entry]:
        old = []
        for _, entry_id, *_ in work.rows("pending_by_age", user_id=user_id, after=0, limit=200):
            entry = work.entry(entry_id)
            cap = settings.stale_after or work.profiles.get(entry.profile).stale_after or CAP
            if work.now - entry.created_at > cap and entry.status is Status.PENDING:
                old.append(settle_unclaimed(work, entry, Status.EXPIRED, Reason.STALE, None))
        return old

    return [(MAINTENANCE, "expire_stale", expire_stale)]


@bug
def full_disk_ignored() -> list[Replacement]:
    right = DATABASE.Database.rows

    def rows(self: Any, sql: str, params: Any = ()) -> Any:
        try:
            return right(self, sql, params)
        except DATABASE.DiskFullError:
            return []  # "the next write will succeed"

    return [(DATABASE.Database, "rows", rows)]
