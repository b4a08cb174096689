"""``onceward jobs``: list, show, requeue and cancel jobs, pause queues, for operators."""

import asyncio
import getpass
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from json import dumps
from typing import Annotated, Any, Final, TypeVar, cast, get_args

import typer

from onceward.cli.database import check_known_tenant, opened
from onceward.cli.options import (
    USAGE,
    Json,
    Limit,
    Target,
    Tenant,
    command,
    new_group,
    print_fields,
    tenant_or_all,
)
from onceward.errors import UsageError
from onceward.jobs.admin import JobAdmin, JobDetail, JobView, PausedQueues
from onceward.jobs.job import JobState
from onceward.ports import Store
from onceward.stores.parts import JOBS
from onceward.tenants import ALL_TENANTS
from onceward_protocol.cli.output import (
    CommandError,
    instant_text,
    print_json,
    print_table,
    print_warning,
    printable,
    shown_instant,
)

T = TypeVar("T")

_REQUEUE_LIMIT: Final = 1_000_000

Queue = Annotated[str | None, typer.Option(help="Only this queue. Default: all queues.")]
JobType = Annotated[
    str | None, typer.Option("--type", help="Only this type of job. Default: all types.")
]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The name of a queue.")]
Reason = Annotated[str, typer.Option(help="Why, for the audit event.")]

app = new_group("jobs")


class _Filter:
    """The jobs that ``--tenant``, ``--queue`` and ``--type`` choose."""

    def __init__(self, tenant: str | None, queue: str | None, job_type: str | None) -> None:
        self.tenant = tenant_or_all(tenant)
        self._queue = queue
        self._type = job_type

    async def jobs(self, store: Store, *, state: str | None, limit: int) -> list[JobView]:
        """Return the jobs. Raises ``CommandError`` if nothing is known of what was chosen."""
        admin = JobAdmin(store)
        found = await admin.jobs(
            tenant=self.tenant,
            state=cast("JobState | None", state),
            queue=self._queue,
            job_type=self._type,
            limit=limit,
        )
        if not found:
            if self._queue is not None and (error := await _unknown_queue(store, self._queue)):
                raise CommandError(error)
            await self._check_type(admin)
            await check_known_tenant(store, self.tenant)
        return found

    async def _check_type(self, admin: JobAdmin) -> None:
        about: Any = {"tenant": ALL_TENANTS, "limit": 1, "job_type": self._type}
        if self._type is not None and not await admin.jobs(**about):
            raise CommandError(f"there is no job of the type {printable(self._type)}")


async def _unknown_queue(store: Store, queue: str, *, besides: str | None = None) -> str | None:
    """Return the error for a queue without jobs, unless it is paused; None if it has some.

    ``besides`` is a queue that the command itself has paused.
    """
    admin = JobAdmin(store)
    if await admin.jobs(tenant=ALL_TENANTS, queue=queue, limit=1):
        return None
    paused = {each.queue for each in await PausedQueues(store, lambda: None).all()} - {besides}
    depths, _ = await admin.capped_depths(most=1)
    names = ", ".join(sorted({*paused, *depths})) or "none has jobs"
    return None if queue in paused else f"there is no queue {printable(queue)} (queues: {names})"


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
    job_type: JobType = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List jobs, newest first: by when they ended or, before that, were enqueued.

    Exits with 1 if nothing is known of a queue, type or tenant.

    Examples:
        onceward jobs ls --state waiting

        onceward jobs ls --queue routes --tenant ada --json

    """
    if state is not None and state not in get_args(JobState):
        raise CommandError(f"--state must be one of {', '.join(get_args(JobState))}", USAGE)
    chosen = _Filter(tenant, queue, job_type)
    found = _run(target, lambda store, _: chosen.jobs(store, state=state, limit=limit))
    if as_json:
        print_json([_plain(asdict(view)) for view in found])
        return
    print_table(
        ("id", "tenant", "queue", "type", "state", "attempts", "enqueued", "due", "ended"),
        [
            (
                view.id,
                view.tenant,
                view.queue,
                view.type,
                _state(view),
                _attempts(view),
                shown_instant(view.enqueued_at),
                shown_instant(view.due_at),
                shown_instant(view.ended_at),
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
                (str(f.attempt), shown_instant(f.failed_at), f.reason, f.error, f.worker or "-")
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
    job_type: JobType = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List dead letters with the reason and the last error, those that died last first.

    A dead letter is a job that is not retried any more. It keeps its payload and its failed
    attempts until it is requeued.

    Example:
        onceward jobs dead --queue routes

    """
    chosen = _Filter(tenant, queue, job_type)

    async def dead(store: Store, _notify: object) -> tuple[Sequence[JobView], list[JobDetail]]:
        views = await chosen.jobs(store, state="dead", limit=limit)
        admin = JobAdmin(store)
        found = [await admin.find(view.id, tenant=view.tenant) for view in views if as_json]
        return views, [job for job in found if job is not None]

    views, details = _run(target, dead)
    if as_json:
        print_json([_detail(job) for job in details])
        return
    _print_dead(views)


def _print_dead(found: Sequence[JobView]) -> None:
    print_table(
        ("id", "tenant", "queue", "type", "attempts", "died", "reason", "error"),
        [
            (
                view.id,
                view.tenant,
                view.queue,
                view.type,
                _attempts(view),
                shown_instant(view.ended_at),
                view.reason or "-",
                view.error or "-",
            )
            for view in found
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
    queue: Queue = None,
    job_type: JobType = None,
    error: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Only those whose reason or last error contains this text."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List them, and requeue nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put dead letters back into their queue, with their attempts counted from zero.

    Takes ids, or --queue, --type and --error for all dead letters that match. The errors of earlier
    attempts stay visible in onceward jobs show. Exits with 1 if one of the ids is not a dead
    letter; the others are requeued.

    Examples:
        onceward jobs requeue 3fdbb296-1baa-4967-929b-0a5e8362f6e2

        onceward jobs requeue --type mail.send --error "connection refused" --dry-run

    """
    if bool(job_ids) == any(name is not None for name in (queue, job_type, error)):
        raise CommandError(
            "give either ids of dead letters, or --queue, --type or --error for all that match",
            USAGE,
        )
    chosen, actor = _Filter(tenant, queue, job_type), _actor("requeue")

    async def requeue_all(store: Store, notify: Callable[[], None]) -> _Requeued:
        admin = JobAdmin(store)
        if job_ids:
            views = [await admin.find_view(one, tenant=chosen.tenant) for one in job_ids]
            found = [view for view in views if view is not None and view.state == "dead"]
        else:
            dead = await chosen.jobs(store, state="dead", limit=_REQUEUE_LIMIT)
            found = [view for view in dead if _has_error(view, error)]
        ids = [view.id for view in found]
        if not dry_run:
            ids, _ = await _change(
                ids, lambda one: admin.requeue(one, tenant=chosen.tenant, actor=actor), notify
            )
        done = set(ids)
        missing = [one for one in job_ids or () if one not in done]
        return [view for view in found if view.id in done], missing

    found, missing = _run(target, requeue_all)
    if as_json:
        ids = [view.id for view in found]
        print_json({"would_requeue" if dry_run else "requeued": ids, "not_found": missing})
    else:
        if dry_run:
            _print_dead(found)
        print(_count_by_type(found, "would be requeued" if dry_run else "requeued"))
    if missing:
        raise CommandError(f"not a dead letter, or requeued already: {', '.join(missing)}")


_Requeued = tuple[list[JobView], list[str]]


def _has_error(view: JobView, text: str | None) -> bool:
    return text is None or text.lower() in f"{view.reason}: {view.error}".lower()


def _count_by_type(found: Sequence[JobView], what: str) -> str:
    """Return a summary of the jobs changed, such as ``2 jobs requeued: 2 mail.send in mail``."""
    counts = Counter((view.type, view.queue) for view in found)
    which = ", ".join(f"{n} {kind} in {queue}" for (kind, queue), n in sorted(counts.items()))
    return f"{_jobs(len(found))} {what}" + (f": {printable(which)}" if which else "")


def _jobs(count: int) -> str:
    return f"{count} job{'' if count == 1 else 's'}"


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

    async def pause_queue(store: Store, notify: Callable[[], None]) -> tuple[bool, str | None]:
        is_paused = await PausedQueues(store, notify).pause(queue, **of)
        return is_paused, await _unknown_queue(store, queue, besides=queue)

    try:
        is_paused, unknown = _run(target, pause_queue)
    except UsageError as error:
        raise CommandError(str(error), USAGE) from None
    if unknown is not None:
        print_warning(unknown)  # its first job may come later
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
    if as_json:
        print_json([_plain(asdict(each)) for each in found])
        return
    print_table(
        ("queue", "paused", "by", "reason"),
        [(each.queue, shown_instant(each.paused_at), each.actor, each.reason) for each in found],
    )


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
        print(f"{_jobs(len(done))} {names[0]}")
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
