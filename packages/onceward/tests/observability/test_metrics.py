"""Prometheus metrics: counts, durations, labels, several processes."""

import os
import subprocess
import sys
import timeit
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from onceward.errors import ConfigurationError
from onceward.observability.metrics import PrometheusMetrics
from onceward.ports import JobOutcome, Metrics, Outcome


def samples(metrics: PrometheusMetrics) -> dict[tuple[str, ...], float]:
    body, content_type = metrics.exposition()
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_outcomes_are_counted_by_endpoint():
    metrics: Metrics = PrometheusMetrics()
    for times, outcome in enumerate(get_args(Outcome), start=1):
        for _ in range(times):
            metrics.outcome("tree.allocate", outcome)
    metrics.outcome("POST /v1/projects/{project_id}/missions", "fresh")
    assert isinstance(metrics, PrometheusMetrics)
    seen = samples(metrics)
    for times, outcome in enumerate(get_args(Outcome), start=1):
        name = ("onceward_requests_total", "endpoint=tree.allocate", f"outcome={outcome}")
        assert seen[name] == times
    other = "endpoint=POST /v1/projects/{project_id}/missions"
    assert seen["onceward_requests_total", other, "outcome=fresh"] == 1


def test_durations_and_sweeps_are_recorded():
    metrics = PrometheusMetrics()
    metrics.waited("e", 0.2)
    metrics.waited("e", 7.0)
    metrics.store_time("claim", 0.0003)
    metrics.store_time("commit", 0.02)
    metrics.expired("e")
    metrics.swept(500, 0.05)
    metrics.swept(0, 0.001)
    seen = samples(metrics)
    assert seen["onceward_wait_seconds_count", "endpoint=e"] == 2
    assert seen["onceward_wait_seconds_sum", "endpoint=e"] == 7.2
    assert seen["onceward_wait_seconds_bucket", "endpoint=e", "le=0.25"] == 1
    assert seen["onceward_store_seconds_bucket", "le=0.0005", "operation=claim"] == 1
    assert seen["onceward_store_seconds_bucket", "le=0.0005", "operation=commit"] == 0
    assert seen["onceward_expired_total", "endpoint=e"] == 1
    assert seen["onceward_sweep_records_total",] == 500
    assert seen["onceward_sweep_seconds_count",] == 2


def test_labels_do_not_include_keys_or_tenants():
    metrics = PrometheusMetrics()
    metrics.outcome("e", "fresh")
    metrics.waited("e", 1)
    metrics.expired("e")
    metrics.store_time("claim", 1)
    metrics.swept(1, 1)
    labels = {label.partition("=")[0] for name in samples(metrics) for label in name[1:]}
    assert labels == {"endpoint", "outcome", "operation", "le", "of", "failure"}


def test_two_instances_do_not_share_counts():
    one, two = PrometheusMetrics(), PrometheusMetrics()
    one.expired("e")
    assert ("onceward_expired_total", "endpoint=e") in samples(one)
    assert ("onceward_expired_total", "endpoint=e") not in samples(two)


def test_registry_of_the_application_can_be_used():
    registry = CollectorRegistry()
    PrometheusMetrics(registry).swept(3, 0.1)
    assert registry.get_sample_value("onceward_sweep_records_total") == 3


def test_counting_takes_less_than_ten_microseconds():
    metrics = PrometheusMetrics()
    for call in (
        lambda: metrics.outcome("e", "fresh"),
        lambda: metrics.store_time("claim", 0.0003),
    ):
        # About 1 µs measured; the bound is for busy machines.
        assert min(timeit.repeat(call, number=2000, repeat=5)) / 2000 < 10e-6


def test_counts_of_several_processes_are_added_up(tmp_path):
    count = """
from onceward.observability.metrics import PrometheusMetrics
metrics = PrometheusMetrics()
metrics.outcome("e", "fresh")
metrics.store_time("claim", 0.001)
"""
    print_all = "import sys; sys.stdout.buffer.write(metrics.exposition()[0])"
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    for _ in range(2):
        subprocess.run([sys.executable, "-c", count], env=environment, check=True)
    text = subprocess.run(
        [sys.executable, "-c", count + print_all], env=environment, check=True, capture_output=True
    ).stdout.decode()
    assert 'onceward_requests_total{endpoint="e",outcome="fresh"} 3.0' in text
    assert 'onceward_store_seconds_count{operation="claim"} 3.0' in text


def test_missing_multiprocess_directory_is_rejected(monkeypatch, tmp_path):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="is not a directory"):
        PrometheusMetrics()


def test_attempts_at_jobs_are_counted_by_outcome():
    metrics = PrometheusMetrics()
    for times, outcome in enumerate(get_args(JobOutcome), start=1):
        for _ in range(times):
            metrics.job_ended("mail", "mail.send", outcome, 0.02)
    seen = samples(metrics)
    for times, outcome in enumerate(get_args(JobOutcome), start=1):
        labels = (f"outcome={outcome}", "queue=mail", "type=mail.send")
        assert seen["onceward_job_seconds_count", *labels] == times


def test_counters_of_failures_exist_before_the_first_failure():
    """A series that begins with 1 has no increase, so an alert would miss the first failure."""
    metrics = PrometheusMetrics()
    metrics.outcome("e", "fresh")
    metrics.job_ended("mail", "mail.send", "done", 0.02)
    seen = samples(metrics)
    for outcome in ("unavailable", "mismatched", "in_progress", "rolled_back"):
        assert seen["onceward_requests_total", "endpoint=e", f"outcome={outcome}"] == 0
    for outcome in ("retried", "dead", "lease_lost"):
        labels = (f"outcome={outcome}", "queue=mail", "type=mail.send")
        assert seen["onceward_job_seconds_count", *labels] == 0
    for of in ("request", "job"):
        for failure in ("rolled_back", "unknown"):
            name = ("onceward_commit_failures_total", f"failure={failure}", f"of={of}")
            assert seen[name] == 0
    metrics.commit_failed("job", "unknown")
    metrics.pool_waited(0.3)
    seen = samples(metrics)
    assert seen["onceward_commit_failures_total", "failure=unknown", "of=job"] == 1
    assert seen["onceward_pool_wait_seconds_count",] == 1


def test_gauges_of_an_empty_queue_are_set_to_zero():
    metrics = PrometheusMetrics()
    metrics.job_depths({"mail": (3, 2, 1, 7.5)})
    seen = samples(metrics)
    assert seen["onceward_jobs", "queue=mail", "state=waiting"] == 3
    assert seen["onceward_jobs", "queue=mail", "state=running"] == 2
    assert seen["onceward_jobs", "queue=mail", "state=dead"] == 1
    assert seen["onceward_job_oldest_seconds", "queue=mail"] == 7.5
    metrics.job_depths({})
    seen = samples(metrics)
    assert seen["onceward_jobs", "queue=mail", "state=waiting"] == 0
    assert seen["onceward_job_oldest_seconds", "queue=mail"] == 0
