"""``onceward jobs``: list, show, requeue and cancel jobs, pause queues, for operators."""

import asyncio
import getpass
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from json import dumps
from typing import Annotated, Any, Final, TypeVar, get_args

import typer

from onceward.cli.database import opened
from onceward.cli.options import (
    USAGE,
    Json,
    Limit,
    Target,
    Tenant,
    command,
    instant_text,
    new_group,
    print_fields,
    tenant_or_all,
)
from onceward.errors import UsageError
from onceward.jobs.admin import JobAdmin, JobDetail, JobView, PausedQueues
from onceward.jobs.job import JobState
from onceward.ports import Store
from onceward.stores.parts import JOBS
from onceward_protocol.cli.output import CommandError, print_json, print_table, printable

T = TypeVar("T")

_REQUEUE_LIMIT: Final = 1_000_000

Queue = Annotated[str | None, typer.Option(help="Only this queue. Default: all queues.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The name of a queue.")]
Reason = Annotated[str, typer.Option(help="Why, for the audit event.")]

app = new_group("jobs")


@command(app, "ls")
def list_jobs(
    target: Target,
    *,
    tenant: Tenant = None,
    state: Annotated[
        str | None,
        typer.Option(help="Only jobs in this state: waiting, running, done or dead. Default: all."),
    ] = None,
    queue: Queue = None,
    job_type: Annotated[
        str | None, typer.Option("--type", help="Only this type of job. Default: all types.")
    ] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List jobs, newest first.

    Examples:
        onceward jobs ls --state waiting

        onceward jobs ls --queue routes --tenant ada --json

    """
    if state is not None and state not in get_args(JobState):
        raise CommandError(f"--state must be one of {', '.join(get_args(JobState))}", USAGE)
    filters: dict[str, Any] = {"state": state, "queue": queue, "job_type": job_type}
    chosen = filters | {"tenant": tenant_or_all(tenant), "limit": limit}
    found = _run(target, lambda store, _: JobAdmin(store).jobs(**chosen))
    if as_json:
        print_json([_plain(asdict(view)) for view in found])
        return
    print_table(
        ("id", "tenant", "queue", "type", "state", "attempts", "enqueued", "due"),
        [
            (
                view.id,
                view.tenant,
                view.queue,
                view.type,
                _state(view),
                _attempts(view),
                instant_text(view.enqueued_at),
                "-" if view.due_at is None else instant_text(view.due_at),
            )
            for view in found
        ],
    )


@command(app, "show")
def show_job(
    target: Target,
    job_id: Annotated[str, typer.Argument(help="The id of a job, as listed by onceward jobs ls.")],
    *,
    tenant: Annotated[
        str | None, typer.Option(help="Fail if the job belongs to another tenant.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one job: payload, failed attempts, finished steps and result.

    Exits with 1 if there is no such job.

    Example:
        onceward jobs show 3fdbb296-1baa-4967-929b-0a5e8362f6e2

    """
    allowed = tenant_or_all(tenant)
    found = _run(target, lambda store, _: JobAdmin(store).find(job_id, tenant=allowed))
    if found is None:
        raise CommandError("there is no such job with these options (try: onceward jobs ls)")
    fields = _detail(found)
    if as_json:
        print_json(fields)
        return
    fields["state"] = _state(found.view)
    for name in ("payload", "result"):
        if fields[name] is not None:
            fields[name] = dumps(fields[name], ensure_ascii=False)
    tables = ("failures", "steps", "lease_expired")
    print_fields({name: value for name, value in fields.items() if name not in tables})
    if found.failures:
        print()
        print_table(
            ("attempt", "failed", "reason", "error", "worker"),
            [
                (str(f.attempt), instant_text(f.failed_at), f.reason, f.error, f.worker or "-")
                for f in found.failures
            ],
        )
    if found.steps:
        print()
        results = [(name, dumps(value, ensure_ascii=False)) for name, value in found.steps.items()]
        print_table(("step", "result"), results)


@command(app, "dead")
def list_dead(
    target: Target,
    *,
    tenant: Tenant = None,
    queue: Queue = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List dead letters with the reason and the last error, newest first.

    A dead letter is a job that is not retried any more. It keeps its payload and its failed
    attempts until it is requeued.

    Example:
        onceward jobs dead --queue routes

    """
    allowed = tenant_or_all(tenant)

    async def dead(store: Store, _notify: object) -> list[JobDetail]:
        admin = JobAdmin(store)
        views = await admin.jobs(tenant=allowed, state="dead", queue=queue, limit=limit)
        found = [await admin.find(view.id, tenant=view.tenant) for view in views]
        return [job for job in found if job is not None]

    found = _run(target, dead)
    if as_json:
        print_json([_detail(job) for job in found])
        return
    print_table(
        ("id", "tenant", "queue", "type", "attempts", "died", "reason", "error"),
        [
            (
                job.view.id,
                job.view.tenant,
                job.view.queue,
                job.view.type,
                _attempts(job.view),
                "-" if job.view.ended_at is None else instant_text(job.view.ended_at),
                job.view.reason or "-",
                job.error or "-",
            )
            for job in found
        ],
    )


@command(app, "requeue")
def requeue(
    target: Target,
    job_ids: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of dead letters, as listed by onceward jobs dead."),
    ] = None,
    *,
    tenant: Tenant = None,
    queue: Annotated[
        str | None, typer.Option(help="Instead of ids: every dead letter of this queue.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put dead letters back into their queue, with their attempts counted from zero.

    The errors of earlier attempts stay visible in onceward jobs show. Exits with 1 if one of the
    ids is not a dead letter; the others are requeued.

    Examples:
        onceward jobs requeue 3fdbb296-1baa-4967-929b-0a5e8362f6e2

        onceward jobs requeue --queue routes

    """
    if bool(job_ids) == (queue is not None):
        raise CommandError("give either ids of dead letters or --queue for all of a queue", USAGE)
    of: dict[str, Any] = {"tenant": tenant_or_all(tenant), "actor": _actor("requeue")}

    async def requeue_all(store: Store, notify: Callable[[], None]) -> _Changes:
        admin = JobAdmin(store)
        ids: Sequence[str] = job_ids or [
            view.id
            for view in await admin.jobs(
                tenant=of["tenant"], state="dead", queue=queue, limit=_REQUEUE_LIMIT
            )
        ]
        return await _change(ids, lambda job_id: admin.requeue(job_id, **of), notify)

    missing = _report(("requeued", "not_found"), _run(target, requeue_all), as_json=as_json)
    if missing:
        raise CommandError(f"not a dead letter, or requeued already: {', '.join(missing)}")


@command(app, "cancel")
def cancel(
    target: Target,
    job_ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Ids of waiting jobs, as listed by onceward jobs ls."),
    ],
    *,
    reason: Reason,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Move waiting jobs to the dead letters, from where they can be requeued.

    A job that a worker has started is not cancelled. Exits with 1 if one of the ids is not a
    waiting job; the others are cancelled.

    Example:
        onceward jobs cancel 3fdbb296-1baa-4967-929b-0a5e8362f6e2 --reason "sent by post"

    """
    _check_reason(reason)
    of: dict[str, Any] = {
        "tenant": tenant_or_all(tenant),
        "actor": _actor("cancel"),
        "reason": reason,
    }

    async def cancel_all(store: Store, notify: Callable[[], None]) -> _Changes:
        admin = JobAdmin(store)
        return await _change(job_ids, lambda job_id: admin.cancel(job_id, **of), notify)

    missing = _report(("cancelled", "not_waiting"), _run(target, cancel_all), as_json=as_json)
    if missing:
        raise CommandError(f"not a waiting job: {', '.join(missing)}")


@command(app, "pause")
def pause(target: Target, queue: QueueName, *, reason: Reason, as_json: Json = False) -> None:
    """Stop workers from claiming jobs of a queue. Jobs that run go on, new ones wait.

    Exits with 1 if the queue is paused already.

    Example:
        onceward jobs pause mail --reason "the mail server is down"

    """
    _check_reason(reason)
    of = {"actor": _actor("pause"), "reason": reason}
    try:
        is_paused = _run(
            target, lambda store, notify: PausedQueues(store, notify).pause(queue, **of)
        )
    except UsageError as error:
        raise CommandError(str(error), USAGE) from None
    if not is_paused:
        raise CommandError(f"the queue {queue} is paused already (see: onceward jobs paused)")
    if as_json:
        print_json({"paused": queue})
    else:
        print(f"{queue} is paused: its jobs wait until onceward jobs resume {queue}")


@command(app, "resume")
def resume(target: Target, queue: QueueName, *, reason: Reason = "", as_json: Json = False) -> None:
    """Have workers claim the jobs of a paused queue again, at once.

    Exits with 1 if the queue is not paused.

    Example:
        onceward jobs resume mail

    """
    of = {"actor": _actor("resume"), "reason": reason}
    if not _run(target, lambda store, notify: PausedQueues(store, notify).resume(queue, **of)):
        raise CommandError(f"the queue {printable(queue)} is not paused")
    if as_json:
        print_json({"resumed": queue})
    else:
        print(f"{queue} is resumed")


@command(app, "paused")
def list_paused(target: Target, *, as_json: Json = False) -> None:
    """List the paused queues: since when, by whom and why.

    Example:
        onceward jobs paused

    """
    found = _run(target, lambda store, notify: PausedQueues(store, notify).all())
    rows = [(each.queue, instant_text(each.paused_at), each.actor, each.reason) for each in found]
    names = ("queue", "paused_at", "actor", "reason")
    if as_json:
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    else:
        print_table(("queue", "paused", "by", "reason"), rows)


def _run(target: Target, work: Callable[[Store, Callable[[], None]], Awaitable[T]]) -> T:
    """Call ``work`` with the open store and with what notifies the workers of all processes."""

    async def run() -> T:
        async with opened(target, JOBS) as store:
            notifier = store.notifier()
            try:
                return await work(store, notifier.notify)
            finally:
                await notifier.close()

    return asyncio.run(run())


# The ids of jobs that were changed, and of those that were not.
_Changes = tuple[list[str], list[str]]


async def _change(
    job_ids: Sequence[str],
    change: Callable[[str], Awaitable[bool]],
    notify: Callable[[], None],
) -> _Changes:
    done: list[str] = []
    missing: list[str] = []
    for job_id in job_ids:
        (done if await change(job_id) else missing).append(job_id)
    if done:  # requeued, or the next job of its order key
        notify()
    return done, missing


def _report(names: tuple[str, str], changes: _Changes, *, as_json: bool) -> list[str]:
    """Print how many jobs were changed, or all ids as JSON; return those that were not."""
    done, missing = changes
    if as_json:
        print_json(dict(zip(names, changes, strict=True)))
    else:
        print(f"{len(done)} job{'' if len(done) == 1 else 's'} {names[0]}")
    return missing


def _actor(name: str) -> str:
    return f"{getpass.getuser()} via onceward jobs {name}"


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise CommandError("--reason must not be empty: it is kept in the audit log", USAGE)


def _detail(job: JobDetail) -> dict[str, Any]:
    fields: dict[str, Any] = _plain(asdict(job))
    view: dict[str, Any] = fields.pop("view")
    return view | fields


def _plain(value: Any) -> Any:
    """Return a value with its times as text."""
    match value:
        case datetime():
            return instant_text(value)
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value


def _state(view: JobView) -> str:
    return f"{view.state}, lease expired" if view.lease_expired else view.state


def _attempts(view: JobView) -> str:
    return (
        f"{view.attempts}" if view.max_attempts is None else f"{view.attempts}/{view.max_attempts}"
    )
