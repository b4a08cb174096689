"""The history of a siege: devices' files, the server's database and the proxy's notes, as facts."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

from holdfast.outbox import OutboxQueue
from holdfast_lab.chaos.device_process import Phone
from holdfast_lab.chaos.person import all_entries
from holdfast_lab.chaos.plan import act_tap, mark_tap, route_tap, tap_of, taps_of
from holdfast_lab.effects import read_effects, select
from holdfast_lab.history import AnswerSeen, Effect, Fate, History, JobEffect, JobSeen
from holdfast_lab.proxy import Exchange

__all__ = ["answer_of", "jobs_left", "read_history"]

_ROUTES: Final = "SELECT tenant, request_id, status, payload FROM route_requests"
_WAITING: Final = "SELECT tenant, id AS job_id, resource_id FROM jobs WHERE type = 'route.generate'"
_DONE: Final = (
    "SELECT tenant, job_id, resource_id, attempts FROM job_completions"
    " WHERE type = 'route.generate'"
)
_DEAD: Final = (
    "SELECT tenant, job_id, resource_id FROM dead_letters"
    " WHERE type = 'route.generate' AND requeued_at IS NULL"
)
_KEPT_ERRORS: Final = tuple(f"/api/v1/{kind}" for kind in ("activities", "contacts", "expenses"))
_ERROR: Final = 400


def answer_of(exchange: Exchange, tenant: str) -> AnswerSeen | None:
    """Return an answer as a fact; None if there is none, or no key was asked with."""
    key = exchange.header("idempotency-key")
    if exchange.status is None or key is None:
        return None
    said = _decoded(exchange.answer_body)
    return AnswerSeen(
        tenant=tenant,
        key=key,
        status=exchange.status,
        # What it said is not needed again, only whether it was the same.
        body=hashlib.sha256(exchange.answer_body).digest(),
        asked=f"{exchange.line} {_asked(exchange.body)}",
        code=said.get("code", said.get("error")) if exchange.status >= _ERROR else None,
        shows=said.get("walkerId"),
        # Walk tells a refusal anew each time; field remembers it.
        kept=exchange.line.partition(" ")[2].startswith(_KEPT_ERRORS),
    )


async def jobs_left(database_url: str) -> int:
    """Return how many jobs have not come to their end."""
    return len(await select(database_url, _WAITING))


async def read_history(
    database_url: str,
    phones: Iterable[Phone],
    *,
    answers: list[AnswerSeen],
    undrained: list[str],
    mishaps: list[str],
) -> History:
    """Read everything there is, once all is quiet."""
    taps, fates = [], []
    for phone in phones:
        mishaps += phone.mishaps
        with OutboxQueue.open(phone.path, passphrase=phone.passphrase) as queue:
            queue.check_integrity()
            for user in phone.users:
                taps += taps_of(user, phone.name, phone.acknowledged[user])
                fates += list(_fates(queue, user))
    routes = await select(database_url, _ROUTES)
    ways = {(r["tenant"], r["request_id"]): route_tap(r["tenant"], r["payload"]) for r in routes}
    jobs = await _jobs(database_url, ways)
    by_request = {(job.tenant, job.tap): job for job in jobs}
    effects = [*await _effects(database_url)]
    effects += [
        Effect(tenant=tenant, tap=tap, number=0) for (tenant, _), tap in sorted(ways.items())
    ]
    job_effects = []
    for row in routes:
        job = by_request.get((row["tenant"], ways[row["tenant"], row["request_id"]]))
        if row["status"] == "done":
            job_effects.append(
                JobEffect(
                    tenant=row["tenant"],
                    job_id=f"none of {row['request_id']}" if job is None else job.job_id,
                    attempt=0 if job is None or job.marker is None else job.marker,
                    number=0,
                )
            )
    return History(
        taps=taps,
        effects=effects,
        fates=fates,
        answers=answers,
        jobs=jobs,
        job_effects=job_effects,
        undrained=undrained,
        mishaps=mishaps,
    )


async def _effects(database_url: str) -> Iterable[Effect]:
    found: list[Effect] = []
    read = await read_effects(database_url)
    for tenant, acts in read.walk.items():
        found += [
            Effect(tenant=tenant, tap=act_tap(tenant, act), number=number)
            for number, act in enumerate(acts)
        ]
    for tenant, documents in read.documents.items():
        for document in documents:
            marks = [mark_tap(tenant, mark) for mark in document.marks]
            # Each change is a version: one too many is a change that was made twice.
            marks += marks[-1:] * (document.version - len(marks))
            found += [Effect(tenant=tenant, tap=tap, number=0) for tap in marks]
    return found


async def _jobs(database_url: str, ways: dict[tuple[str, str], str]) -> list[JobSeen]:
    facts: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for sql, fact in ((_WAITING, "waits"), (_DONE, "marker"), (_DEAD, "is_dead")):
        for row in await select(database_url, sql):
            known = facts[row["tenant"], row["job_id"]]
            known["tap"] = ways.get((row["tenant"], row["resource_id"]))
            known[fact] = row["attempts"] if fact == "marker" else True
    return [
        JobSeen(tenant=tenant, job_id=job_id, **known) for (tenant, job_id), known in facts.items()
    ]


def _fates(queue: OutboxQueue, user: str) -> Iterator[Fate]:
    for entry in all_entries(queue, user):
        tap = tap_of(user, entry.endpoint, entry.decoded())
        yield Fate(tap=tap, status=entry.status.value, key=entry.idempotency_key)


def _asked(body: bytes) -> str:
    """Return what is the same in every send of one request."""
    said = _decoded(body)
    said.pop("clientSubmittedAt", None)
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body or b"{}")
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
