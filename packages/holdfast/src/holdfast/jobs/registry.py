"""Which handler does which type of job, and what is to be done again and again."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import time
from typing import Any, Final

from holdfast.core.job import check_name
from holdfast.core.schedule import Daily, Every, Schedule
from holdfast.errors import ConfigurationError
from holdfast.jobs.context import JobContext
from holdfast.jobs.enqueue import MOST_ATTEMPTS

__all__ = ["Handler", "JobRegistry", "Periodic", "Registration"]

Handler = Callable[[JobContext], Awaitable[Any]]

_TIME_LIMIT_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class Registration:
    """A handler and how it wants to be run."""

    job_type: str
    handler: Handler
    queue: str
    time_limit_seconds: float
    max_attempts: int
    never_retry: tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True)
class Periodic:
    """A job that is enqueued by the clock, once per slot, whoever sees the slot first."""

    type: str
    queue: str
    schedule: Schedule
    payload: Any = None


class JobRegistry:
    """The handlers of one app.

    ::

        @jobs.handler("receipt.send", queue="mail")
        async def send_receipt(job: JobContext) -> None:
            await job.transaction.execute(…)
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._registrations: dict[str, Registration] = {}
        self._queues: set[str] = set()
        self.periodic: list[Periodic] = []

    def handler(
        self,
        job_type: str,
        *,
        queue: str = "default",
        time_limit_seconds: float = _TIME_LIMIT_SECONDS,
        max_attempts: int = 5,
        never_retry: tuple[type[Exception], ...] = (),
    ) -> Callable[[Handler], Handler]:
        """Register a handler for a type of job.

        Errors of ``never_retry`` make a dead letter at once, as ``NonRetryableError`` does.
        """
        check_name(job_type, "type")
        check_name(queue, "queue")
        if not time_limit_seconds > 0:
            raise ConfigurationError(f"{job_type}: time_limit_seconds should be above 0")
        if not 1 <= max_attempts <= MOST_ATTEMPTS:
            raise ConfigurationError(
                f"{job_type}: max_attempts should be a number from 1 to {MOST_ATTEMPTS}"
            )

        def register(handler: Handler) -> Handler:
            if job_type in self._registrations:
                raise ConfigurationError(f"there are two handlers for jobs of type {job_type}")
            self._registrations[job_type] = Registration(
                job_type, handler, queue, time_limit_seconds, max_attempts, never_retry
            )
            self._queues.add(queue)
            return handler

        return register

    def every(self, seconds: float, job_type: str, *, queue: str = "default") -> None:
        """Enqueue a job of this type in every span of so many seconds, once in all processes."""
        self._add_periodic(Periodic(job_type, queue, Every(seconds)))

    def daily(self, at: time, job_type: str, *, queue: str = "default") -> None:
        """Enqueue a job of this type every day at this time (UTC), once in all processes."""
        self._add_periodic(Periodic(job_type, queue, Daily(at)))

    def _add_periodic(self, work: Periodic) -> None:
        check_name(work.type, "type")
        self._queues.add(check_name(work.queue, "queue"))
        self.periodic.append(work)

    def find(self, job_type: str) -> Registration | None:
        """Return who does jobs of this type."""
        return self._registrations.get(job_type)

    def queue_of(self, job_type: str) -> str:
        """Return the queue this type's handler reads."""
        found = self._registrations.get(job_type)
        return "default" if found is None else found.queue

    def wishes_of(self, job_type: str) -> dict[str, Any]:
        """Return what jobs of this type are enqueued with, unless told otherwise."""
        found = self._registrations.get(job_type)
        if found is None:
            return {}
        return {"queue": found.queue, "max_attempts": found.max_attempts}

    @property
    def queues(self) -> tuple[str, ...]:
        """All queues that have a handler."""
        return tuple(sorted(self._queues))

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._registrations.values())

    def __len__(self) -> int:
        return len(self._registrations)
