"""``onceward jobs``: list, show, requeue and cancel jobs, pause queues, for operators."""

import asyncio
import getpass
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from json import dumps
from typing import Annotated, Any, Final, get_args

import typer

from onceward.cli.database import opened
from onceward.cli.options import (
    DEFAULT_DATABASE,
    App,
    Database,
    Json,
    Limit,
    Target,
    Tenant,
    choose_target,
    tenant_or_all,
)
from onceward.errors import UsageError
from onceward.jobs.admin import JobAdmin, JobDetail, JobView, PausedQueue, PausedQueues
from onceward.ports import Notifier, Store
from onceward.stores.parts import JOBS
from onceward_protocol.cli.output import CommandError, print_json, print_table, printable

__all__ = ["app"]

_REQUEUE_LIMIT: Final = 1_000_000

Queue = Annotated[str | None, typer.Option(help="Only this queue. Default: all queues.")]
JobId = Annotated[str, typer.Argument(help="The id of a job, as listed by onceward jobs ls.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The name of a queue.")]
Reason = Annotated[str, typer.Option(help="Why, for the audit event.")]

app = typer.Typer(rich_markup_mode="markdown")


@app.command("ls")
def list_jobs(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
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
    json: Json = False,
) -> None:
    """List jobs, newest first.

    Examples:
        onceward jobs ls --state waiting

        onceward jobs ls --queue routes --tenant ada --json

    """
    if state is not None and state not in get_args(JobState):
        raise CommandError(f"--state must be one of {', '.join(get_args(JobState))}", 2)
    found = asyncio.run(
        _jobs(
            choose_target(context, app=app, database=database),
            tenant=tenant_or_all(tenant),
            state=state,
            queue=queue,
            job_type=job_type,
            limit=limit,
        )
    )
    if json:
        print_json([_summary(view) for view in found])
        return
    headings = ("id", "tenant", "queue", "type", "state", "attempts", "enqueued", "due")
    print_table(
        headings,
        [
            (
                view.id,
                view.tenant,
                view.queue,
                view.type,
                _state(view),
                _attempts(view),
                _instant(view.enqueued_at),
                "-" if view.due_at is None else _instant(view.due_at),
            )
            for view in found
        ],
    )


@app.command("dead")
def list_dead(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Tenant = None,
    queue: Queue = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List dead letters with the reason and the last error, newest first.

    A dead letter is a job that is not retried any more. It keeps its payload and its failed
    attempts until it is requeued.

    Example:
        onceward jobs dead --queue routes

    """
    target = choose_target(context, app=app, database=database)
    found = asyncio.run(_dead(target, tenant, queue, limit))
    if json:
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
                "-" if job.view.ended_at is None else _instant(job.view.ended_at),
                job.view.reason or "-",
                job.error or "-",
            )
            for job in found
        ],
    )


@app.command("show")
def show_job(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    job_id: JobId,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Annotated[
        str | None, typer.Option(help="Fail if the job belongs to another tenant.")
    ] = None,
    json: Json = False,
) -> None:
    """Show one job: payload, failed attempts, finished steps and result.

    Exits with 1 if there is no such job.

    Example:
        onceward jobs show 3fdbb296-1baa-4967-929b-0a5e8362f6e2

    """
    target = choose_target(context, app=app, database=database)
    found = asyncio.run(_find(target, job_id, tenant))
    if found is None:
        raise CommandError("there is no such job with these options (try: onceward jobs ls)")
    fields = _detail(found)
    if json:
        print_json(fields)
        return
    fields["state"] = _state(found.view)
    for name in ("payload", "result"):
        if fields[name] is not None:
            fields[name] = dumps(fields[name], ensure_ascii=False)
    del fields["lease_expired"]
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        if name in ("failures", "steps"):
            continue
        print(f"{name:<{width}}  {'-' if value is None else printable(str(value))}")
    if found.failures:
        print()
        print_table(
            ("attempt", "failed", "reason", "error", "worker"),
            [
                (str(f.attempt), _instant(f.failed_at), f.reason, f.error, f.worker or "-")
                for f in found.failures
            ],
        )
    if found.steps:
        print()
        results = [(name, dumps(value, ensure_ascii=False)) for name, value in found.steps.items()]
        print_table(("step", "result"), results)


@app.command("requeue")
def requeue(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    job_ids: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of dead letters, as listed by onceward jobs dead."),
    ] = None,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only dead letters of this tenant. Default: all tenants.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option(help="Instead of ids: every dead letter of this queue.")
    ] = None,
    json: Json = False,
) -> None:
    """Put dead letters back into their queue, with their attempts counted from zero.

    The errors of earlier attempts stay visible in onceward jobs show. Exits with 1 if one of the
    ids is not a dead letter; the others are requeued.

    Examples:
        onceward jobs requeue 3fdbb296-1baa-4967-929b-0a5e8362f6e2

        onceward jobs requeue --queue routes

    """
    target = choose_target(context, app=app, database=database)
    if bool(job_ids) == (queue is not None):
        raise CommandError("give either ids of dead letters or --queue for all of a queue", 2)
    done, missing = asyncio.run(_requeue(target, job_ids or [], tenant, queue))
    if json:
        print_json({"requeued": done, "not_found": missing})
    else:
        print(f"{len(done)} job{'' if len(done) == 1 else 's'} requeued")
    if missing:
        raise CommandError(f"not a dead letter, or requeued already: {', '.join(missing)}")


@app.command("cancel")
def cancel(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    job_ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Ids of waiting jobs, as listed by onceward jobs ls."),
    ],
    reason: Reason,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only jobs of this tenant. Default: all tenants.")
    ] = None,
    json: Json = False,
) -> None:
    """Move waiting jobs to the dead letters, from where they can be requeued.

    A job that a worker has started is not cancelled. Exits with 1 if one of the ids is not a
    waiting job; the others are cancelled.

    Example:
        onceward jobs cancel 3fdbb296-1baa-4967-929b-0a5e8362f6e2 --reason "sent by post"

    """
    target = choose_target(context, app=app, database=database)
    _check_reason(reason)
    done, missing = asyncio.run(_cancel(target, job_ids, tenant, reason))
    if json:
        print_json({"cancelled": done, "not_waiting": missing})
    else:
        print(f"{len(done)} job{'' if len(done) == 1 else 's'} cancelled")
    if missing:
        raise CommandError(f"not a waiting job: {', '.join(missing)}")


@app.command("pause")
def pause(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    queue: QueueName,
    reason: Reason,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    json: Json = False,
) -> None:
    """Stop workers from claiming jobs of a queue. Jobs that run go on, new ones wait.

    Exits with 1 if the queue is paused already.

    Example:
        onceward jobs pause mail --reason "the mail server is down"

    """
    target = choose_target(context, app=app, database=database)
    _check_reason(reason)
    try:
        is_paused = asyncio.run(_pause(target, queue, reason))
    except UsageError as error:
        raise CommandError(str(error), 2) from None
    if not is_paused:
        raise CommandError(f"the queue {queue} is paused already (see: onceward jobs paused)")
    if json:
        print_json({"paused": queue})
    else:
        print(f"{queue} is paused: its jobs wait until onceward jobs resume {queue}")


@app.command("resume")
def resume(  # noqa: PLR0917 - typer turns the parameters into options
    context: typer.Context,
    queue: QueueName,
    reason: Reason = "",
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    json: Json = False,
) -> None:
    """Have workers claim the jobs of a paused queue again, at once.

    Exits with 1 if the queue is not paused.

    Example:
        onceward jobs resume mail

    """
    target = choose_target(context, app=app, database=database)
    if not asyncio.run(_resume(target, queue, reason)):
        raise CommandError(f"the queue {printable(queue)} is not paused")
    if json:
        print_json({"resumed": queue})
    else:
        print(f"{queue} is resumed")


@app.command("paused")
def list_paused(
    context: typer.Context,
    database: Database = DEFAULT_DATABASE,
    app: App = None,
    json: Json = False,
) -> None:
    """List the paused queues: since when, by whom and why.

    Example:
        onceward jobs paused

    """
    target = choose_target(context, app=app, database=database)
    rows = [
        (each.queue, _instant(each.paused_at), each.actor, each.reason)
        for each in asyncio.run(_paused(target))
    ]
    names = ("queue", "paused_at", "actor", "reason")
    if json:
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    else:
        print_table(("queue", "paused", "by", "reason"), rows)


async def _jobs(target: Target, **filters: Any) -> list[JobView]:
    async with opened(target, JOBS) as store:
        return await JobAdmin(store).jobs(**filters)


async def _dead(
    target: Target, tenant: str | None, queue: str | None, limit: int
) -> list[JobDetail]:
    async with opened(target, JOBS) as store:
        admin = JobAdmin(store)
        views = await admin.jobs(
            tenant=tenant_or_all(tenant), state="dead", queue=queue, limit=limit
        )
        found = [await admin.find(view.id, tenant=view.tenant) for view in views]
    return [job for job in found if job is not None]


async def _find(target: Target, job_id: str, tenant: str | None) -> JobDetail | None:
    async with opened(target, JOBS) as store:
        return await JobAdmin(store).find(job_id, tenant=tenant_or_all(tenant))


async def _requeue(
    target: Target, job_ids: Sequence[str], tenant: str | None, queue: str | None
) -> tuple[list[str], list[str]]:
    actor = f"{getpass.getuser()} via onceward jobs requeue"
    done: list[str] = []
    missing: list[str] = []
    async with opened(target, JOBS) as store:
        admin = JobAdmin(store)
        if queue is not None:
            views = await admin.jobs(
                tenant=tenant_or_all(tenant), state="dead", queue=queue, limit=_REQUEUE_LIMIT
            )
            job_ids = [view.id for view in views]
        for job_id in job_ids:
            back = await admin.requeue(job_id, tenant=tenant_or_all(tenant), actor=actor)
            (done if back else missing).append(job_id)
        if done:
            async with _notifier(store) as notifier:
                notifier.notify()
    return done, missing


async def _cancel(
    target: Target, job_ids: Sequence[str], tenant: str | None, reason: str
) -> tuple[list[str], list[str]]:
    actor = f"{getpass.getuser()} via onceward jobs cancel"
    done: list[str] = []
    missing: list[str] = []
    async with opened(target, JOBS) as store:
        admin = JobAdmin(store)
        for job_id in job_ids:
            cancelled = await admin.cancel(
                job_id, tenant=tenant_or_all(tenant), actor=actor, reason=reason
            )
            (done if cancelled else missing).append(job_id)
        if done:  # the next job of an order key may be due
            async with _notifier(store) as notifier:
                notifier.notify()
    return done, missing


async def _pause(target: Target, queue: str, reason: str) -> bool:
    actor = f"{getpass.getuser()} via onceward jobs pause"
    async with opened(target, JOBS) as store, _notifier(store) as notifier:
        return await PausedQueues(store, notifier.notify).pause(queue, actor=actor, reason=reason)


async def _resume(target: Target, queue: str, reason: str) -> bool:
    actor = f"{getpass.getuser()} via onceward jobs resume"
    async with opened(target, JOBS) as store, _notifier(store) as notifier:
        return await PausedQueues(store, notifier.notify).resume(queue, actor=actor, reason=reason)


async def _paused(target: Target) -> list[PausedQueue]:
    async with opened(target, JOBS) as store, _notifier(store) as notifier:
        return await PausedQueues(store, notifier.notify).all()


@asynccontextmanager
async def _notifier(store: Store) -> AsyncIterator[Notifier]:
    notifier = store.notifier()
    try:
        yield notifier
    finally:
        await notifier.close()


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise CommandError("--reason must not be empty: it is kept in the audit log", 2)


def _summary(view: JobView) -> dict[str, Any]:
    fields: dict[str, Any] = _plain(asdict(view))
    return fields


def _detail(job: JobDetail) -> dict[str, Any]:
    fields: dict[str, Any] = _plain(asdict(job))
    view: dict[str, Any] = fields.pop("view")
    return view | fields


def _plain(value: Any) -> Any:
    """Return a value with its times as text."""
    match value:
        case datetime():
            return _instant(value)
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


def _instant(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
