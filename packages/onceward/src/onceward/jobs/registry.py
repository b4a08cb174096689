"""The handlers of an app, by job type, and its periodic jobs."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import time
from functools import partial
from typing import Any, Final, TypeVar

from onceward.errors import ConfigurationError
from onceward.jobs.context import JobContext
from onceward.jobs.enqueue import MAX_ATTEMPTS
from onceward.jobs.job import EnqueueOptions, check_name
from onceward.jobs.schedule import Daily, Every, Schedule
from onceward.jobs.sync_handler import SyncJobContext
from onceward_protocol.retry import WORKER, RetryPolicy

__all__ = ["Handler", "JobRegistry", "Periodic", "Registration"]

# A function that runs a job; a plain one runs in a thread.
Handler = Callable[[JobContext], Awaitable[Any]] | Callable[[SyncJobContext], Any]
HandlerT = TypeVar("HandlerT", bound=Handler)

_TIME_LIMIT_SECONDS: Final = 300.0

_log = logging.getLogger("onceward.jobs")


@dataclass(frozen=True, slots=True)
class Registration:
    """A handler with its options."""

    # The name that ``enqueue`` gets.
    job_type: str
    # The function that runs it.
    handler: Handler
    # The queue of jobs of this type.
    queue: str
    # An attempt that takes longer is cancelled.
    time_limit_seconds: float
    # Attempts after which a job is dead-lettered.
    max_attempts: int
    # How long a job waits after an attempt that failed.
    retry: RetryPolicy
    # Exceptions that dead-letter a job at once.
    never_retry: tuple[type[Exception], ...]
    # False for a plain function.
    is_async: bool


@dataclass(frozen=True, slots=True)
class Periodic:
    """A job that is enqueued once per slot of a schedule."""

    # The type of the job.
    type: str
    # The queue of the job.
    queue: str
    # When it runs.
    schedule: Schedule
    # The payload of each job.
    payload: Any = None


class JobRegistry:
    """The job handlers of one app.

    ::

        @jobs.handler("receipt.send", queue="mail")
        async def send_receipt(job: JobContext) -> None:
            await job.transaction.execute(…)
    """

    def __init__(self) -> None:
        self._registrations: dict[str, Registration] = {}
        self._queues: set[str] = set()
        # Queues that were warned of.
        self._warned: set[str] = set()
        # The periodic jobs, in the order in which they were added.
        self.periodic: list[Periodic] = []

    def handler(
        self,
        job_type: str,
        *,
        queue: str = "default",
        time_limit_seconds: float = _TIME_LIMIT_SECONDS,
        max_attempts: int | None = None,
        retry: RetryPolicy = WORKER,
        never_retry: tuple[type[Exception], ...] = (),
    ) -> Callable[[HandlerT], HandlerT]:
        """Register a handler for a type of job.

        A coroutine function runs on the event loop and gets a ``JobContext``. A plain function
        runs in a thread and gets a ``SyncJobContext``, which needs no ``await``. ``retry`` has the
        delays, and the number of attempts unless ``max_attempts`` is given. Errors of the
        types in ``never_retry`` dead-letter the job at once, as ``NonRetryableError`` does. Raises
        ``ConfigurationError`` for a second handler of a type, and for what cannot be one.
        """
        if callable(job_type):
            raise ConfigurationError(
                'write @jobs.handler("receipt.send") with the type of the jobs, not @jobs.handler'
            )
        check_name(job_type, "type")
        check_name(queue, "queue")
        if not time_limit_seconds > 0:
            raise ConfigurationError(f"{job_type}: time_limit_seconds must be above 0")
        attempts = retry.attempts if max_attempts is None else max_attempts
        if attempts is None or not 1 <= attempts <= MAX_ATTEMPTS:
            raise ConfigurationError(f"{job_type}: max_attempts must be from 1 to {MAX_ATTEMPTS}")

        def register(handler: HandlerT) -> HandlerT:
            is_async = _check_handler(job_type, handler)
            if job_type in self._registrations:
                raise ConfigurationError(f"jobs of type {job_type} already have a handler")
            self._registrations[job_type] = Registration(
                job_type=job_type,
                handler=handler,
                queue=queue,
                time_limit_seconds=time_limit_seconds,
                max_attempts=attempts,
                retry=retry,
                never_retry=never_retry,
                is_async=is_async,
            )
            self._queues.add(queue)
            return handler

        return register

    def every(self, seconds: float, job_type: str, *, queue: str = "default") -> None:
        """Enqueue a job of this type every ``seconds``, once for all processes."""
        self._add_periodic(Periodic(job_type, queue, Every(seconds)))

    def daily(self, at: time, job_type: str, *, queue: str = "default") -> None:
        """Enqueue a job of this type every day at this time (UTC), once for all processes."""
        self._add_periodic(Periodic(job_type, queue, Daily(at)))

    def _add_periodic(self, periodic: Periodic) -> None:
        check_name(periodic.type, "type")
        self._queues.add(check_name(periodic.queue, "queue"))
        self.periodic.append(periodic)

    def find(self, job_type: str) -> Registration | None:
        """Return the handler of a job type, or None."""
        return self._registrations.get(job_type)

    def defaults_for(self, job_type: str) -> EnqueueOptions:
        """Return the defaults for enqueueing a job of this type: those of its handler."""
        found = self._registrations.get(job_type)
        if found is None:
            return {}
        return {"queue": found.queue, "max_attempts": found.max_attempts}

    def warn_of_queue(self, job_type: str, queue: str) -> None:
        """Log once that no worker of this app serves a queue of a job that has a handler here."""
        if queue in self._queues or queue in self._warned or job_type not in self._registrations:
            return
        self._warned.add(queue)
        _log.warning(
            "jobs of type %s are enqueued in the queue %s, which no handler of this app has: "
            "no worker of it runs them (queues: %s)",
            job_type,
            queue,
            ", ".join(self.queues),
        )

    @property
    def queues(self) -> tuple[str, ...]:
        """All queues that have a handler."""
        return tuple(sorted(self._queues))

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._registrations.values())

    def __len__(self) -> int:
        return len(self._registrations)


def _check_handler(job_type: str, handler: Any) -> bool:
    """Return whether a handler is async. Raises ``ConfigurationError`` if it cannot run a job."""
    what = f"the handler of {job_type}, {getattr(handler, '__qualname__', repr(handler))},"
    if not callable(handler) or isinstance(handler, type):
        raise ConfigurationError(f"{what} is not a function: register a function of the job")
    function: Any = handler
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{what} has a yield, so calling it runs nothing: return a result instead"
        )
    try:
        inspect.signature(handler).bind(None)
    except ValueError:  # of a built-in function, which has none
        pass
    except TypeError as error:
        raise ConfigurationError(f"{what} must take one argument, the job: {error}") from None
    return inspect.iscoroutinefunction(function)
