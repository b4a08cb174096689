"""Tests of jobs by NATS use the databases and the lab of the tests of jobs."""

from packages.nats.tests.nats_harness import faulty_nats, nats, own_nats
from packages.onceward.tests.jobs.conftest import (
    another_store,
    clean_jobs_url,
    database,
    effect_lab,
    jobs_database,
    lab,
)

__all__ = [
    "another_store",
    "clean_jobs_url",
    "database",
    "effect_lab",
    "faulty_nats",
    "jobs_database",
    "lab",
    "nats",
    "own_nats",
]
