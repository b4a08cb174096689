"""Builds the history of a chaos run from the outbox files, the database and the proxy."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

from onceward_lab.chaos.actions import action_id, expected_actions, mark_id, route_id, walk_id
from onceward_lab.chaos.device import Device
from onceward_lab.chaos.user_process import all_entries
from onceward_lab.chaos.writer import Writer
from onceward_lab.effects import read_effects, select
from onceward_lab.history import (
    Effect,
    EntryState,
    History,
    JobEffect,
    JobState,
    ResponseSeen,
)
from onceward_lab.proxy import Exchange
from onceward_outbox import OutboxQueue

__all__ = ["jobs_left", "read_history", "response_of"]

_ROUTES: Final = "SELECT tenant, request_id, status, payload FROM route_requests"
_WAITING: Final = (
    "SELECT tenant, id AS job_id, resource_id FROM onceward_jobs WHERE type = 'route.generate'"
)
_DONE: Final = (
    "SELECT tenant, job_id, resource_id, attempts FROM onceward_job_completions"
    " WHERE type = 'route.generate'"
)
_DEAD: Final = (
    "SELECT tenant, job_id, resource_id FROM onceward_dead_letters"
    " WHERE type = 'route.generate' AND requeued_at IS NULL"
)
_STORED_ERRORS: Final = tuple(f"/api/v1/{kind}" for kind in ("activities", "contacts", "expenses"))
_ERROR: Final = 400


def response_of(exchange: Exchange, tenant: str) -> ResponseSeen | None:
    """Return the response of an exchange; None if there is none or the request had no key."""
    key = exchange.header("idempotency-key")
    if exchange.status is None or key is None:
        return None
    document = _decoded(exchange.response_body)
    return ResponseSeen(
        tenant=tenant,
        key=key,
        status=exchange.status,
        # The checker only compares bodies.
        body=hashlib.sha256(exchange.response_body).digest(),
        request=f"{exchange.line} {_request_hash(exchange.body)}",
        code=document.get("code", document.get("error")) if exchange.status >= _ERROR else None,
        data_of=document.get("walkerId"),
        # The field service stores refusals, the walk service does not.
        stored=exchange.line.partition(" ")[2].startswith(_STORED_ERRORS),
    )


async def jobs_left(database_url: str) -> int:
    """Return the number of jobs that have not ended."""
    return len(await select(database_url, _WAITING))


async def read_history(
    database_url: str,
    devices: Iterable[Device],
    writers: Iterable[Writer] = (),
    *,
    responses: list[ResponseSeen],
    unfinished: list[str],
    errors: list[str],
) -> History:
    """Read the history after all processes have stopped."""
    actions, entries = [], []
    for device in devices:
        errors += device.errors
        with OutboxQueue.open(device.path, passphrase=device.passphrase) as queue:
            queue.check_integrity()
            for user in device.users:
                actions += expected_actions(user, device.name, device.acknowledged[user])
                entries += list(_entry_states(queue, user))
    for writer in writers:
        errors += writer.errors
        actions += writer.actions
    routes = await select(database_url, _ROUTES)
    route_ids = {
        (r["tenant"], r["request_id"]): route_id(r["tenant"], r["payload"]) for r in routes
    }
    jobs = await _jobs(database_url, route_ids)
    jobs_by_action = {(job.tenant, job.action): job for job in jobs}
    effects = [*await _effects(database_url)]
    effects += [
        Effect(tenant=tenant, action=id_, number=0)
        for (tenant, _), id_ in sorted(route_ids.items())
    ]
    job_effects = []
    for row in routes:
        job = jobs_by_action.get((row["tenant"], route_ids[row["tenant"], row["request_id"]]))
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
        actions=actions,
        effects=effects,
        entries=entries,
        responses=responses,
        jobs=jobs,
        job_effects=job_effects,
        unfinished=unfinished,
        errors=errors,
    )


async def _effects(database_url: str) -> Iterable[Effect]:
    found: list[Effect] = []
    read = await read_effects(database_url)
    for tenant, actions in read.walk.items():
        found += [
            Effect(tenant=tenant, action=walk_id(tenant, action), number=number)
            for number, action in enumerate(actions)
        ]
    for tenant, documents in read.documents.items():
        for document in documents:
            ids = [mark_id(tenant, mark) for mark in document.marks]
            # Each change is one version: an extra version is a change that was made twice.
            ids += ids[-1:] * (document.version - len(ids))
            found += [Effect(tenant=tenant, action=id_, number=0) for id_ in ids]
    return found


async def _jobs(database_url: str, route_ids: dict[tuple[str, str], str]) -> list[JobState]:
    fields: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for sql, name in ((_WAITING, "is_waiting"), (_DONE, "marker"), (_DEAD, "is_dead")):
        for row in await select(database_url, sql):
            job = fields[row["tenant"], row["job_id"]]
            job["action"] = route_ids.get((row["tenant"], row["resource_id"]))
            job[name] = row["attempts"] if name == "marker" else True
    return [JobState(tenant=tenant, job_id=id_, **job) for (tenant, id_), job in fields.items()]


def _entry_states(queue: OutboxQueue, user: str) -> Iterator[EntryState]:
    for entry in all_entries(queue, user):
        id_ = action_id(user, entry.endpoint, entry.decoded())
        yield EntryState(action=id_, status=entry.status.value, key=entry.idempotency_key)


def _request_hash(body: bytes) -> str:
    """Hash what is the same in every attempt of one request."""
    document = _decoded(body)
    document.pop("clientSubmittedAt", None)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body or b"{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
