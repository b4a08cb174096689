"""Decides from a history whether the promises were kept. Knows nothing of how they are kept.

Every rule below is a promise of the contract, and reads only facts: it must be able to convict an
implementation that it has never seen.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from holdfast_lab.history import AnswerSeen, Expect, Fate, History, Tap

__all__ = ["RULES", "Rule", "Violation", "check"]

_T = TypeVar("_T")
_K = TypeVar("_K")

# Said of the moment, not of the request: the next try may get another.
_PASSING: Final = frozenset({401, 403, 408, 425, 429})
_SERVER_ERROR: Final = 500
_ERROR: Final = 400
_IN_PROGRESS: Final = frozenset({"IDEMPOTENCY_IN_PROGRESS", "idempotency.in_progress"})
_MISMATCH: Final = frozenset({"IDEMPOTENCY_CONFLICT", "idempotency.payload_mismatch"})
_DONE: Final = "succeeded"
_UNTOLD: Final = frozenset({"pending", "in_flight"})


class Rule(StrEnum):
    """The promises, by name."""

    EXACTLY_ONCE = "acknowledged: exactly one effect"
    AT_MOST_ONCE = "unacknowledged: at most one effect"
    NO_INVENTION = "an effect comes from a tap"
    REFUSED_IS_NOTHING = "refused: no effect"
    TOLD_THE_TRUTH = "the device says what happened"
    NEVER_LOST = "acknowledged: still on the device"
    ONE_ENTRY = "one tap is one entry"
    SAME_ANSWER = "same key: identical answer"
    OTHER_PAYLOAD = "same key, other payload: refused"
    OWN_ANSWERS = "tenants never see each other's answers"
    ORDER = "per-user effects in the device's order"
    JOB_WITH_EFFECT = "effect if and only if job"
    JOB_ENDS_ONCE = "every job ends in one marker or one dead letter"
    JOB_EFFECT_ONCE = "a job that is done has one effect, a dead one none"
    FENCED = "a stale fencing token never commits"
    JOB_ORDER = "jobs of one name in the order of their commits"
    FOLLOWED = "work that follows a state sees its last state"
    DRAINS = "after the faults everything drains in time"
    NO_MISHAP = "nothing breaks that is not a fault"


class Violation(msgspec.Struct, frozen=True):
    """One promise that was not kept, and for whom."""

    rule: Rule
    what: str

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.rule}: {self.what}"


def check(history: History) -> list[Violation]:
    """Return every broken promise, in the order of the rules; empty if all were kept."""
    return [violation for rule in RULES for violation in rule(history)]


# -- effects ----------------------------------------------------------------------------------


def _effects(history: History) -> Iterator[Violation]:
    counts = _grouped(history.effects, lambda effect: (effect.tenant, effect.tap))
    known = {(tap.tenant, tap.id) for tap in history.taps}
    for tenant, tap_id in counts:
        if (tenant, tap_id) not in known:
            yield Violation(Rule.NO_INVENTION, f"{tap_id} of {tenant} was never tapped there")
    fates = {fate.tap: fate for fate in history.fates}
    for tap in history.taps:
        count = len(counts.get((tap.tenant, tap.id), ()))
        yield from _effects_of(tap, count, fates.get(tap.id))


def _effects_of(tap: Tap, count: int, fate: Fate | None) -> Iterator[Violation]:
    status = None if fate is None else fate.status
    if tap.expect is Expect.REFUSAL and count:
        yield Violation(Rule.REFUSED_IS_NOTHING, f"{tap.id} happened {count} times")
    elif count > 1:
        rule = Rule.EXACTLY_ONCE if tap.acknowledged else Rule.AT_MOST_ONCE
        yield Violation(rule, f"{tap.id} happened {count} times")
    elif tap.acknowledged and tap.expect is Expect.EFFECT and count != 1:
        yield Violation(Rule.EXACTLY_ONCE, f"{tap.id} did not happen (the device: {status})")
    if fate is None or status in _UNTOLD or fate.maybe:
        return
    if (status == _DONE) != (count >= 1):
        yield Violation(
            Rule.TOLD_THE_TRUTH, f"{tap.id} is {status} on the device and happened {count} times"
        )


def _entries(history: History) -> Iterator[Violation]:
    """Ask the device's file; where nobody has read it, there is nothing to decide."""
    if not history.fates:
        return
    fates = _grouped(history.fates, lambda fate: fate.tap)
    for tap in history.taps:
        entries = fates.get(tap.id, [])
        if tap.acknowledged and not entries:
            yield Violation(Rule.NEVER_LOST, f"{tap.id} is not in the file of {tap.device}")
        if len(entries) > 1:
            yield Violation(Rule.ONE_ENTRY, f"{tap.id} has {len(entries)} entries")
        if tap.key is not None and any(entry.key not in (None, tap.key) for entry in entries):
            yield Violation(Rule.ONE_ENTRY, f"{tap.id} was queued as {tap.key} and got another key")


def _order(history: History) -> Iterator[Violation]:
    taps = {tap.id: tap for tap in history.taps if tap.in_order}
    last: dict[tuple[str, str], Tap] = {}
    for effect in sorted(history.effects, key=lambda effect: effect.number):
        tap = taps.get(effect.tap)
        if tap is None:
            continue
        before = last.get((tap.device, tap.user))
        if before is not None and before.position > tap.position:
            yield Violation(Rule.ORDER, f"{tap.id} happened after {before.id}, tapped before it")
        last[tap.device, tap.user] = tap


# -- answers ----------------------------------------------------------------------------------


def _answers(history: History) -> Iterator[Violation]:
    for answer in history.answers:
        if answer.shows is not None and answer.shows != answer.tenant:
            yield Violation(Rule.OWN_ANSWERS, f"{answer.tenant} was shown data of {answer.shows}")
    final = [answer for answer in history.answers if _is_final(answer)]
    for (tenant, key), answers in _grouped(final, lambda a: (a.tenant, a.key)).items():
        accepted = [answer for answer in answers if answer.code not in _MISMATCH]
        if not accepted:
            # Nobody of theirs has used this key for anything: they were told of somebody else's.
            yield Violation(Rule.OWN_ANSWERS, f"{tenant} was told that {key} is used already")
        asked = sorted({answer.asked for answer in accepted if _binds(answer)})
        if len(asked) > 1:
            yield Violation(Rule.OTHER_PAYLOAD, f"{key} was answered for {' and for '.join(asked)}")
        for same in _grouped(accepted, lambda a: a.asked).values():
            told = {(answer.status, answer.body) for answer in same if _binds(answer)}
            if len(told) > 1:
                statuses = " and ".join(str(status) for status, _ in sorted(told))
                yield Violation(Rule.SAME_ANSWER, f"{key} got different answers: {statuses}")


def _is_final(answer: AnswerSeen) -> bool:
    return (
        answer.status < _SERVER_ERROR
        and answer.status not in _PASSING
        and answer.code not in _IN_PROGRESS
    )


def _binds(answer: AnswerSeen) -> bool:
    return answer.status < _ERROR or answer.kept


# -- jobs -------------------------------------------------------------------------------------


def _jobs_of_effects(history: History) -> Iterator[Violation]:
    wanted = {tap.id for tap in history.taps if tap.brings_job}
    happened = {effect.tap for effect in history.effects}
    jobs = _grouped((job for job in history.jobs if job.tap is not None), lambda job: job.tap)
    for tap_id in sorted(happened & wanted):
        if len(jobs.get(tap_id, ())) != 1:
            yield Violation(
                Rule.JOB_WITH_EFFECT, f"{tap_id} happened and has {len(jobs.get(tap_id, ()))} jobs"
            )
    for tap_id in sorted(str(tap) for tap in jobs if tap not in happened):
        yield Violation(Rule.JOB_WITH_EFFECT, f"there is a job of {tap_id}, which did not happen")


def _job_endings(history: History) -> Iterator[Violation]:
    effects = _grouped(history.job_effects, lambda effect: (effect.tenant, effect.job_id))
    known = {(job.tenant, job.job_id) for job in history.jobs}
    for tenant, job_id in effects:
        if (tenant, job_id) not in known:
            yield Violation(Rule.JOB_ENDS_ONCE, f"job {job_id} did something and is nowhere")
    for job in history.jobs:
        endings = (job.marker is not None) + job.is_dead
        if endings != 1 or job.waits:
            found = [
                name
                for name, there in (
                    ("waits", job.waits),
                    ("has a marker", job.marker is not None),
                    ("is dead", job.is_dead),
                )
                if there
            ]
            yield Violation(Rule.JOB_ENDS_ONCE, f"job {job.job_id} {' and '.join(found)}")
        did = effects.get((job.tenant, job.job_id), [])
        wanted = int(job.marker is not None) if job.writes else 0
        if len(did) != wanted:
            yield Violation(
                Rule.JOB_EFFECT_ONCE, f"job {job.job_id} has {len(did)} effects, not {wanted}"
            )
        for effect in did:
            if job.marker is not None and effect.attempt != job.marker:
                yield Violation(
                    Rule.FENCED,
                    f"job {job.job_id}: attempt {effect.attempt} committed while attempt "
                    f"{job.marker} held the lease",
                )


def _job_order(history: History) -> Iterator[Violation]:
    last: dict[tuple[str, str], int] = {}
    for effect in sorted(history.job_effects, key=lambda effect: effect.number):
        if effect.order is None:
            continue
        line = (effect.tenant, effect.order)
        if last.get(line, effect.position) > effect.position:
            yield Violation(
                Rule.JOB_ORDER,
                f"job {effect.position} of {effect.order} was done after job {last[line]}",
            )
        last[line] = effect.position


def _follow_ups(history: History) -> Iterator[Violation]:
    for follow_up in history.follow_ups:
        if follow_up.seen != follow_up.wanted:
            yield Violation(
                Rule.FOLLOWED,
                f"{follow_up.name} of {follow_up.tenant} has seen {follow_up.seen} of "
                f"{follow_up.wanted}",
            )


# -- time -------------------------------------------------------------------------------------


def _time(history: History) -> Iterator[Violation]:
    for what in history.undrained:
        yield Violation(Rule.DRAINS, what)
    for what in history.mishaps:
        yield Violation(Rule.NO_MISHAP, what)


RULES: Final[tuple[Callable[[History], Iterator[Violation]], ...]] = (
    _effects,
    _entries,
    _order,
    _answers,
    _jobs_of_effects,
    _job_endings,
    _job_order,
    _follow_ups,
    _time,
)


def _grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    groups: dict[_K, list[_T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups
