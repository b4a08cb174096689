"""Jobs as values: key, id, state and lease. No I/O.

A job's *key* names what it is about: ``job:{tenant}:{queue}:{type}:{resource_id or payload hash}``.
Its *id* is derived from the key alone, so the same key is the same job: the completion marker has
that id, and enqueueing the key again returns ``AlreadyDone``.

That does not fit work that follows a changing state, such as "recompute today's totals": the
second recomputation of the day would be dropped. Such a job *coalesces*: its key has one more
part, different for every enqueue. While one waits, another is merged into it; once it has started,
the next enqueue creates a new job.
"""

import re
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, Literal, TypedDict
from uuid import UUID

import msgspec

from onceward.errors import UsageError
from onceward_protocol.uuid_format import format_uuid

__all__ = [
    "AlreadyDone",
    "EnqueueOptions",
    "EnqueueOutcome",
    "Enqueued",
    "Job",
    "JobName",
    "JobState",
    "Lease",
    "LeasedJob",
    "Merged",
    "NewJob",
    "check_name",
    "job_id",
    "job_key",
    "stable_uuid",
]

# The state of a job.
JobState = Literal["waiting", "running", "done", "dead"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_name(name: str, what: str) -> str:
    """Return a queue or type name. Raises ``UsageError`` if keys or metrics cannot contain it."""
    if not isinstance(name, str):
        raise UsageError(f"{what} must be text, not {type(name).__name__}")
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{what} {name!r} must be 1 to 100 letters, digits, dots, dashes or underscores"
        )
    return name


def job_key(tenant: str, queue: str, job_type: str, about: str) -> str:
    """Return the key of a job, unique within its tenant."""
    return f"job:{tenant}:{queue}:{job_type}:{about}"


def job_id(key: str) -> str:
    """Return the id of the job with this key."""
    return stable_uuid("job", key)


def stable_uuid(*parts: str) -> str:
    """Return the same UUID for the same parts: 122 bits of their SHA-256, formatted as version 4.

    Endpoints that require a ``uuid4`` key, here and in other services, accept that format.
    """
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return format_uuid(sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), 4)


# What names a resource or a group of jobs. Integers and UUIDs, the usual primary keys, are stored
# as text: 42 and "42" name the same.
JobName = str | int | UUID


class EnqueueOptions(TypedDict, total=False):
    """Options of ``enqueue``, in a request and in a job. None is the default of each."""

    # The queue of the job type by default.
    queue: str | None
    # The tenant of the request or job by default.
    tenant: str | None
    # What the job is about: two jobs of one type and resource are the same job, which runs once.
    # The hash of the payload by default.
    resource_id: JobName | None
    # Not before this time, which has a time zone.
    run_at: datetime | None
    # Not before this many seconds from now; 0 by default.
    delay_seconds: float
    # For work that follows a changing state: merged with a job of the same text that still waits.
    # One that has started is followed by a new job.
    coalesce: JobName | None
    # Jobs with the same text run one at a time, in the order of their commits.
    order: JobName | None
    # The version of the aggregate that was written, for the job's audit events; by default the one
    # given to ``describe`` before, in a job that of the job.
    version: int | None
    # From 1 to 1000; that of the job type by default.
    max_attempts: int | None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a new job and of a leased one."""

    # What makes two jobs the same job.
    key: str
    # The queue.
    queue: str
    # The type.
    type: str
    # The payload as JSON.
    payload: str
    # Attempts after which it is dead-lettered.
    max_attempts: int = 5
    # The request that enqueues it.
    request_id: str
    # The chain of requests it belongs to.
    correlation_id: str
    # What it is about.
    resource_id: str | None = None
    # Jobs with the same value run one at a time, in the order of their commits.
    order_key: str | None = None
    # The W3C trace context of the request.
    traceparent: str | None = None
    # The version of the aggregate that the request wrote, for the audit events.
    version: int | None = None


class NewJob(Job, frozen=True, kw_only=True):
    """A job to be enqueued."""

    # A UUID derived from tenant and key.
    id: str
    # The tenant it belongs to.
    tenant: str
    # The SHA-256 of the payload in canonical form.
    payload_hash: str
    # Who caused it.
    actor: str
    # The earliest start; None means as soon as it is committed.
    run_at: datetime | None = None
    # Not before this many seconds from now.
    delay_seconds: float = 0.0
    # Merged into a waiting job with the same value.
    coalesce_key: str | None = None


class Enqueued(msgspec.Struct, frozen=True):
    """The job was inserted and will run."""

    # The new job.
    job_id: str


class Merged(msgspec.Struct, frozen=True):
    """A job with the same coalescing key waits, or one with the same key waits or runs."""

    # The waiting job.
    job_id: str


class AlreadyDone(msgspec.Struct, frozen=True):
    """The key was completed before; the job will not run again."""

    # The job that was done.
    job_id: str


# What ``enqueue`` returns: the job is new, merged with a waiting one, or done already.
EnqueueOutcome = Enqueued | Merged | AlreadyDone


class Lease(msgspec.Struct, frozen=True):
    """One worker's exclusive right to a job until it expires. ``number`` is the fencing token."""

    # The tenant of the job.
    tenant: str
    # The job.
    job_id: str
    # Grows with each lease of the job; only the highest may commit.
    number: int


class LeasedJob(Job, frozen=True, kw_only=True):
    """A job leased by a worker."""

    # The right to run the job.
    lease: Lease
    # The number of this attempt, from 1.
    attempt: int
    # When it was enqueued.
    enqueued_at: datetime
    # Attempts in a row that were lost while their worker ran other jobs, too; not in ``attempt``.
    lost: int = 0
    # It has a completion marker: acknowledge it without running.
    completed: bool = False

    def decoded(self) -> Any:
        """Return the payload, decoded from JSON."""
        return msgspec.json.decode(self.payload)
