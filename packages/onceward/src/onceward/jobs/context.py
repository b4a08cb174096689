"""Context of a handler: the job's payload, a transaction, steps, and a way to enqueue jobs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar, Unpack

import msgspec

from onceward.errors import NonRetryableError, NoTransactionError, UsageError
from onceward.jobs.enqueue import Cause, encode_json, log_duplicate, new_job
from onceward.jobs.job import EnqueueOptions, EnqueueOutcome, LeasedJob, stable_uuid
from onceward.jobs.job_store import JobStore
from onceward.observability.traces import continued_traceparent
from onceward.ports import Params, Row, Transaction, UnitOfWork

__all__ = ["ContextConfig", "JobAttributes", "JobContext", "encode_result"]

T = TypeVar("T")

_MAX_RESULT_BYTES: Final = 64 * 1024


class _LazyTransaction:
    """Begins with the first statement: a job that writes nothing holds no connection."""

    __slots__ = ("_begin",)

    def __init__(self, begin: Callable[[], Awaitable[UnitOfWork]]) -> None:
        self._begin = begin

    async def execute(self, sql: str, params: Params = None) -> int:
        return await (await self._begin()).statements.execute(sql, params)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        return await (await self._begin()).statements.fetch_all(sql, params)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        return await (await self._begin()).statements.fetch_one(sql, params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """State that the contexts of all jobs of a worker share."""

    job_store: JobStore
    worker_name: str
    lease_seconds: float
    # The defaults of a job that a handler enqueues, by its type.
    defaults_for: Callable[[str], EnqueueOptions]
    max_payload_bytes: int
    # How many handlers may hold a transaction at once; None: no limit.
    transaction_slots: asyncio.Semaphore | None


class JobAttributes:
    """Facts about a job and its attempt, for the handler."""

    __slots__ = ("_job", "payload")

    def __init__(self, job: LeasedJob, payload: Any) -> None:
        self._job = job
        # What was given to ``enqueue``, decoded.
        self.payload = payload

    @property
    def id(self) -> str:
        """The job's id, the same in every attempt."""
        return self._job.lease.job_id

    @property
    def key(self) -> str:
        """The job's key."""
        return self._job.key

    @property
    def tenant(self) -> str:
        """The tenant that the job belongs to."""
        return self._job.lease.tenant

    @property
    def queue(self) -> str:
        """The job's queue."""
        return self._job.queue

    @property
    def type(self) -> str:
        """The job's type."""
        return self._job.type

    @property
    def resource_id(self) -> str | None:
        """The ``resource_id`` it was enqueued with, if any."""
        return self._job.resource_id

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._job.attempt

    @property
    def is_last_attempt(self) -> bool:
        """True if a failure of this attempt dead-letters the job."""
        return self._job.attempt >= self._job.max_attempts

    @property
    def request_id(self) -> str:
        """The id of the request that enqueued it."""
        return self._job.request_id

    @property
    def correlation_id(self) -> str:
        """The id shared by all requests and jobs that follow from one action."""
        return self._job.correlation_id

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context of the request that enqueued it, if it had one."""
        return self._job.traceparent

    @property
    def enqueued_at(self) -> datetime:
        """When it was enqueued."""
        return self._job.enqueued_at

    def step_key(self, name: str) -> str:
        """Return the idempotency key of a step: a UUID that is the same in every attempt."""
        return stable_uuid("step", self.tenant, self.id, name)


class JobContext(JobAttributes):
    """One attempt at a job. Writes in ``transaction`` commit with the completion marker."""

    # Created for every job: members are made when needed and hold no reference cycles, which
    # only the garbage collector could free.
    def __init__(self, job: LeasedJob, config: ContextConfig) -> None:
        super().__init__(job, job.decoded())
        self._config = config
        self._has_slot = False
        self._unit: UnitOfWork | None = None
        self._beginning: asyncio.Lock | None = None
        self._closed = False
        self._steps: dict[str, str] | None = None
        self._step_names: set[str] | None = None
        # True once this job has enqueued another.
        self.enqueued = False

    # -- for the handler ------------------------------------------------------------------------

    @property
    def transaction(self) -> Transaction:
        """The job's transaction. It begins with the first statement."""
        return _LazyTransaction(self.unit)

    async def begin(self) -> Any:
        """Return the store's own transaction, e.g. an ``AsyncSession`` of SQLAlchemy."""
        return (await self.unit()).transaction

    async def step(self, name: str, action: Callable[[str], Awaitable[T]]) -> T:
        """Call another service once: run ``action`` and record its result.

        ``action`` gets an idempotency key that is the same in every attempt: pass it on, so that
        the other service detects a repetition. The result must be JSON; later attempts get the
        recorded result without running ``action``. Names are unique within a job: use
        ``f"mail {number}"`` in a loop.

        Steps come before the first statement in ``transaction``: a rollback cannot undo them, and
        no transaction should stay open during a call to another service. Raises ``UsageError``.
        """
        recorded = await self.find_step(name)
        if recorded is not None:
            known: T = recorded[0]
            return known
        result = await action(self.step_key(name))
        await self.record_step(name, result)
        return result

    async def enqueue(
        self, job_type: str, payload: Any = None, **options: Unpack[EnqueueOptions]
    ) -> EnqueueOutcome:
        """Enqueue another job in this one's transaction. Raises ``UsageError``."""
        cause = Cause(
            self.tenant,
            f"job {self.type}",
            self.request_id,
            self.correlation_id,
            continued_traceparent(self.traceparent),
        )
        # What follows from a write is about the version that the write made.
        defaults = self._config.defaults_for(job_type)
        defaults["version"] = self._job.version
        job = new_job(
            job_type,
            payload,
            cause=cause,
            defaults=defaults,
            max_payload_bytes=self._config.max_payload_bytes,
            **options,
        )
        self.enqueued = True
        outcome = await self._config.job_store.enqueue((await self.unit()).statements, job)
        log_duplicate(job, outcome)
        return outcome

    # -- for the executor -----------------------------------------------------------------------

    @property
    def leased_job(self) -> LeasedJob:
        """The job as it was claimed."""
        return self._job

    async def find_step(self, name: str) -> tuple[Any] | None:
        """Begin a step: return its recorded result in a tuple, or None if it must run."""
        if self._unit is not None:
            raise UsageError(
                f"step {name!r} comes after a write: run all steps before the first write"
            )
        self._step_names = self._step_names or set()
        if name in self._step_names:  # else the second would be skipped
            raise UsageError(f"there are two steps {name!r}: names must be unique within a job")
        self._step_names.add(name)
        self._refuse_closed()
        if self._steps is None:
            self._steps = await self._config.job_store.steps(self.tenant, self.id)
        if name in self._steps:
            return (msgspec.json.decode(self._steps[name]),)
        return None

    async def record_step(self, name: str, result: Any) -> None:
        """Record the result of a step that has run."""
        text = encode_result(result, f"step {name!r}") or "null"
        self._refuse_closed()
        store, worker = self._config.job_store, self._config.worker_name
        await store.save_step(self._job.lease, name, text, worker=worker)
        self._steps = (self._steps or {}) | {name: text}

    async def unit(self) -> UnitOfWork:
        """Return the open transaction, or begin one."""
        self._refuse_closed()
        if self._unit is None:
            self._beginning = self._beginning or asyncio.Lock()
            async with self._beginning:
                if self._unit is None:
                    slots = self._config.transaction_slots
                    if slots is not None and not self._has_slot:
                        await slots.acquire()
                        self._has_slot = True
                    store = self._config.job_store.store
                    unit = await store.begin(idle_seconds=self._config.lease_seconds)
                    if self._closed:  # closed while it began
                        await unit.rollback()
                        self._free_slot()
                        self._refuse_closed()
                    self._unit = unit
        return self._unit

    @property
    def open_unit(self) -> UnitOfWork | None:
        """The transaction, or None if it has not begun."""
        return self._unit

    async def close(self) -> None:
        """Roll back and refuse further writes. Idempotent."""
        self._closed = True
        unit, self._unit = self._unit, None
        if unit is not None:
            await unit.rollback()
        self._free_slot()

    def seal(self) -> None:
        """Refuse further writes: the transaction is being committed."""
        self._closed = True

    def _free_slot(self) -> None:
        if self._config.transaction_slots is not None and self._has_slot:
            self._has_slot = False
            self._config.transaction_slots.release()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise NoTransactionError("this attempt has ended: it was committed or rolled back")


def encode_result(value: Any, what: str) -> str | None:
    """Return a result as JSON, None as None. Raises ``NonRetryableError`` if it is not JSON."""
    if value is None:
        return None
    try:
        text = encode_json(value)
    except (TypeError, ValueError) as error:
        raise NonRetryableError(f"{what} returned a value that is not JSON: {error}") from error
    if len(text) > _MAX_RESULT_BYTES:
        raise NonRetryableError(
            f"{what} returned {len(text)} bytes, at most {_MAX_RESULT_BYTES} fit"
        )
    return text.decode()
