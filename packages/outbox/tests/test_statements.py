"""SQL statements and commits of the path that almost every entry takes: queued, sent, succeeded.

The numbers are exact, so that one more is noticed. If one becomes smaller, change it here.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from packages.onceward.tests.support.outbox_harness import Scripted, drain, response
from packages.outbox.tests.queue_harness import Lab, new


class Count(NamedTuple):
    reads: int
    writes: int
    commits: int


KINDS = {
    "SELECT": "reads",
    "WITH": "reads",
    "INSERT": "writes",
    "UPDATE": "writes",
    "DELETE": "writes",
    "COMMIT": "commits",
}


class Trace:
    """The statements of a queue's connection since the last count."""

    def __init__(self, lab: Lab) -> None:
        self.statements: list[str] = []
        with lab.queue.transaction() as connection:
            connection.set_trace_callback(self.statements.append)  # type: ignore[attr-defined]
        self.statements.clear()

    def count(self) -> Count:
        words = [text.split(None, 1)[0].rstrip(";") for text in self.statements]
        self.statements.clear()
        found = Counter(KINDS[word] for word in words if word != "BEGIN")
        return Count(found["reads"], found["writes"], found["commits"])


@pytest.fixture
def lab(quick_path: Path) -> Iterator[Lab]:
    """Without listeners, and with a clock that does not move, so it is not saved in between."""
    made = Lab(quick_path / "outbox.db", listeners=[])
    yield made
    made.queue.close()


def send(lab: Lab, version: str | None) -> int:
    headers = {} if version is None else {"etag": version}
    server = Scripted(lambda _: response(200, {"id": 7}, headers))
    return drain(lab.queue, "ada", server, clock=lab.clock).succeeded


EDIT = {"operation": "patch", "endpoint": "/api/v1/activities/7"}


@pytest.mark.parametrize(
    ("fields", "version", "enqueued", "sent"),
    [
        ({}, None, Count(2, 1, 1), Count(13, 7, 4)),
        # With a version there is one more write, and not one more read.
        ({}, '"1"', Count(2, 1, 1), Count(13, 8, 4)),
        (EDIT, None, Count(3, 1, 1), Count(13, 8, 4)),
        ({**EDIT, "base_version": '"1"'}, '"2"', Count(3, 1, 1), Count(13, 9, 4)),
    ],
    ids=["create", "create with version", "edit", "edit with version"],
)
def test_statements_of_one_entry(
    lab: Lab, fields: dict[str, Any], version: str | None, enqueued: Count, sent: Count
) -> None:
    trace = Trace(lab)
    lab.add(**fields)
    assert trace.count() == enqueued
    assert send(lab, version) == 1
    assert trace.count() == sent


def test_statements_of_many_entries_in_one_drain(lab: Lab) -> None:
    """They share their commits; an edit with a version reads as much as one without."""
    counts = []
    for version in (None, '"1"'):
        edits = [
            new(operation="patch", endpoint=f"/api/v1/activities/{n}", base_version=version)
            for n in range(40)
        ]
        lab.queue.enqueue_many(edits)
        trace = Trace(lab)
        assert send(lab, version and '"2"') == 40
        counts.append(trace.count())
    assert counts == [Count(27, 174, 9), Count(27, 174 + 40, 9)]
