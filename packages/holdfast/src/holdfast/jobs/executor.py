"""One attempt from lease to ending: run the handler, then commit, retry, bury or let go."""

import asyncio
import logging
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from holdfast.core.retry import WORKER
from holdfast.errors import (
    CommitUnknownError,
    JobPayloadTooLargeError,
    LeaseLostError,
    NonRetryableError,
    RetryLaterError,
    StoreUnavailableError,
    UsageError,
)
from holdfast.jobs.context import JobContext, encode_result
from holdfast.jobs.enqueue import LONGEST_SECONDS
from holdfast.jobs.registry import Registration
from holdfast.ports import Delivery, Ending, Finished, JobOutcome, Retry

if TYPE_CHECKING:
    from holdfast.jobs.worker import Worker

__all__ = ["FAULT_POINTS", "Attempt"]

# Where a worker may die, and tests make it die.
FAULT_POINTS: Final = (
    "job_after_claim",
    "job_after_handler",
    "job_before_commit",
    "job_after_commit",
    "job_before_retry",
)

# A handler that does not end when it is cancelled is left behind after this time.
_CANCEL_SECONDS: Final = 5.0
_MOST_ERROR_TEXT: Final = 2000

_log = logging.getLogger("holdfast.jobs")


class _OutOfTimeError(Exception):
    """The handler took longer than it may."""


class Attempt:
    """One leased job in one worker."""

    __slots__ = (
        "_delivery",
        "_handler",
        "_is_committing",
        "_is_given_back",
        "_is_lost",
        "_is_out_of_time",
        "_waiting",
        "_worker",
        "job",
        "run",
        "started",
    )

    def __init__(self, worker: "Worker", delivery: Delivery) -> None:
        """Belong to a worker."""
        self._worker = worker
        self._delivery = delivery
        self.job = delivery.job
        self._handler: asyncio.Task[Any] | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._is_out_of_time = False
        self._is_committing = False
        self._is_lost = False
        self._is_given_back = False
        self.run: JobContext | None = None
        self.started = worker.clock.monotonic()

    @property
    def delivery(self) -> Delivery:
        """The delivery, for the engine."""
        return self._delivery

    # -- from outside ---------------------------------------------------------------------------

    def lose(self) -> None:
        """End: the lease is gone. What is being committed finds out by itself."""
        self._is_lost = True
        self._cancel()

    def give_back(self) -> None:
        """End: the worker stops. The job becomes another's at once."""
        self._is_given_back = True
        self._cancel()

    def _cancel(self) -> None:
        if self._handler is not None and not self._is_committing:
            self._handler.cancel()
            asyncio.get_running_loop().call_later(_CANCEL_SECONDS, self._stop_waiting)

    def _run_out_of_time(self) -> None:
        if self._handler is not None and not self._handler.done():
            self._is_out_of_time = True
            self._cancel()

    def _stop_waiting(self, _ended: Any = None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # -- the attempt ------------------------------------------------------------------------------

    async def work(self) -> None:
        """Do everything. Raises nothing but cancellation: whatever happens has an ending."""
        worker = self._worker
        try:
            outcome, ending = await self._work()
        except (StoreUnavailableError, CommitUnknownError) as error:
            # Nothing can be written now. The lease runs out, and whoever takes the job next sees
            # what was committed.
            _log.warning("the store failed a job", extra=self._facts(error=_line(error)))
            outcome, ending = "unknown", Retry(worker.lease_seconds)
        except LeaseLostError as error:
            _log.warning("lease lost", extra=self._facts(error=_line(error)))
            outcome, ending = "lease_lost", Retry(0.0)
        finally:
            if self.run is not None:
                await self.run.close()
        seconds = worker.clock.monotonic() - self.started
        worker.metrics.job_ended(self.job.queue, self.job.type, outcome, seconds)
        with suppress(Exception):  # the engine only hears of it; the tables know
            await worker.engine.settle(self._delivery, ending)

    async def _work(self) -> tuple[JobOutcome, Ending]:
        worker, job = self._worker, self.job
        await worker.reach("job_after_claim")
        if job.completed:
            await worker.table.forget(job, worker=worker.name)
            return "duplicate", Finished()
        registration = worker.registry.find(job.type)
        if registration is None:
            return await self._bury("unknown_type", f"no handler for jobs of type {job.type}")
        refused = self._refused()
        if refused is not None:
            return await self._bury(*refused)
        try:
            result = await self._run_handler(registration)
            await worker.reach("job_after_handler")
            return await self._complete(encode_result(result, f"the handler of {job.type}"))
        except (LeaseLostError, StoreUnavailableError, CommitUnknownError):
            raise
        except asyncio.CancelledError:
            return await self._cancelled()
        except Exception as error:  # noqa: BLE001 - whatever a handler raises, an operator reads
            return await self._failed(error, registration)

    def _refused(self) -> tuple[str, str] | None:
        """Say why a job is not even tried, if it is not."""
        job, most = self.job, self._worker.max_payload_bytes
        if job.attempt > job.max_attempts:
            return "worker_lost", "the worker died, hung or lost its lease in the last attempt"
        if len(job.payload.encode()) > most:
            return "payload_too_large", f"the payload has more than {most} bytes"
        return None

    async def _cancelled(self) -> tuple[JobOutcome, Ending]:
        if self._is_lost:
            raise LeaseLostError("the lease ran out while the handler was running")
        if self._is_given_back:
            return await self._give_back()
        # Somebody cancelled from inside the handler: an error like any other.
        return await self._fail("error", "the handler was cancelled")

    async def _failed(
        self, error: Exception, registration: Registration
    ) -> tuple[JobOutcome, Ending]:
        match error:
            case _OutOfTimeError():
                return await self._fail("time_limit", str(error))
            case RetryLaterError():
                return await self._fail("retry_later", _line(error), floor=error.after_seconds)
            case NonRetryableError() | UsageError() | JobPayloadTooLargeError():
                return await self._bury("non_retryable", _line(error))
            case _ if isinstance(error, registration.never_retry):
                return await self._bury("non_retryable", _line(error))
            case _:
                _log.info("a job failed", exc_info=error, extra=self._facts())
                return await self._fail("error", _line(error))

    async def _run_handler(self, registration: Registration) -> Any:
        worker = self._worker
        self.run = JobContext(
            self.job,
            worker.table,
            worker=worker.name,
            idle_seconds=worker.lease_seconds,
            wishes_of=worker.wishes_of,
            turns=worker.transaction_turns,
        )
        if self._is_lost or self._is_given_back:
            raise asyncio.CancelledError
        limit = registration.time_limit_seconds
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        self._handler = handler = asyncio.ensure_future(registration.handler(self.run))
        handler.add_done_callback(self._stop_waiting)
        timer = loop.call_later(limit, self._run_out_of_time)
        try:
            await self._waiting
        finally:
            timer.cancel()
            if not handler.done():
                handler.cancel()
                worker.leave_behind(handler)
                _log.error("a handler does not end", extra=self._facts())
        has_failed = not handler.done() or handler.cancelled() or handler.exception() is not None
        if self._is_out_of_time:
            raise _OutOfTimeError(f"the handler took longer than {limit:g} seconds")
        if has_failed and (self._is_lost or self._is_given_back):  # because it was told to end
            raise asyncio.CancelledError
        return handler.result()

    async def _complete(self, result: str | None) -> tuple[JobOutcome, Ending]:
        """Commit the effects and the marker together."""
        worker, run, job = self._worker, self.run, self.job
        assert run is not None  # noqa: S101 - it has just run
        self._is_committing = True
        if self._is_lost:
            raise LeaseLostError("the lease ran out while the handler was running")
        unit = run.open_unit
        if unit is None and job.order_key is not None:
            unit = await run.unit()  # the next in line is released in the same transaction
        if unit is None:
            run.seal()
            await worker.reach("job_before_commit")
            await worker.mark(job.lease, result)
        else:
            await worker.table.complete_within(unit, job, result, worker=worker.name)
            await worker.reach("job_before_commit")
            run.seal()
            await unit.commit(None, None)
        await worker.reach("job_after_commit")
        if run.enqueued or job.order_key is not None:
            worker.engine.notify()
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("job done", extra=self._facts())
        return "done", Finished()

    # -- other endings -------------------------------------------------------------------------

    async def _fail(
        self, reason: str, error: str, *, floor: float = 0.0
    ) -> tuple[JobOutcome, Ending]:
        """Retry later, or give up after the last attempt."""
        worker, job = self._worker, self.job
        if WORKER.gives_up_after(job.attempt, max_attempts=job.max_attempts):
            return await self._bury(reason, error)
        await self._undo()
        await worker.reach("job_before_retry")
        delay = WORKER.delay_seconds(
            job.attempt,
            random=random.random(),  # noqa: S311 - spreads retries, guards nothing
            retry_after_seconds=min(floor, LONGEST_SECONDS),
        )
        kept = await worker.table.retry(
            job, worker=worker.name, reason=reason, error=_cut(error), delay_seconds=delay
        )
        if not kept:
            raise LeaseLostError("the lease was lost before the failure was noted")
        _log.warning(
            "job failed, to be retried",
            extra=self._facts(reason=reason, error=error, delay_seconds=round(delay, 3)),
        )
        return "retried", Retry(delay)

    async def _bury(self, reason: str, error: str) -> tuple[JobOutcome, Ending]:
        worker, job = self._worker, self.job
        await self._undo()
        await worker.reach("job_before_retry")
        if not await worker.table.bury(job, worker=worker.name, reason=reason, error=_cut(error)):
            raise LeaseLostError("the lease was lost before the dead letter was written")
        if job.order_key is not None:
            worker.engine.notify()
        _log.error("job given up", extra=self._facts(reason=reason, error=error))
        return "dead", Finished()

    async def _give_back(self) -> tuple[JobOutcome, Ending]:
        await self._undo()
        await self._worker.table.give_back(self.job, worker=self._worker.name)
        self._worker.engine.notify()
        return "given_back", Retry(0.0)

    async def _undo(self) -> None:
        """Undo the handler's writes first: on SQLite they hold the one write turn."""
        if self.run is not None:
            await self.run.close()

    def _facts(self, **more: Any) -> dict[str, Any]:
        job = self.job
        return {
            "job_id": job.lease.job_id,
            "queue": job.queue,
            "job_type": job.type,
            "tenant": job.lease.tenant,
            "attempt": job.attempt,
            "request_id": job.request_id,
            "correlation_id": job.correlation_id,
            **more,
        }


def _line(error: BaseException) -> str:
    """Say what went wrong in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _cut(text: str) -> str:
    """Keep it short, and free of what PostgreSQL's text cannot hold."""
    return text.replace("\x00", "\\x00")[:_MOST_ERROR_TEXT]
