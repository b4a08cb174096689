"""Prometheus metrics of requests, stores, sweeps and jobs.

Labels are the endpoint (a name or a path template), a job's queue and type, the outcome and the
store's operation: closed sets, all written by developers. There is no label for keys or tenants: it
would grow without bound, and show every reader of ``/metrics`` who the tenants are.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal, get_args

from onceward_protocol.extras import needs_extra

with needs_extra("metrics"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
    from prometheus_client.multiprocess import MultiProcessCollector

from onceward.errors import ConfigurationError
from onceward.ports import CommitFailure, JobOutcome, Outcome

__all__ = ["PrometheusMetrics"]

# From a look-up in memory to the end of the wait for a running duplicate (10 s by default).
_WAIT_BUCKETS: Final = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# From SQLite without a disk flush (50 µs) to an overloaded database.
_STORE_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0)
# From a job that only writes a row to one that calls a slow service.
_JOB_BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 300.0)
# From a connection that was just released to the longest wait (10 s by default).
_POOL_BUCKETS: Final = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0)
_SWEEP_BUCKETS: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 30.0)

_FAILED_OUTCOMES: Final[tuple[JobOutcome, ...]] = ("retried", "dead", "lease_lost", "unknown")

_DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"


class PrometheusMetrics:
    """Implements the metrics protocols of ``onceward.ports`` with prometheus_client.

    These are ``Metrics``, ``JobMetrics``, ``BrokerMetrics``, ``StoreMetrics``, ``BreakerMetrics``,
    ``DurabilityMetrics`` and ``SweepMetrics``. Thread-safe.

    ``registry`` is a new one by default, so that two instances do not share counts. With
    ``PROMETHEUS_MULTIPROC_DIR`` set (before prometheus_client is first imported), counts go to
    files in that directory and ``exposition`` adds up all processes.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        directory = os.environ.get(_DIRECTORY)
        if directory and not Path(directory).is_dir():
            raise ConfigurationError(
                f"{_DIRECTORY}={directory} is not a directory: create it first"
            )
        # The registry that has the series.
        self.registry = registry if registry is not None else CollectorRegistry()
        self._counter = counter = partial(Counter, registry=self.registry)
        self._histogram = histogram = partial(Histogram, registry=self.registry)
        # Of a value that is the same for all processes, the latest of any process is right.
        self._gauge = partial(Gauge, registry=self.registry, multiprocess_mode="mostrecent")
        self._sum = partial(Gauge, registry=self.registry, multiprocess_mode="livesum")
        requests = counter(
            "onceward_requests_total", "Guarded requests by outcome.", ("endpoint", "outcome")
        )
        self._requests = _Children(requests, get_args(Outcome))
        expired = counter(
            "onceward_expired_total",
            "Expired records that were found and treated as absent.",
            ("endpoint",),
        )
        self._expired = _Children(expired)
        wait = histogram(
            "onceward_wait_seconds",
            "Time that duplicates waited for the first request.",
            ("endpoint",),
            buckets=_WAIT_BUCKETS,
        )
        self._wait = _Children(wait)
        store = histogram(
            "onceward_store_seconds",
            "Duration of calls to the store.",
            ("operation",),
            buckets=_STORE_BUCKETS,
        )
        self._store = _Children(store)
        self._pool_wait = histogram(
            "onceward_pool_wait_seconds",
            "Time that callers waited for a connection because none was free.",
            buckets=_POOL_BUCKETS,
        )
        self._commit_failures = counter(
            "onceward_commit_failures_total",
            "Commits that were rolled back by the database, or whose outcome is unknown.",
            ("of", "failure"),
        )
        for failure in get_args(CommitFailure):  # see _Children
            self._commit_failures.labels("request", failure)
            self._commit_failures.labels("job", failure)
        self._breaker_opened = counter(
            "onceward_breaker_opened_total",
            "How often the circuit breaker of the store has opened.",
        )
        self._breaker_open = self._sum(
            "onceward_breaker_open",
            "1 while the circuit breaker of the store is open; the sum of all processes.",
        )
        # Only of stores that know it: an alert on 0 would match SQLite.
        self._durability: tuple[Gauge, Gauge] | None = None
        self._sweeps: tuple[Counter, Histogram] | None = None
        self._lock = Lock()
        jobs = histogram(
            "onceward_job_seconds",
            "Duration of attempts at jobs, by outcome.",
            ("queue", "type", "outcome"),
            buckets=_JOB_BUCKETS,
        )
        self._jobs = _Children(jobs, _FAILED_OUTCOMES)
        self._job_depth = self._gauge(
            "onceward_jobs", "Jobs in the tables: waiting, running or dead.", ("queue", "state")
        )
        self._job_age = self._gauge(
            "onceward_job_oldest_seconds", "Age of the oldest due job.", ("queue",)
        )
        self._broker_silences = counter(
            "onceward_broker_silences_total", "How often the broker of jobs has fallen silent."
        )
        self._broker_silent = self._sum(
            "onceward_broker_silent",
            "1 while the broker of jobs does not respond; the sum of all processes.",
        )
        self._jobs_bypassed = counter(
            "onceward_jobs_bypassed_broker_total",
            "Jobs that were leased from the table although there is a broker.",
        )
        self._queues_seen: set[str] = set()

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        """Count the outcome of a guarded request."""
        self._requests[endpoint, outcome].inc()

    def waited(self, endpoint: str, seconds: float) -> None:
        """Record how long a duplicate waited for the first request."""
        self._wait[endpoint].observe(seconds)

    def expired(self, endpoint: str) -> None:
        """Count an expired record that was found and treated as absent."""
        self._expired[endpoint].inc()

    def store_time(self, operation: str, seconds: float) -> None:
        """Record the duration of a call to the store."""
        self._store[operation].observe(seconds)

    def pool_waited(self, seconds: float) -> None:
        """Record how long a caller waited for a connection, because none was free."""
        self._pool_wait.observe(seconds)

    def commit_failed(self, of: Literal["request", "job"], failure: CommitFailure) -> None:
        """Count a commit that the database refused, or whose outcome is unknown."""
        self._commit_failures.labels(of, failure).inc()

    def breaker_changed(self, *, is_open: bool) -> None:
        """Count that the breaker has opened, or note that it is closed again."""
        if is_open:
            self._breaker_opened.inc()
        self._breaker_open.set(1 if is_open else 0)

    def durability_read(self, *, is_replicated: bool) -> None:
        """Note whether acknowledged commits outlive the loss of the database server."""
        self._durability_series()[0].set(1 if is_replicated else 0)

    def commits_abandoned(self, count: int) -> None:
        """Note how many commits were cut that the server may still work on."""
        self._durability_series()[1].set(count)

    def _durability_series(self) -> tuple[Gauge, Gauge]:
        with self._lock:
            if self._durability is None:
                replicated = self._gauge(
                    "onceward_database_replicated",
                    "1 if acknowledged commits outlive the loss of the database server, else 0.",
                )
                abandoned = self._sum(
                    "onceward_abandoned_commits",
                    "Commits that were cut and may still wait on the server; the sum of all "
                    "processes.",
                )
                self._durability = replicated, abandoned
            return self._durability

    def swept(self, records: int, seconds: float) -> None:
        """Count the records that a sweep deleted and record its duration."""
        deleted, duration = self._sweep_series()
        deleted.inc(records)
        duration.observe(seconds)

    def sweep_started(self) -> None:
        """Export the series of sweeps, at 0: this process sweeps periodically."""
        self._sweep_series()

    def _sweep_series(self) -> tuple[Counter, Histogram]:
        """Return the series of sweeps.

        A process that does not sweep, such as a worker, has none: an alert on sweeps that do not
        run would match it.
        """
        with self._lock:
            if self._sweeps is None:
                deleted = self._counter(
                    "onceward_sweep_records_total", "Expired records removed by the sweep."
                )
                duration = self._histogram(
                    "onceward_sweep_seconds", "Duration of sweeps.", buckets=_SWEEP_BUCKETS
                )
                self._sweeps = deleted, duration
            return self._sweeps

    def job_ended(self, queue: str, job_type: str, outcome: JobOutcome, seconds: float) -> None:
        """Record the outcome and the duration of an attempt at a job."""
        self._jobs[queue, job_type, outcome].observe(seconds)

    def broker_changed(self, *, is_silent: bool) -> None:
        """Count that the broker has fallen silent, or note that it responds again."""
        if is_silent:
            self._broker_silences.inc()
        self._broker_silent.set(1 if is_silent else 0)

    def jobs_bypassed_broker(self, jobs: int) -> None:
        """Count jobs that were leased from the table although there is a broker."""
        self._jobs_bypassed.inc(jobs)

    def job_depths(self, depths: Mapping[str, tuple[int, int, int, float]]) -> None:
        """Set the gauges of each queue: waiting, running, dead, age of the oldest in seconds.

        Queues of earlier calls that are not in ``depths`` are set to zero.
        """
        gone = dict.fromkeys(self._queues_seen - set(depths), (0, 0, 0, 0.0))
        self._queues_seen |= set(depths)
        for queue, (*counts, oldest_seconds) in {**gone, **depths}.items():
            for state, count in zip(("waiting", "running", "dead"), counts, strict=True):
                self._job_depth.labels(queue, state).set(count)
            self._job_age.labels(queue).set(oldest_seconds)

    def exposition(self) -> tuple[bytes, str]:
        """Return the body and the content type of ``/metrics``."""
        registry = self.registry
        if os.environ.get(_DIRECTORY):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _Children(dict[str | tuple[str, ...], Any]):
    """The children of a series by label or labels: ``labels()`` takes a lock for each request.

    With the first child, those with ``others`` as last label begin to exist: a counter that appears
    with its first failure has no increase that an alert could see.
    """

    def __init__(self, series: Counter | Histogram, others: Sequence[str] = ()) -> None:
        super().__init__()
        self._series = series
        self._others = others

    def __missing__(self, key: str | tuple[str, ...]) -> Any:
        labels = (key,) if isinstance(key, str) else key
        for other in self._others:
            self[*labels[:-1], other] = self._series.labels(*labels[:-1], other)
        self[key] = self._series.labels(*labels)
        return self[key]
