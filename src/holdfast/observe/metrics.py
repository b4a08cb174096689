"""Metrics for Prometheus. No raw key and no tenant can be in there: no label takes one.

Labels are the endpoint (a name or a path template), the outcome and the store's operation: closed
sets, all written by developers. A label per tenant would grow without bound, and would show every
reader of ``/metrics`` who the tenants are.
"""

import os
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.multiprocess import MultiProcessCollector

from holdfast.errors import ConfigurationError
from holdfast.ports import Outcome

__all__ = ["PrometheusWatcher"]

# From a look-up in memory to the end of a patient wait (10 s by default).
_WAIT_BUCKETS: Final = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# From SQLite without a disk flush (50 µs) to a database in trouble.
_STORE_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0)
_SWEEP_BUCKETS: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 30.0)

_DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"


class PrometheusWatcher:
    """A ``Watcher`` that counts.

    Runs on the path of every request, so the children of each metric are looked up once and kept:
    ``labels()`` takes a lock and builds a tuple each time.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Count in a registry of one's own, unless one is given.

        With ``PROMETHEUS_MULTIPROC_DIR`` set (before prometheus_client is first imported) counts
        go to files there and ``exposition`` adds up all processes.
        """
        directory = os.environ.get(_DIRECTORY)
        if directory and not Path(directory).is_dir():
            raise ConfigurationError(f"{_DIRECTORY}={directory} is not a directory: make it first")
        self.registry = registry if registry is not None else CollectorRegistry()
        self._requests = Counter(
            "holdfast_requests_total",
            "Guarded requests by how they ended.",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self._expired = Counter(
            "holdfast_expired_total",
            "Records found past their time and treated as absent.",
            ("endpoint",),
            registry=self.registry,
        )
        self._wait = Histogram(
            "holdfast_wait_seconds",
            "How long duplicates waited for the first request.",
            ("endpoint",),
            registry=self.registry,
            buckets=_WAIT_BUCKETS,
        )
        self._store = Histogram(
            "holdfast_store_seconds",
            "How long calls to the store took.",
            ("operation",),
            registry=self.registry,
            buckets=_STORE_BUCKETS,
        )
        self._swept_records = Counter(
            "holdfast_sweep_records_total",
            "Expired records removed by the sweep.",
            registry=self.registry,
        )
        self._sweep = Histogram(
            "holdfast_sweep_seconds",
            "How long a sweep took.",
            registry=self.registry,
            buckets=_SWEEP_BUCKETS,
        )
        self._request_children: dict[tuple[str, Outcome], Counter] = {}
        self._expired_children: dict[str, Counter] = {}
        self._wait_children: dict[str, Histogram] = {}
        self._store_children: dict[str, Histogram] = {}

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        """Count how a guarded request ended."""
        child = self._request_children.get((endpoint, outcome))
        if child is None:
            child = self._requests.labels(endpoint, outcome)
            self._request_children[endpoint, outcome] = child
        child.inc()

    def waited(self, endpoint: str, seconds: float) -> None:
        """Observe how long a duplicate waited."""
        child = self._wait_children.get(endpoint)
        if child is None:
            child = self._wait_children[endpoint] = self._wait.labels(endpoint)
        child.observe(seconds)

    def expired(self, endpoint: str) -> None:
        """Count a record that was found past its time."""
        child = self._expired_children.get(endpoint)
        if child is None:
            child = self._expired_children[endpoint] = self._expired.labels(endpoint)
        child.inc()

    def store_time(self, operation: str, seconds: float) -> None:
        """Observe how long a call to the store took."""
        child = self._store_children.get(operation)
        if child is None:
            child = self._store_children[operation] = self._store.labels(operation)
        child.observe(seconds)

    def swept(self, records: int, seconds: float) -> None:
        """Count what a sweep removed, and observe how long it took."""
        self._swept_records.inc(records)
        self._sweep.observe(seconds)

    def exposition(self) -> tuple[bytes, str]:
        """Return the body and the content type of ``/metrics``."""
        registry = self.registry
        if os.environ.get(_DIRECTORY):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
