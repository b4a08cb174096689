"""The service under torture: guarded writes, each with jobs, on rows that can be counted.

A payload names its tap; the handler writes one row for it, in the transaction it is given, and
enqueues work in the same transaction. What the handler answers has a number that no second run
would give again: an answer that was not replayed is found out.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from holdfast.errors import NonRetryableError, NotAuthenticatedError
from holdfast.jobs.context import JobContext
from holdfast.server.app import Holdfast
from holdfast.server.guarded_request import Principal
from holdfast.server.request_head import RequestHead
from holdfast_services.field.policy import POLICY as FIELD
from holdfast_services.walk.policy import POLICY as WALK

__all__ = ["SCHEMA", "Trouble", "guard_service", "register_jobs"]

SCHEMA: Final = """
CREATE TABLE effects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, tap TEXT NOT NULL);
CREATE TABLE notes (
    id INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, version INTEGER NOT NULL);
CREATE TABLE job_effects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL, line TEXT, position INTEGER NOT NULL);
CREATE TABLE counts (tenant TEXT PRIMARY KEY, seen INTEGER NOT NULL);
"""

_WEEK_OF_ERRORS: Final = FIELD.replace(error_ttl=FIELD.success_ttl)


class Trouble(Protocol):
    """What the world does to a handler."""

    async def handler(self) -> None:
        """Take time, or raise."""

    async def job(self) -> None:
        """Take time, or raise."""

    def number(self) -> int:
        """Return a number that comes once."""


def identify(head: RequestHead) -> Principal:
    """Take the token for the name: who may sign in is not the question here."""
    if head.authorization is None:
        raise NotAuthenticatedError("sign in")
    name = head.authorization.removeprefix("Bearer ")
    return Principal(tenant=name, actor=name)


def guard_service(holdfast: Holdfast, trouble: Trouble) -> Callable[..., Awaitable[None]]:
    """Return the app of one server process."""
    holdfast.guard_path("POST", "/steps", endpoint="steps", policy=WALK)
    holdfast.guard_path("POST", "/notes", endpoint="notes.create", policy=_WEEK_OF_ERRORS)
    holdfast.guard_path("PATCH", "/notes/{note}", endpoint="notes.change", policy=_WEEK_OF_ERRORS)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await _reply(send, *await _read_note(holdfast, scope["path"]))
            return
        message = await receive()
        payload = msgspec.json.decode(message["body"])
        tenant = holdfast.execution.request.principal.tenant
        await trouble.handler()
        status, answer = await _write(holdfast, scope, tenant, payload, trouble)
        await trouble.handler()
        await _reply(send, status, answer)

    wrapped: Callable[..., Awaitable[None]] = holdfast.wrap(app)
    return wrapped


async def _read_note(holdfast: Holdfast, path: str) -> tuple[int, dict[str, Any]]:
    number = path.rpartition("/")[2]
    rows = await holdfast.store.read("SELECT version FROM notes WHERE id = :id", {"id": number})
    if not rows:
        return 404, {"code": "resource.not_found"}
    return 200, {"id": number, "version": rows[0]["version"]}


async def _write(
    holdfast: Holdfast, scope: Any, tenant: str, payload: dict[str, Any], trouble: Trouble
) -> tuple[int, dict[str, Any]]:
    tx = holdfast.transaction
    tap = payload["tap"]
    row = await tx.fetch_one(
        "INSERT INTO effects (tenant, tap) VALUES (:tenant, :tap) RETURNING number",
        {"tenant": tenant, "tap": tap},
    )
    if payload.get("refuse"):
        return 422, {"code": "INSUFFICIENT_POINTS", "owner": tenant, "n": trouble.number()}
    answer = {"tap": tap, "owner": tenant, "n": trouble.number()}
    if scope["method"] == "PATCH":
        refused = await _change_note(tx, scope, tenant)
        if refused is not None:
            return refused
    elif scope["path"] == "/notes":
        made = await tx.fetch_one(
            "INSERT INTO notes (tenant, version) VALUES (:tenant, 1) RETURNING id",
            {"tenant": tenant},
        )
        answer["id"] = made["id"]
    await _enqueue(holdfast, payload, tenant, row["number"])
    return 201, answer


async def _change_note(tx: Any, scope: Any, tenant: str) -> tuple[int, dict[str, Any]] | None:
    note = scope["path"].rpartition("/")[2]
    wanted = next((value for name, value in scope["headers"] if name == b"if-match"), b"*")
    version = None if wanted == b"*" else int(wanted.strip(b'"'))
    changed = await tx.execute(
        "UPDATE notes SET version = version + 1 WHERE id = :id AND tenant = :tenant"
        " AND version = coalesce(:version, version)",
        {"id": note, "tenant": tenant, "version": version},
    )
    if changed:
        return None
    there = await tx.fetch_one(
        "SELECT 1 FROM notes WHERE id = :id AND tenant = :tenant", {"id": note, "tenant": tenant}
    )
    if there is None:
        return 404, {"code": "resource.not_found"}
    return 409, {"code": "concurrency.version_mismatch"}


async def _enqueue(holdfast: Holdfast, payload: dict[str, Any], tenant: str, number: int) -> None:
    line = payload.get("line")
    about = {
        "tap": payload["tap"],
        "poison": payload.get("poison", False),
        "position": number,
        "line": line,
    }
    await holdfast.enqueue("follow", about, resource_id=payload["tap"], order=line)
    await holdfast.enqueue("count", None, coalesce=tenant)


async def _reply(send: Any, status: int, answer: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(answer)})


def register_jobs(holdfast: Holdfast, trouble: Trouble) -> None:
    """Say how the jobs are done."""

    @holdfast.jobs.handler("follow")
    async def follow(job: JobContext) -> None:
        payload = job.payload
        if payload["poison"]:
            raise NonRetryableError("this one cannot be done")
        await trouble.job()
        await job.transaction.execute(
            "INSERT INTO job_effects (tenant, job_id, attempt, line, position)"
            " VALUES (:tenant, :id, :attempt, :line, :position)",
            {
                "tenant": job.tenant,
                "id": job.id,
                "attempt": job.attempt,
                "line": payload["line"],
                "position": payload["position"],
            },
        )
        await trouble.job()

    @holdfast.jobs.handler("count")
    async def count(job: JobContext) -> None:
        # Read, think, write: what is committed in between has to bring a job of its own.
        rows = await holdfast.store.read(
            "SELECT count(*) AS seen FROM effects WHERE tenant = :tenant", {"tenant": job.tenant}
        )
        await trouble.job()
        await job.transaction.execute(
            "INSERT INTO counts (tenant, seen) VALUES (:tenant, :seen)"
            " ON CONFLICT (tenant) DO UPDATE SET seen = max(seen, excluded.seen)",
            {"tenant": job.tenant, "seen": rows[0]["seen"]},
        )
