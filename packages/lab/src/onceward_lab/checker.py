"""Checks a history against Onceward's guarantees.

A rule reads the history and nothing else, so it also applies to another implementation.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import pairwise
from typing import Final, TypeVar

import msgspec

from onceward_lab.history import (
    EntryState,
    Expect,
    History,
    ResponseSeen,
    UserAction,
    VersionSeen,
    Write,
)
from onceward_lab.holds import DeviceHolds

__all__ = ["RULES", "Rule", "Violation", "check"]

_T = TypeVar("_T")
_K = TypeVar("_K")

# Temporary: the next attempt may get another response.
_TEMPORARY: Final = frozenset({401, 403, 408, 424, 425, 429})
_SERVER_ERROR: Final = 500
_ERROR: Final = 400
_IN_PROGRESS: Final = frozenset({"IDEMPOTENCY_IN_PROGRESS", "idempotency.in_progress"})
_MISMATCH: Final = frozenset({"IDEMPOTENCY_CONFLICT", "idempotency.payload_mismatch"})
_DONE: Final = "succeeded"
_MAX_DELAY_SECONDS: Final = 120.0
_MAX_HOLD_SECONDS: Final = 310.0
"""The longest pause between two probes, and a little."""

_UNFINISHED: Final = frozenset({"pending", "in_flight"})


class Rule(StrEnum):
    """The guarantees."""

    EXACTLY_ONCE = "acknowledged: exactly one effect"
    AT_MOST_ONCE = "unacknowledged: at most one effect"
    NO_INVENTION = "every effect has a user action"
    REFUSED_HAS_NO_EFFECT = "refused: no effect"
    STATUS_IS_TRUE = "the status on the device matches the effects"
    NEVER_LOST = "acknowledged: still on the device"
    ONE_ENTRY = "one entry per user action"
    SAME_RESPONSE = "same key: identical response"
    OTHER_PAYLOAD = "same key, other payload: refused"
    OWN_RESPONSES = "tenants never see each other's responses"
    ORDER = "per-user effects in the device's order"
    SEQUENCES = "numbers of a strict sequence: in order, each once, without gaps"
    LANES = "effects of a lane of batches in its order"
    RECORDED = "a response is sent once its record is committed, and equals it"
    SKIPPED = "what is skipped or fails leaves neither record nor effect"
    JOB_WITH_EFFECT = "effect if and only if job"
    JOB_ENDS_ONCE = "every job ends in one marker or one dead letter"
    JOB_EFFECT_ONCE = "a completed job has one effect, a dead-lettered job none"
    FENCED = "a stale fencing token never commits"
    PAUSED = "no job of a paused queue is started"
    CANCELLED = "a job that was cancelled while it waited does not run"
    JOB_ORDER = "ordered jobs run in the order of their commits"
    FOLLOWED = "a job that follows a state sees the last state"
    RESTORED = "after a restore: no success without its effect"
    NO_OVERWRITE = "no foreign write is overwritten without a conflict"
    OWN_EDITS = "a person's own edits never conflict with each other"
    NEWER_EDITS = "an older edit never overwrites a newer one without a conflict"
    SAME_VERSION = "a retry names the version of the first send"
    INDEPENDENT = "one refusal never delays an independent entry"
    CHAINED = "after a refusal nothing more of its chain is sent"
    OUTAGES = "no entry fails because of an outage"
    HELD = "nothing is sent before a hold ends"
    PROBED = "after a hold one request at a time, until the server responds"
    RESUMED = "after a hold, what can be sent is sent"
    DRAINS = "everything drains in time after the last fault"
    NO_OTHER_ERROR = "no error without an injected fault"


class Violation(msgspec.Struct, frozen=True):
    """A broken rule, and what broke it."""

    rule: Rule
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


def check(history: History) -> list[Violation]:
    """Return all violations in the order of the rules; empty if there are none."""
    return [violation for rule in RULES for violation in rule(history)]


# -- effects ----------------------------------------------------------------------------------


def _effects(history: History) -> Iterator[Violation]:
    counts = _grouped(history.effects, lambda effect: (effect.tenant, effect.action))
    known = {(action.tenant, action.id) for action in history.actions}
    for tenant, action_id in counts:
        if (tenant, action_id) not in known:
            yield Violation(Rule.NO_INVENTION, f"{action_id} of {tenant} has no user action")
    entries = {entry.action: entry for entry in history.entries}
    for action in history.actions:
        count = len(counts.get((action.tenant, action.id), ()))
        yield from _effects_of(action, count, entries.get(action.id))


def _effects_of(action: UserAction, count: int, entry: EntryState | None) -> Iterator[Violation]:
    status = None if entry is None else entry.status
    if action.expect is Expect.REFUSAL and count:
        yield Violation(Rule.REFUSED_HAS_NO_EFFECT, f"{action.id} has {count} effects")
    elif count > 1:
        rule = Rule.EXACTLY_ONCE if action.acknowledged else Rule.AT_MOST_ONCE
        yield Violation(rule, f"{action.id} has {count} effects")
    elif action.lost:
        return
    elif action.acknowledged and _must_happen(action, entry) and count != 1:
        yield Violation(Rule.EXACTLY_ONCE, f"{action.id} has no effect (on the device: {status})")
    if entry is None or status in _UNFINISHED or entry.outcome_unknown:
        return
    if (status == _DONE) != (count >= 1):
        yield Violation(
            Rule.STATUS_IS_TRUE, f"{action.id} is {status} on the device and has {count} effects"
        )


def _must_happen(action: UserAction, entry: EntryState | None) -> bool:
    """Return whether an effect is expected; whether a conflict was right is another rule."""
    return action.expect is Expect.EFFECT and not (entry is not None and entry.had_conflict)


def _entries(history: History) -> Iterator[Violation]:
    """Compare with the outbox files; skipped if the history has no entries."""
    if not history.entries:
        return
    entries_by_action = _grouped(history.entries, lambda entry: entry.action)
    for action in history.actions:
        entries = entries_by_action.get(action.id, [])
        if action.acknowledged and action.has_entry and not entries:
            yield Violation(Rule.NEVER_LOST, f"{action.id} is not in the file of {action.device}")
        if len(entries) > 1:
            yield Violation(Rule.ONE_ENTRY, f"{action.id} has {len(entries)} entries")
        if action.key is not None and any(
            e.key not in (None, action.key) and not e.had_conflict for e in entries
        ):
            yield Violation(
                Rule.ONE_ENTRY, f"{action.id} was queued as {action.key} and got another key"
            )


def _order(history: History) -> Iterator[Violation]:
    actions = {action.id: action for action in history.actions if action.in_order}
    last: dict[tuple[str, str, str | None], UserAction] = {}
    for effect in sorted(history.effects, key=lambda effect: effect.number):
        action = actions.get(effect.action)
        if action is None:
            continue
        line = (action.device, action.user, action.lane)
        before = last.get(line)
        if before is not None and before.position > action.position:
            rule = Rule.ORDER if action.lane is None else Rule.LANES
            yield Violation(rule, f"{action.id} took effect after {before.id}, a later action")
        last[line] = action


# -- responses --------------------------------------------------------------------------------


def _responses(history: History) -> Iterator[Violation]:
    for response in history.responses:
        if response.data_of is not None and response.data_of != response.tenant:
            yield Violation(
                Rule.OWN_RESPONSES, f"{response.tenant} received data of {response.data_of}"
            )
    final = [response for response in history.responses if _is_final(response)]
    for (tenant, key), every in _grouped(final, lambda r: (r.tenant, r.key)).items():
        responses = [response for response in every if not response.is_unsettled]
        accepted = [response for response in responses if response.code not in _MISMATCH]
        if responses and all(response.code in _MISMATCH for response in every):
            # This tenant never used the key: the conflict reveals another tenant's request.
            yield Violation(Rule.OWN_RESPONSES, f"{tenant} got a conflict for unused key {key}")
        requests = sorted({response.request for response in accepted if _is_replayed(response)})
        if len(requests) > 1:
            yield Violation(
                Rule.OTHER_PAYLOAD, f"{key} was accepted for {' and for '.join(requests)}"
            )
        for same in _grouped(accepted, lambda r: r.request).values():
            seen = {(response.status, response.body) for response in same if _is_replayed(response)}
            if len(seen) > 1:
                statuses = " and ".join(str(status) for status, _ in sorted(seen))
                yield Violation(Rule.SAME_RESPONSE, f"{key} got different responses: {statuses}")


def _records(history: History) -> Iterator[Violation]:
    for what in history.unrecorded:
        yield Violation(Rule.RECORDED, what)
    for what in history.left_behind:
        yield Violation(Rule.SKIPPED, what)


def _after_restore(history: History) -> Iterator[Violation]:
    happened = {effect.action for effect in history.effects}
    for response in history.responses:
        is_success = response.is_after_restore and response.status < _ERROR
        if is_success and response.action is not None and response.action not in happened:
            yield Violation(
                Rule.RESTORED, f"{response.action} got {response.status} and has no effect"
            )


def _is_final(response: ResponseSeen) -> bool:
    return (
        response.status < _SERVER_ERROR
        and response.status not in _TEMPORARY
        and response.code not in _IN_PROGRESS
    )


def _is_replayed(response: ResponseSeen) -> bool:
    return response.status < _ERROR or response.stored


# -- sequences --------------------------------------------------------------------------------


def _sequences(history: History) -> Iterator[Violation]:
    for stream, moves in _grouped(history.moves, lambda move: move.stream).items():
        last = 0
        for move in sorted(moves, key=lambda move: move.number):
            if move.sequence <= last:
                yield Violation(
                    Rule.SEQUENCES, f"number {move.sequence} of {stream} ran after number {last}"
                )
            last = move.sequence
    if history.are_versions_lost:  # numbers were lost, too
        return
    for stream, used in history.used_numbers.items():
        ran = [move for move in history.moves if move.stream == stream]
        refused = sum(
            1 + action.retries
            for action in history.actions
            if action.expect is not Expect.EFFECT and stream.startswith(f"{action.tenant} ")
        )
        # A refusal that is stored uses its number, and so may what was given up.
        if not len(ran) <= used <= len(ran) + refused:
            yield Violation(
                Rule.SEQUENCES, f"{stream} has used {used} numbers for {len(ran)} effects"
            )
        if any(move.sequence > used for move in ran):
            yield Violation(Rule.SEQUENCES, f"{stream} has run a number that is not stored")


# -- jobs -------------------------------------------------------------------------------------


def _jobs_of_effects(history: History) -> Iterator[Violation]:
    expected = {action.id for action in history.actions if action.enqueues_job}
    happened = {effect.action for effect in history.effects}
    jobs = _grouped((job for job in history.jobs if job.action is not None), lambda job: job.action)
    for action_id in sorted(happened & expected):
        count = len(jobs.get(action_id, ()))
        if count != 1:
            yield Violation(Rule.JOB_WITH_EFFECT, f"{action_id} has an effect and {count} jobs")
    for action_id in sorted(str(action) for action in jobs if action not in happened):
        yield Violation(Rule.JOB_WITH_EFFECT, f"{action_id} has a job and no effect")


def _job_endings(history: History) -> Iterator[Violation]:
    effects = _grouped(history.job_effects, lambda effect: (effect.tenant, effect.job_id))
    known = {(job.tenant, job.job_id) for job in history.jobs}
    for tenant, job_id in effects:
        if (tenant, job_id) not in known:
            yield Violation(Rule.JOB_ENDS_ONCE, f"job {job_id} has an effect and is in no table")
    for job in history.jobs:
        endings = (job.marker is not None) + job.is_dead
        if endings != 1 or job.is_waiting:
            states = [
                name
                for name, applies in (
                    ("is waiting", job.is_waiting),
                    ("has a marker", job.marker is not None),
                    ("is dead-lettered", job.is_dead),
                )
                if applies
            ]
            yield Violation(Rule.JOB_ENDS_ONCE, f"job {job.job_id} {' and '.join(states)}")
        written = effects.get((job.tenant, job.job_id), [])
        expected = int(job.marker is not None) if job.writes else 0
        if len(written) != expected:
            yield Violation(
                Rule.JOB_EFFECT_ONCE, f"job {job.job_id} has {len(written)} effects, not {expected}"
            )
        for effect in written:
            if job.marker is not None and effect.attempt != job.marker:
                yield Violation(
                    Rule.FENCED,
                    f"job {job.job_id}: attempt {effect.attempt} committed while attempt "
                    f"{job.marker} held the lease",
                )
            elif effect.is_stale:
                yield Violation(
                    Rule.FENCED, f"job {job.job_id} was committed without the lease, which is lost"
                )


def _operator_actions(history: History) -> Iterator[Violation]:
    for effect in history.job_effects:
        if effect.is_of_paused_queue:
            yield Violation(Rule.PAUSED, f"job {effect.job_id} was claimed while it was paused")
    ran = {(effect.tenant, effect.job_id) for effect in history.job_effects}
    ran |= {(job.tenant, job.job_id) for job in history.jobs if job.marker is not None}
    for tenant, job_id in history.cancelled_jobs:
        if (tenant, job_id) in ran:
            yield Violation(Rule.CANCELLED, f"job {job_id} of {tenant} has run")


def _job_order(history: History) -> Iterator[Violation]:
    last: dict[tuple[str, str], int] = {}
    for effect in sorted(history.job_effects, key=lambda effect: effect.number):
        if effect.order is None:
            continue
        order = (effect.tenant, effect.order)
        if last.get(order, effect.position) > effect.position:
            yield Violation(
                Rule.JOB_ORDER,
                f"job {effect.position} of {effect.order} ran after job {last[order]}",
            )
        last[order] = effect.position


def _follow_ups(history: History) -> Iterator[Violation]:
    for follow_up in history.follow_ups:
        if follow_up.seen != follow_up.wanted:
            yield Violation(
                Rule.FOLLOWED,
                f"{follow_up.name} of {follow_up.tenant} has seen {follow_up.seen} of "
                f"{follow_up.wanted}",
            )


# -- versions ---------------------------------------------------------------------------------


def _overwrites(history: History) -> Iterator[Violation]:
    """Look for foreign writes between what a change was made on and what it wrote."""
    if history.are_versions_lost:
        return
    actions = {action.id: action for action in history.actions}
    seen = _grouped(history.seen, lambda one: (one.user, one.entity))
    for entity, writes in _grouped(history.writes, lambda write: write.entity).items():
        for write in writes:
            action = actions.get(write.action)
            if write.is_foreign or action is None:
                continue
            known = seen.get((action.user, entity), [])
            # A read for another edit does not say what this one was made on.
            is_first = not any(
                one.version < write.version
                for one in known
                if (one.how == "response" and one.at < action.first_sent_at)
                or one.at < action.enqueued_at
            )
            if not write.is_checked and is_first and action.may_force:
                # No version of it was known.
                continue
            noticed = max(_noticed(action, known, write, writes), default=0)
            for other in writes:
                if other.is_foreign and noticed < other.version < write.version:
                    yield Violation(
                        Rule.NO_OVERWRITE,
                        f"{action.id} wrote version {write.version} of {entity} over version "
                        f"{other.version}, having seen version {noticed}",
                    )


def _noticed(
    action: UserAction, known: Iterable[VersionSeen], write: Write, writes: Iterable[Write]
) -> Iterator[int]:
    """Yield the versions that a change was made on, or that its conflicts were about."""
    known = list(known)
    # Made on no known version: it is based on what the device reads, also for an edit before it.
    is_blind = not any(one.at < action.enqueued_at for one in known)
    for one in known:
        is_own = one.how == "conflict" and (is_blind or one.action == action.id)
        if is_own or one.how in {"base", "decided"} or one.at < action.enqueued_at:
            yield one.version
    for other in writes:  # what was written without a check is the base of what follows
        if not other.is_foreign and not other.is_checked and other.version < write.version:
            yield other.version


def _own_conflicts(history: History) -> Iterator[Violation]:
    if history.are_versions_lost:
        return
    actions = {action.id: action for action in history.actions}
    succeeded = {entry.action for entry in history.entries if entry.status == _DONE}
    writes = _grouped(history.writes, lambda write: write.entity)
    for conflict in history.conflicts:
        action, sent, theirs = actions[conflict.action], conflict.sent, conflict.theirs
        if action.is_stale or action.is_parallel or sent is None or theirs is None:
            continue
        between = [w for w in writes.get(conflict.entity, []) if sent < w.version <= theirs]
        # A write that the device has given up is not known to be its own. One that overtook this
        # edit is newer than it.
        if not any(
            write.is_foreign
            or write.action not in succeeded
            or (action.is_overtaken and _is_newer(actions[write.action], action))
            for write in between
        ):
            yield Violation(
                Rule.OWN_EDITS,
                f"{action.id} on version {sent} conflicts with version {theirs} of "
                f"{conflict.entity}, and no other client has written",
            )


def _older_edits(history: History) -> Iterator[Violation]:
    """Look for edits that were written after newer ones of the same person."""
    if history.are_versions_lost:
        return
    actions = {action.id: action for action in history.actions}
    had_conflict = {entry.action for entry in history.entries if entry.had_conflict}
    for entity, writes in _grouped(history.writes, lambda write: write.entity).items():
        for before, write in pairwise(sorted(writes, key=lambda write: write.version)):
            newer, older = actions.get(before.action), actions.get(write.action)
            if newer is None or older is None or before.is_foreign or write.is_foreign:
                continue
            # Without a version from before it came back there is nothing to check it with.
            is_known = any(
                one.version < before.version
                for one in history.seen
                if (one.user, one.entity) == (older.user, entity)
                and (
                    one.at < older.enqueued_at
                    or (one.how == "response" and one.at <= older.returned_at)
                )
            )
            if (
                is_known
                and _is_newer(newer, older)
                and not older.is_parallel
                and older.id not in had_conflict
            ):
                yield Violation(
                    Rule.NEWER_EDITS,
                    f"{older.id} wrote version {write.version} of {entity} over {newer.id}, which "
                    "was made later",
                )


def _is_newer(action: UserAction, than: UserAction) -> bool:
    return action.enqueued_at > than.enqueued_at


def _sends(history: History) -> Iterator[Violation]:
    # After a restore, the version that a retry is based on may be gone.
    for what in () if history.are_versions_lost else history.changed_retries:
        yield Violation(Rule.SAME_VERSION, what)
    for what in history.sent_after_refusal:
        yield Violation(Rule.CHAINED, what)
    for delay in history.delays:
        if delay.seconds > _MAX_DELAY_SECONDS:
            yield Violation(
                Rule.INDEPENDENT,
                f"{delay.action} was not sent for {delay.seconds:.0f} s after {delay.behind} was "
                "refused",
            )
    for entry in history.exhausted:
        if entry.sends < entry.max_attempts:
            yield Violation(
                Rule.OUTAGES,
                f"{entry.action} failed after {entry.sends} attempts of {entry.max_attempts}",
            )


# -- holds ------------------------------------------------------------------------------------


def _holds(history: History) -> Iterator[Violation]:
    for contacts in _grouped(history.contacts, lambda one: one.device).values():
        holds = DeviceHolds()
        for contact in contacts:
            if contact.what == "sent":
                for what in holds.early(contact):
                    yield Violation(Rule.HELD, what)
                for what in holds.probes(contact):
                    yield Violation(Rule.PROBED, what)
            holds.follow(contact)
    for idle in history.idle:
        if idle.next_seconds is None or idle.next_seconds > _MAX_HOLD_SECONDS:
            yield Violation(
                Rule.RESUMED,
                f"{idle.action} can be sent, and the drain ended as {idle.ended}",
            )


# -- run --------------------------------------------------------------------------------------


def _run(history: History) -> Iterator[Violation]:
    for what in history.unfinished:
        yield Violation(Rule.DRAINS, what)
    for what in history.errors:
        yield Violation(Rule.NO_OTHER_ERROR, what)


RULES: Final[tuple[Callable[[History], Iterator[Violation]], ...]] = (
    _effects,
    _entries,
    _order,
    _responses,
    _records,
    _sequences,
    _after_restore,
    _jobs_of_effects,
    _job_endings,
    _operator_actions,
    _job_order,
    _follow_ups,
    _overwrites,
    _own_conflicts,
    _older_edits,
    _sends,
    _holds,
    _run,
)


def _grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    groups: dict[_K, list[_T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups
