"""What a job is: its key, its identity, its states. Values and naming only, no I/O.

A job's *key* says what it is about: ``job:{tenant}:{queue}:{type}:{resource_id or payload hash}``.
Its *id* is made of the key alone, so the same key is the same job, for ever: the completion marker
carries that id, and whoever enqueues the key again is told that it was done.

That is wrong for work that follows a changing state, such as "reconcile this user's day": done
for ever would drop the second reconciliation of the day in silence. Such a job *coalesces*: its
key has one more part, different for every enqueue. While one waits, another is merged into it;
once it has started, the next write gets a job of its own.
"""

import re
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, Literal

import msgspec

from holdfast.core.uuid_format import format_uuid
from holdfast.errors import UsageError

__all__ = [
    "AlreadyDone",
    "EnqueueOutcome",
    "Enqueued",
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

JobState = Literal["waiting", "running", "done", "dead"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_name(name: str, what: str) -> str:
    """Refuse names of queues and types that would not fit into keys, subjects and labels."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{what} {name!r} should be 1 to 100 letters, digits, dots, dashes or underscores"
        )
    return name


def job_key(tenant: str, queue: str, job_type: str, about: str) -> str:
    """Return the key of a job, unique within its tenant, which stands beside it everywhere."""
    return f"job:{tenant}:{queue}:{job_type}:{about}"


def job_id(key: str) -> str:
    """Return the id of the job with this key."""
    return stable_uuid("job", key)


def stable_uuid(*parts: str) -> str:
    """Return the same UUID for the same parts: 122 bits of their SHA-256, in the form of version 4.

    That form is what other services, this one's ``uuid4`` endpoints included, take as a key.
    """
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return format_uuid(sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), 4)


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """Work to be done, before it is in the table."""

    id: str
    key: str
    tenant: str
    queue: str
    type: str
    payload: str
    payload_hash: str
    request_id: str
    correlation_id: str
    actor: str
    resource_id: str | None = None
    # Not before this instant; None means as soon as it is committed.
    run_at: datetime | None = None
    delay_seconds: float = 0.0
    # While one with the same key waits, another is merged into it.
    coalesce_key: str | None = None
    # One at a time per key, in the order of their commits.
    order_key: str | None = None
    max_attempts: int = 5


class Enqueued(msgspec.Struct, frozen=True):
    """It is in the table, and will run."""

    job_id: str


class Merged(msgspec.Struct, frozen=True):
    """One like it waits (or, without a coalescing key, waits or runs): that one does the work."""

    job_id: str


class AlreadyDone(msgspec.Struct, frozen=True):
    """The key was completed before: it will not run again."""

    job_id: str


EnqueueOutcome = Enqueued | Merged | AlreadyDone


class Lease(msgspec.Struct, frozen=True):
    """One worker's right to one job, until it runs out. The number is the fencing token."""

    tenant: str
    job_id: str
    number: int


class LeasedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as a worker gets it."""

    lease: Lease
    key: str
    queue: str
    type: str
    payload: str
    attempt: int
    max_attempts: int
    request_id: str
    correlation_id: str
    enqueued_at: datetime
    resource_id: str | None = None
    order_key: str | None = None
    # Its marker is there already: to be acknowledged, not to be run.
    completed: bool = False

    def decoded(self) -> Any:
        """Return the payload as the JSON value it is."""
        return msgspec.json.decode(self.payload)
