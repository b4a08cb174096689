"""Execute one leased job: run its handler, then commit, retry, dead-letter or release it."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

from onceward.errors import (
    AbortedTransactionError,
    CommitUnknownError,
    JobPayloadTooLargeError,
    LeaseLostError,
    NonRetryableError,
    RetryLaterError,
    StoreUnavailableError,
    UsageError,
)
from onceward.jobs.context import ContextConfig, JobContext, encode_result
from onceward.jobs.enqueue import MAX_SECONDS
from onceward.jobs.job import Lease
from onceward.jobs.registry import JobRegistry, Registration
from onceward.jobs.sync_handler import run_in_thread
from onceward.observability.traces import Spans
from onceward.ports import (
    Clock,
    Delivery,
    Ending,
    Engine,
    FaultPoints,
    Finished,
    JobMetrics,
    JobOutcome,
    Retry,
    StoreMetrics,
    UnitOfWork,
)
from onceward_protocol.retry import WORKER

# Where tests kill a worker, delay it or raise.
FAULT_POINTS: Final = (
    "job_after_claim",
    "job_after_handler",
    "job_before_commit",
    "job_after_commit",
    "job_before_retry",
)

# A handler that ignores its cancellation is abandoned after this time.
_CANCEL_SECONDS: Final = 5.0
_MAX_ERROR_CHARACTERS: Final = 2000

_log = logging.getLogger("onceward.jobs")

Result = tuple[JobOutcome, Ending]


class _TimeLimitError(Exception):
    """The handler ran longer than its time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig(ContextConfig):
    """State that all executors of a worker share."""

    registry: JobRegistry
    engine: Engine
    metrics: JobMetrics
    store_metrics: StoreMetrics
    clock: Clock
    # OpenTelemetry spans; None without.
    spans: Spans | None
    faults: FaultPoints | None
    # Commits the completion of a job that wrote nothing.
    complete: Callable[[Lease, str | None], Awaitable[None]]
    # Keeps a reference to a handler that does not end.
    abandon: Callable[[asyncio.Task[Any]], None]


class JobExecutor:
    """One attempt at one job."""

    def __init__(self, config: ExecutorConfig, delivery: Delivery) -> None:
        self._config = config
        self.delivery = delivery
        self.job = delivery.job
        self._handler: asyncio.Task[Any] | None = None
        self._handler_ended: asyncio.Future[None] | None = None
        self._is_out_of_time = False
        self._is_committing = False
        self._is_lost = False
        self._is_released = False
        self.context: JobContext | None = None
        self._started = config.clock.monotonic()

    # -- called by the worker ---------------------------------------------------------------------

    def lose_lease(self) -> None:
        """Cancel the handler: the lease is lost. A commit under way detects that by itself."""
        self._is_lost = True
        self._cancel()

    def release(self) -> None:
        """Cancel the handler and make the job available to other workers at once."""
        self._is_released = True
        self._cancel()

    def _cancel(self) -> None:
        if self._handler is not None and not self._is_committing:
            self._handler.cancel()
            asyncio.get_running_loop().call_later(_CANCEL_SECONDS, self._stop_waiting)

    def _exceed_time_limit(self) -> None:
        if self._handler is not None and not self._handler.done():
            self._is_out_of_time = True
            self._cancel()

    def _stop_waiting(self, _handler: Any = None) -> None:
        if self._handler_ended is not None and not self._handler_ended.done():
            self._handler_ended.set_result(None)

    # -- the attempt ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Execute the job. Raises nothing but cancellation."""
        spans, job = self._config.spans, self.job
        if spans is None:
            await self._run_to_end()
            return
        with spans.job(job.type, self._log_fields(), traceparent=job.traceparent) as span:
            span.describe({"outcome": await self._run_to_end()})

    async def _run_to_end(self) -> JobOutcome:
        config = self._config
        try:
            outcome, ending = await self._run()
        except (StoreUnavailableError, CommitUnknownError) as error:
            if self._is_committing:
                is_unknown = isinstance(error, CommitUnknownError)
                config.store_metrics.commit_failed(
                    "job", "unknown" if is_unknown else "rolled_back"
                )
            # Nothing can be written now. When the lease has expired, the next worker sees what
            # was committed.
            _log.warning(
                "the store failed while a job was running",
                extra=self._log_fields(error=_line(error)),
            )
            outcome, ending = "unknown", Retry(config.lease_seconds)
        except LeaseLostError as error:
            _log.warning("lease lost", extra=self._log_fields(error=_line(error)))
            outcome, ending = "lease_lost", Retry(0.0)
        finally:
            await self._roll_back()
        seconds = config.clock.monotonic() - self._started
        config.metrics.job_ended(self.job.queue, self.job.type, outcome, seconds)
        with suppress(Exception):  # the engine is only informed; the tables decide
            await config.engine.settle(self.delivery, ending)
        return outcome

    async def _run(self) -> Result:
        config, job = self._config, self.job
        await self._reach("job_after_claim")
        if job.completed:
            await config.job_store.remove_completed(job, worker=config.worker_name)
            return "duplicate", Finished()
        await self._log_takeover()
        registration = config.registry.find(job.type)
        if registration is None:
            return await self._dead_letter(
                "unknown_type", f"no handler for jobs of type {job.type}"
            )
        refusal = self._refusal()
        if refusal is not None:
            return await self._dead_letter(*refusal)
        try:
            result = await self._run_handler(registration)
            await self._reach("job_after_handler")
            return await self._complete(encode_result(result, f"the handler of {job.type}"))
        except (LeaseLostError, StoreUnavailableError, CommitUnknownError):
            raise
        except asyncio.CancelledError as error:
            return await self._cancelled(error)
        except Exception as error:  # noqa: BLE001 - handlers may raise anything
            return await self._failed(error, registration)

    def _refusal(self) -> tuple[str, str] | None:
        """Return reason and error if the handler must not be run."""
        job, limit = self.job, self._config.max_payload_bytes
        if job.attempt > job.max_attempts:
            return "worker_lost", "the worker died, hung or lost its lease in the last attempt"
        if len(job.payload.encode()) > limit:
            return "payload_too_large", f"the payload has more than {limit} bytes"
        return None

    async def _run_handler(self, registration: Registration) -> Any:
        config = self._config
        self.context = JobContext(self.job, config)
        if self._is_lost or self._is_released:
            raise asyncio.CancelledError
        limit = registration.time_limit_seconds
        loop = asyncio.get_running_loop()
        self._handler_ended = loop.create_future()
        function = cast("Callable[[Any], Any]", registration.handler)
        self._handler = handler = asyncio.ensure_future(
            function(self.context)
            if registration.is_async
            else run_in_thread(function, self.context)
        )
        handler.add_done_callback(self._stop_waiting)
        timer = loop.call_later(limit, self._exceed_time_limit)
        try:
            await self._handler_ended
        finally:
            timer.cancel()
            if not handler.done():
                handler.cancel()
                config.abandon(handler)
                _log.error(
                    "a handler ignored its cancellation and was abandoned",
                    extra=self._log_fields(),
                )
        has_failed = not handler.done() or handler.cancelled() or handler.exception() is not None
        if self._is_out_of_time:
            # The cause has the traceback of the line that took too long.
            cause = _cancellation(handler)
            raise _TimeLimitError(f"the handler took longer than {limit:g} seconds") from cause
        if has_failed and (self._is_lost or self._is_released):
            raise asyncio.CancelledError
        return handler.result()

    async def _complete(self, result: str | None) -> Result:
        """Commit the effects and the completion marker together."""
        config, context, job = self._config, self.context, self.job
        assert context is not None  # noqa: S101 - the handler has run
        self._is_committing = True
        if self._is_lost:
            raise LeaseLostError("the lease ran out while the handler was running")
        unit = context.open_unit
        if unit is None and job.order_key is not None:
            unit = await context.unit()  # the next job of the order key is released with it
        if unit is None:
            context.seal()
            await self._reach("job_before_commit")
            await config.complete(job.lease, result)
        else:
            await self._commit(unit, context, result)
        await self._reach("job_after_commit")
        if context.enqueued or job.order_key is not None:
            config.engine.notify()
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("job done", extra=self._log_fields())
        return "done", Finished()

    async def _commit(self, unit: UnitOfWork, context: JobContext, result: str | None) -> None:
        """Commit effects and marker, in one round trip if the store can."""
        store, worker = self._config.job_store, self._config.worker_name
        last = None
        if unit.can_commit_after:
            last = store.completion(self.job, result, worker=worker)
        if last is None:
            await store.complete_within(unit, self.job, result, worker=worker)
        await self._reach("job_before_commit")
        context.seal()
        if last is None:
            await unit.commit(None, None)
        else:
            await unit.commit_after(last)

    # -- failures ---------------------------------------------------------------------------------

    async def _cancelled(self, error: asyncio.CancelledError) -> Result:
        if self._is_lost:
            raise LeaseLostError("the lease ran out while the handler was running")
        if self._is_released:
            return await self._release()
        # The handler cancelled itself: an error like any other.
        return await self._fail("error", "the handler was cancelled", cause=error)

    async def _failed(self, error: Exception, registration: Registration) -> Result:
        match error:
            case _TimeLimitError():
                return await self._fail("time_limit", str(error), cause=error)
            case RetryLaterError():
                floor = error.after_seconds
                return await self._fail("retry_later", _line(error), cause=error, floor=floor)
            case AbortedTransactionError():  # the statement may succeed next time
                return await self._fail("error", _line(error), cause=error)
            case NonRetryableError() | UsageError() | JobPayloadTooLargeError():
                return await self._dead_letter("non_retryable", _line(error), cause=error)
            case _ if isinstance(error, registration.never_retry):
                return await self._dead_letter("non_retryable", _line(error), cause=error)
            case _:
                return await self._fail("error", _line(error), cause=error)

    async def _fail(
        self, reason: str, error: str, *, cause: BaseException, floor: float = 0.0
    ) -> Result:
        """Schedule a retry after at least ``floor`` seconds; dead-letter after the last attempt."""
        config, job = self._config, self.job
        registration = config.registry.find(job.type)
        policy = WORKER if registration is None else registration.retry
        if policy.gives_up_after(job.attempt, max_attempts=job.max_attempts):
            return await self._dead_letter(reason, error, cause=cause)
        await self._roll_back()
        await self._reach("job_before_retry")
        delay = policy.delay_seconds(
            job.attempt,
            random=random.random(),  # noqa: S311 - spreads retries, protects nothing
            retry_after_seconds=min(floor, MAX_SECONDS),
        )
        is_held = await config.job_store.retry(
            job,
            worker=config.worker_name,
            reason=reason,
            error=_storable(error),
            delay_seconds=delay,
        )
        if not is_held:
            raise LeaseLostError("the lease was lost before the failure was recorded")
        # A handler that asks for a later attempt has not failed.
        self._log_failure(
            logging.WARNING if reason == "retry_later" else logging.ERROR,
            "job failed, to be retried",
            cause,
            reason=reason,
            error=error,
            delay_seconds=round(delay, 3),
        )
        return "retried", Retry(delay)

    async def _dead_letter(
        self, reason: str, error: str, *, cause: BaseException | None = None
    ) -> Result:
        config, job = self._config, self.job
        await self._roll_back()
        await self._reach("job_before_retry")
        if not await config.job_store.dead_letter(
            job, worker=config.worker_name, reason=reason, error=_storable(error)
        ):
            raise LeaseLostError("the lease was lost before the dead letter was written")
        if job.order_key is not None:
            config.engine.notify()
        self._log_failure(logging.ERROR, "job given up", cause, reason=reason, error=error)
        return "dead", Finished()

    async def _release(self) -> Result:
        await self._roll_back()
        await self._config.job_store.release(self.job, worker=self._config.worker_name)
        self._config.engine.notify()
        return "given_back", Retry(0.0)

    async def _roll_back(self) -> None:
        """Undo the handler's writes: on SQLite they hold the write lock."""
        if self.context is not None:
            await self.context.close()

    async def _reach(self, point: str) -> None:
        if self._config.faults is not None:
            await self._config.faults.reach(point)

    async def _log_takeover(self) -> None:
        """Log a job that another worker has lost: that worker could not log it itself."""
        lost = None
        with suppress(StoreUnavailableError):  # the job itself finds out
            lost = await self._config.job_store.lost_before(self.job.lease)
        if lost is not None:
            worker, error = lost
            self._log_failure(
                logging.WARNING, "job taken over", None, lost_worker=worker, error=error
            )

    def _log_failure(
        self, level: int, event: str, cause: BaseException | None, **fields: Any
    ) -> None:
        """Log a failed attempt with its traceback; the text says as much as the fields."""
        job = self.job
        _log.log(
            level,
            "%s: %s %s, attempt %d of %d, tenant %s: %s",
            event,
            job.type,
            job.lease.job_id,
            min(job.attempt, job.max_attempts),
            job.max_attempts,
            job.lease.tenant,
            fields["error"],
            exc_info=cause,
            extra=self._log_fields(**fields),
        )

    def _log_fields(self, **more: Any) -> dict[str, Any]:
        job = self.job
        return {
            "job_id": job.lease.job_id,
            "queue": job.queue,
            "job_type": job.type,
            "tenant": job.lease.tenant,
            "attempt": job.attempt,
            "max_attempts": job.max_attempts,
            "request_id": job.request_id,
            "correlation_id": job.correlation_id,
            **more,
        }


def _cancellation(handler: "asyncio.Future[Any]") -> BaseException | None:
    """Return how a cancelled handler ended, with its traceback; None if it has not."""
    if not handler.done():
        return None
    try:
        return handler.exception()
    except asyncio.CancelledError as error:
        return error


def _line(error: BaseException) -> str:
    """Return type and message of an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _storable(text: str) -> str:
    """Shorten an error, and replace NUL, which PostgreSQL cannot store."""
    return text.replace("\x00", "\\x00")[:_MAX_ERROR_CHARACTERS]
