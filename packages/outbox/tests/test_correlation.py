"""Correlation id and trace context of an entry, on every request about it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from onceward_outbox import NoResponse, OutboxQueue
from onceward_outbox.errors import EntryInvalidError
from packages.onceward.tests.support.outbox_harness import SOON, Scripted, activity, drain, response
from packages.outbox.tests.queue_harness import new

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(tmp_path / "outbox.db") as queue:
        queue.add_user("ada")
        yield queue


def test_every_attempt_has_the_id_of_the_entry_and_its_trace_context(queue: OutboxQueue) -> None:
    entry = queue.enqueue(activity("ada", "visit", traceparent=TRACE))
    server = Scripted([NoResponse("no response"), response(503), response(201, {"id": 1})])
    drain(queue, "ada", server, max_seconds=5, retry=SOON)
    sent = [
        (one.headers["X-Correlation-ID"], one.headers["traceparent"]) for one in server.requests
    ]
    assert sent == [(entry.id, TRACE)] * 3
    other = queue.enqueue(activity("ada", "lunch"))
    server = Scripted([response(201, {"id": 2})])
    drain(queue, "ada", server)
    assert server.requests[0].headers["X-Correlation-ID"] == other.id
    assert "traceparent" not in server.requests[0].headers


def test_reads_about_an_entry_have_its_correlation_id(queue: OutboxQueue) -> None:
    change = new(operation="update", endpoint="/api/v1/activities/7", conflict_resolution="merge")
    entry = queue.enqueue(change)
    server = Scripted([response(409, {"code": "concurrency.version_mismatch"}), response(200, {})])
    drain(queue, "ada", server)
    assert [one.method for one in server.requests] == ["PUT", "GET"]
    assert {one.headers["X-Correlation-ID"] for one in server.requests} == {entry.id}


def test_the_current_span_is_the_trace_context_of_an_entry(queue: OutboxQueue) -> None:
    tracer = TracerProvider().get_tracer("app")
    with tracer.start_as_current_span("user action") as span:
        entry = queue.enqueue(activity("ada", "visit"))
        given = queue.enqueue(activity("ada", "lunch", traceparent=TRACE))
    context = span.get_span_context()
    assert (
        entry.traceparent
        == f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    )
    assert queue.get(entry.id) == entry
    assert given.traceparent == TRACE


@pytest.mark.parametrize(
    "bad", ["", "00-1-2-01", TRACE.upper(), TRACE + "-x", f"00-{'0' * 32}-{'1' * 16}-01"]
)
def test_an_invalid_trace_context_is_refused(queue: OutboxQueue, bad: str) -> None:
    with pytest.raises(EntryInvalidError, match="traceparent must look like") as refused:
        queue.enqueue(activity("ada", "visit", traceparent=bad))
    assert refused.value.rule == "traceparent_must_be_w3c"
    assert queue.entries() == []


@pytest.mark.parametrize("name", ["X-Correlation-Id", "Traceparent"])
def test_headers_that_the_outbox_sets_are_refused(queue: OutboxQueue, name: str) -> None:
    with pytest.raises(EntryInvalidError):
        queue.enqueue(activity("ada", "visit", headers={name: TRACE}))
