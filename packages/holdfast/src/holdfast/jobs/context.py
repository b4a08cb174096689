"""One attempt at a job, as its handler sees it: the payload, a transaction, steps, more jobs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.core.job import EnqueueOutcome, LeasedJob, stable_uuid
from holdfast.errors import NonRetryableError, NoTransactionError, UsageError
from holdfast.jobs.enqueue import Cause, encode_json, new_job
from holdfast.ports import Params, Row, Transaction, UnitOfWork

if TYPE_CHECKING:
    from holdfast.jobs.job_store import JobStore

__all__ = ["JobContext", "encode_result"]

T = TypeVar("T")

_MAX_RESULT_BYTES = 64 * 1024


class _LazyTransaction:
    """Begins with the first statement: a job that writes nothing holds no connection."""

    __slots__ = ("_run",)

    def __init__(self, run: "JobContext") -> None:
        self._run = run

    async def execute(self, sql: str, params: Params = None) -> int:
        return await (await self._run.unit()).statements.execute(sql, params)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        return await (await self._run.unit()).statements.fetch_all(sql, params)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        return await (await self._run.unit()).statements.fetch_one(sql, params)


class JobContext:
    """One attempt. What is written in ``transaction`` commits with the completion marker."""

    # Little is made before it is needed, and nothing holds itself: what reference counts do not
    # free, the garbage collector walks over again and again.
    __slots__ = (
        "_beginning",
        "_closed",
        "_has_turn",
        "_idle_seconds",
        "_job",
        "_steps",
        "_steps_asked",
        "_table",
        "_turns",
        "_unit",
        "_wishes_of",
        "_worker",
        "enqueued",
        "payload",
    )

    def __init__(
        self,
        job: LeasedJob,
        table: "JobStore",
        *,
        worker: str,
        idle_seconds: float,
        wishes_of: Callable[[str], dict[str, Any]],
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        """Hold nothing yet."""
        self._job = job
        self._table = table
        self._worker = worker
        self._idle_seconds = idle_seconds
        self._wishes_of = wishes_of
        self._turns = turns
        self._has_turn = False
        self._unit: UnitOfWork | None = None
        self._beginning: asyncio.Lock | None = None
        self._closed = False
        self._steps: dict[str, str] | None = None
        self._steps_asked: set[str] | None = None
        self.enqueued = False
        self.payload: Any = job.decoded()

    # -- what it is about -----------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The job's id: the same for every attempt."""
        return self._job.lease.job_id

    @property
    def key(self) -> str:
        """The job's key."""
        return self._job.key

    @property
    def tenant(self) -> str:
        """Whose job it is."""
        return self._job.lease.tenant

    @property
    def queue(self) -> str:
        """The queue it came through."""
        return self._job.queue

    @property
    def type(self) -> str:
        """Its type."""
        return self._job.type

    @property
    def resource_id(self) -> str | None:
        """What it is about, if whoever enqueued it said so."""
        return self._job.resource_id

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._job.attempt

    @property
    def is_last_attempt(self) -> bool:
        """True when a failure now makes it a dead letter."""
        return self._job.attempt >= self._job.max_attempts

    @property
    def request_id(self) -> str:
        """The id of the request that caused it."""
        return self._job.request_id

    @property
    def correlation_id(self) -> str:
        """The id that everything caused by one action shares."""
        return self._job.correlation_id

    @property
    def enqueued_at(self) -> datetime:
        """When it was enqueued."""
        return self._job.enqueued_at

    # -- what it may do -------------------------------------------------------------------------

    @property
    def transaction(self) -> Transaction:
        """What to write in. It begins with the first statement."""
        return _LazyTransaction(self)

    async def begin(self) -> Any:
        """Return the store's own transaction, e.g. an ``AsyncSession`` of SQLAlchemy."""
        return (await self.unit()).transaction

    async def step(self, name: str, action: Callable[[str], Awaitable[T]]) -> T:
        """Do something outside the database, and remember that it was done.

        ``action`` gets a key that is the same in every attempt: pass it on, so that the other
        service knows a repetition. When it returns, its result is recorded; a later attempt gets
        the recorded result and goes on after it. The result must be JSON. Each step of a job has a
        name of its own: ``f"mail {number}"`` in a loop.

        Steps come before the first statement in ``transaction``: what happens outside cannot be
        undone with it, and no transaction should stay open while another service thinks.
        """
        if self._unit is not None:
            raise UsageError(
                f"step {name!r} comes after a write: do what is outside first, then write"
            )
        self._steps_asked = self._steps_asked or set()
        if name in self._steps_asked:  # in silence, the second would never be done
            raise UsageError(f"there are two steps {name!r}: give each a name of its own")
        self._steps_asked.add(name)
        self._refuse_closed()
        if self._steps is None:
            self._steps = await self._table.steps(self.tenant, self.id)
        if name in self._steps:
            known: T = msgspec.json.decode(self._steps[name])
            return known
        result = await action(self.step_key(name))
        text = encode_result(result, f"step {name!r}") or "null"
        self._refuse_closed()
        await self._table.save_step(self._job.lease, name, text, worker=self._worker)
        self._steps[name] = text
        return result

    def step_key(self, name: str) -> str:
        """Return the key a step passes on: a UUID that is the same in every attempt."""
        return stable_uuid("step", self.tenant, self.id, name)

    async def enqueue(self, job_type: str, payload: Any = None, **wishes: Any) -> EnqueueOutcome:
        """Enqueue another job in this one's transaction. Takes what ``Holdfast.enqueue`` takes."""
        given = {name: value for name, value in wishes.items() if value is not None}
        wishes = self._wishes_of(job_type) | given
        cause = Cause(
            wishes.pop("tenant", None) or self.tenant,
            f"job {self.type}",
            self.request_id,
            self.correlation_id,
        )
        job = new_job(job_type, payload, cause=cause, **wishes)
        self.enqueued = True
        return await self._table.enqueue((await self.unit()).statements, job)

    # -- for the worker -------------------------------------------------------------------------

    async def unit(self) -> UnitOfWork:
        """Return the transaction, beginning it if need be."""
        self._refuse_closed()
        if self._unit is None:
            self._beginning = self._beginning or asyncio.Lock()
            async with self._beginning:
                if self._unit is None:
                    await self._take_turn()
                    unit = await self._table.store.begin(idle_seconds=self._idle_seconds)
                    if self._closed:  # given up while it began
                        await unit.rollback()
                        self._pass_turn_on()
                        self._refuse_closed()
                    self._unit = unit
        return self._unit

    @property
    def open_unit(self) -> UnitOfWork | None:
        """The transaction, if it has begun."""
        return self._unit

    async def close(self) -> None:
        """Undo what was written, and let nothing more be written. Idempotent."""
        self._closed = True
        unit, self._unit = self._unit, None
        if unit is not None:
            await unit.rollback()
        self._pass_turn_on()

    async def _take_turn(self) -> None:
        if self._turns is not None and not self._has_turn:
            await self._turns.acquire()
            self._has_turn = True

    def _pass_turn_on(self) -> None:
        if self._turns is not None and self._has_turn:
            self._has_turn = False
            self._turns.release()

    def seal(self) -> None:
        """Let nothing more be written: it is being committed."""
        self._closed = True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise NoTransactionError("this attempt is over: it was committed or given up")


def encode_result(value: Any, what: str) -> str | None:
    """Write what a handler returned as JSON. Raises ``NonRetryableError`` for anything else."""
    if value is None:
        return None
    try:
        text = encode_json(value)
    except (TypeError, ValueError) as error:
        raise NonRetryableError(f"{what} returned something that is not JSON: {error}") from error
    if len(text) > _MAX_RESULT_BYTES:
        raise NonRetryableError(f"{what} returned {len(text)} bytes, at most {_MAX_RESULT_BYTES}")
    return text.decode()
