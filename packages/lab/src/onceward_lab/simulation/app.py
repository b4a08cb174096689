"""The simulated service: guarded writes that enqueue jobs, and rows that can be counted.

A payload contains the id of its user action. The handler writes one row for it and enqueues jobs in
the same transaction. Each response contains a number that is never used again, so a response that
was computed twice and not replayed is detected.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from onceward.app import Onceward
from onceward.batch.options import BatchOptions
from onceward.errors import NonRetryableError, NotAuthenticatedError, ServiceError
from onceward.guard.request import Principal, RequestHead
from onceward.jobs.context import JobContext
from onceward_services.field.policy import POLICY as FIELD
from onceward_services.walk.policy import POLICY as WALK

__all__ = [
    "ATTESTATION",
    "REFUSED_ATTESTATION",
    "SCHEMA",
    "HandlerFaults",
    "guard_service",
    "register_jobs",
]

SCHEMA: Final = """
CREATE TABLE effects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, action_id TEXT NOT NULL);
CREATE TABLE notes (
    id INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, version INTEGER NOT NULL,
    fields TEXT NOT NULL);
CREATE TABLE note_writes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, note INTEGER NOT NULL, version INTEGER NOT NULL,
    action_id TEXT NOT NULL, is_checked INTEGER NOT NULL);
CREATE TABLE job_effects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL, line TEXT, position INTEGER NOT NULL, is_stale INTEGER NOT NULL,
    claimed_at INTEGER);
CREATE TABLE moves (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, client_id TEXT NOT NULL,
    sequence INTEGER NOT NULL, action_id TEXT NOT NULL);
CREATE TABLE counts (tenant TEXT PRIMARY KEY, seen INTEGER NOT NULL);
"""

ATTESTATION: Final = "x-firebase-appcheck"
REFUSED_ATTESTATION: Final = "refused"
_CREATED: Final = 201
_FIELDS: Final = ("title", "what")
"""The members of a payload that a note has."""

_WEEK_OF_ERRORS: Final = FIELD.replace(error_ttl=FIELD.success_ttl)
_STRICT: Final = _WEEK_OF_ERRORS.replace(ordering="strict")


class HandlerFaults(Protocol):
    """The faults that are injected into handlers."""

    async def handler(self) -> None:
        """Sleep or raise."""

    async def job(self) -> None:
        """Sleep or raise."""

    def unique_number(self) -> int:
        """Return a number that is never returned again."""


def identify(head: RequestHead) -> Principal:
    """Use the token as the name: authentication is not simulated, but refused attestations are."""
    if head.authorization is None:
        raise NotAuthenticatedError("the Authorization header is missing")
    if head.header(ATTESTATION) == REFUSED_ATTESTATION:
        raise ServiceError(401, "ATTESTATION_INVALID", "the attestation is refused")
    name = head.authorization.removeprefix("Bearer ")
    return Principal(tenant=name, actor=name)


def guard_service(
    onceward: Onceward, faults: HandlerFaults, batch: BatchOptions | None = None
) -> Callable[..., Awaitable[None]]:
    """Return the ASGI app of one server process; ``batch`` are the options of its batches."""
    onceward.guard_path("POST", "/steps", endpoint="steps", policy=WALK)
    onceward.guard_path("POST", "/moves", endpoint="moves", policy=_STRICT)
    onceward.guard_path("POST", "/notes", endpoint="notes.create", policy=_WEEK_OF_ERRORS)
    onceward.guard_path("PATCH", "/notes/{note}", endpoint="notes.change", policy=_WEEK_OF_ERRORS)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await _reply(send, *await _read_note(onceward, scope["path"]))
            return
        message = await receive()
        payload = msgspec.json.decode(message["body"])
        tenant = onceward.execution.request.principal.tenant
        await faults.handler()
        status, body = await _write(onceward, scope, tenant, payload, faults)
        await faults.handler()
        await _reply(send, status, body)

    wrapped: Callable[..., Awaitable[None]] = onceward.wrap(app, batch=batch)
    return wrapped


async def _read_note(onceward: Onceward, path: str) -> tuple[int, dict[str, Any]]:
    number = path.rpartition("/")[2]
    rows = await onceward.store.read(
        "SELECT version, fields FROM notes WHERE id = :id", {"id": number}
    )
    if not rows:
        return 404, {"code": "resource.not_found"}
    fields = msgspec.json.decode(rows[0]["fields"])
    return 200, {"id": int(number), "version": rows[0]["version"], **fields}


async def _write(
    onceward: Onceward, scope: Any, tenant: str, payload: dict[str, Any], faults: HandlerFaults
) -> tuple[int, dict[str, Any]]:
    tx = onceward.transaction
    action_id = payload["action_id"]
    row = await tx.fetch_one(
        "INSERT INTO effects (tenant, action_id) VALUES (:tenant, :action_id) RETURNING number",
        {"tenant": tenant, "action_id": action_id},
    )
    if payload.get("refuse"):
        return 422, {"code": "INSUFFICIENT_POINTS", "owner": tenant, "n": faults.unique_number()}
    body = {"action_id": action_id, "owner": tenant, "n": faults.unique_number()}
    if scope["method"] == "PATCH":
        status, note = await _change_note(tx, scope, tenant, payload)
        if status != _CREATED:
            return status, note
        body |= note
    elif scope["path"] == "/notes":
        body |= await _create_note(tx, tenant, payload)
    elif scope["path"] == "/moves":
        await _move(tx, scope, tenant, action_id)
    await _enqueue(onceward, payload, tenant, row["number"])
    return _CREATED, body


async def _move(tx: Any, scope: Any, tenant: str, action_id: str) -> None:
    """Write which number of which stream has run."""
    headers = dict(scope["headers"])
    await tx.execute(
        "INSERT INTO moves (tenant, client_id, sequence, action_id)"
        " VALUES (:tenant, :client_id, :sequence, :action_id)",
        {
            "tenant": tenant,
            "client_id": headers[b"x-client-id"].decode(),
            "sequence": int(headers[b"x-sequence"]),
            "action_id": action_id,
        },
    )


async def _create_note(tx: Any, tenant: str, payload: dict[str, Any]) -> dict[str, Any]:
    fields = _fields_of(payload)
    made = await tx.fetch_one(
        "INSERT INTO notes (tenant, version, fields) VALUES (:tenant, 1, :fields) RETURNING id",
        {"tenant": tenant, "fields": msgspec.json.encode(fields).decode()},
    )
    await _keep_write(tx, made["id"], 1, payload, is_checked=False)
    if payload.get("unversioned"):  # as an endpoint does that names no version
        return {"id": made["id"]}
    return {"id": made["id"], "version": 1, **fields}


async def _change_note(
    tx: Any, scope: Any, tenant: str, payload: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    note = int(scope["path"].rpartition("/")[2])
    wanted = next((value for name, value in scope["headers"] if name == b"if-match"), b"*")
    version = None if wanted == b"*" else int(wanted.strip(b'"'))
    there = await tx.fetch_one(
        "SELECT version, fields FROM notes WHERE id = :id AND tenant = :tenant",
        {"id": note, "tenant": tenant},
    )
    if there is None:
        return 404, {"code": "resource.not_found"}
    fields = msgspec.json.decode(there["fields"]) | _fields_of(payload)
    changed = await tx.execute(
        "UPDATE notes SET version = version + 1, fields = :fields"
        " WHERE id = :id AND version = :there AND version = coalesce(:version, version)",
        {
            "id": note,
            "there": there["version"],
            "version": version,
            "fields": msgspec.json.encode(fields).decode(),
        },
    )
    if not changed:
        return 409, {"code": "concurrency.version_mismatch"}
    now = there["version"] + 1
    await _keep_write(tx, note, now, payload, is_checked=version is not None)
    return _CREATED, {"id": note, "version": now, **fields}


def _fields_of(payload: dict[str, Any]) -> dict[str, Any]:
    return {name: payload[name] for name in _FIELDS if name in payload}


async def _keep_write(
    tx: Any, note: int, version: int, payload: dict[str, Any], *, is_checked: bool
) -> None:
    """Add a write to the history of a note, which the checker reads."""
    await tx.execute(
        "INSERT INTO note_writes (note, version, action_id, is_checked)"
        " VALUES (:note, :version, :action_id, :is_checked)",
        {
            "note": note,
            "version": version,
            "action_id": payload["action_id"],
            "is_checked": int(is_checked),
        },
    )


async def _enqueue(onceward: Onceward, payload: dict[str, Any], tenant: str, number: int) -> None:
    line = payload.get("line")
    about = {
        "action_id": payload["action_id"],
        "poison": payload.get("poison", False),
        "position": number,
        "line": line,
    }
    await onceward.enqueue("follow", about, resource_id=payload["action_id"], order=line)
    await onceward.enqueue("count", None, coalesce=tenant)


async def _reply(send: Any, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})


def register_jobs(onceward: Onceward, faults: HandlerFaults) -> None:
    """Register the handlers of the jobs."""

    @onceward.jobs.handler("follow")
    async def follow(job: JobContext) -> None:
        payload = job.payload
        if payload["poison"]:
            raise NonRetryableError("the payload is poison")
        await faults.job()
        await job.transaction.execute(
            # It holds the write lock until it commits, so the lease cannot be lost after this.
            "INSERT INTO job_effects"
            " (tenant, job_id, attempt, line, position, is_stale, claimed_at)"
            " VALUES (:tenant, :id, :attempt, :line, :position, :lease IS NOT"
            " (SELECT lease FROM onceward_jobs WHERE tenant = :tenant AND id = :id),"
            " (SELECT started_at FROM onceward_jobs WHERE tenant = :tenant AND id = :id))",
            {
                "tenant": job.tenant,
                "id": job.id,
                "attempt": job.attempt,
                "line": payload["line"],
                "position": payload["position"],
                "lease": job.leased_job.lease.number,
            },
        )
        await faults.job()

    @onceward.jobs.handler("count")
    async def count(job: JobContext) -> None:
        # Read, sleep, write: an effect that is committed in between has to enqueue another job.
        rows = await onceward.store.read(
            "SELECT count(*) AS seen FROM effects WHERE tenant = :tenant", {"tenant": job.tenant}
        )
        await faults.job()
        await job.transaction.execute(
            "INSERT INTO counts (tenant, seen) VALUES (:tenant, :seen)"
            " ON CONFLICT (tenant) DO UPDATE SET seen = max(seen, excluded.seen)",
            {"tenant": job.tenant, "seen": rows[0]["seen"]},
        )
