"""What caused a job: all requests whose jobs were merged, and the trace they belong to."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from onceward import SINGLE_TENANT, GuardConfig, Onceward
from onceward.jobs.cleaner import clean_up
from onceward.jobs.context import JobContext
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job import AlreadyDone, EnqueueOutcome, Merged
from onceward.observability.traces import Spans
from packages.onceward.tests.support.jobs_harness import JobsLab, eventually

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def enqueue(lab: JobsLab, number: int, **options: Any) -> EnqueueOutcome:
    """Enqueue a job as the request with this number does."""
    cause = Cause("ada", "ada's phone", f"request-{number}", f"entry-{number}", TRACE)
    job = new_job("reconcile", number, cause=cause, **options)
    async with lab.transaction() as tx:
        return await lab.job_store.enqueue(tx, job)


async def causes(lab: JobsLab, job_id: str) -> list[tuple[str, str]]:
    return [(one.request_id, one.correlation_id) for one in (await lab.job(job_id)).causes]


@pytest.mark.parametrize("options", [{"coalesce": "today"}, {"resource_id": "today"}])
async def test_a_merged_job_keeps_all_causes_until_it_is_forgotten(
    lab: JobsLab, options: dict[str, str]
) -> None:
    @lab.jobs.handler("reconcile")
    async def handler(job: JobContext) -> str:
        return f"{job.correlation_id} {job.traceparent}"

    first = await enqueue(lab, 1, **options)
    for number in (2, 3, 2, 1):  # a request may enqueue it again
        assert await enqueue(lab, number, **options) == Merged(first.job_id)
    expected = [(f"request-{number}", f"entry-{number}") for number in (1, 2, 3)]
    assert await causes(lab, first.job_id) == expected
    await lab.start_worker()
    await lab.until(first.job_id, "done")
    assert await causes(lab, first.job_id) == expected
    assert (await lab.job(first.job_id)).result == f"entry-1 {TRACE}"
    if "resource_id" in options:
        assert await enqueue(lab, 4, **options) == AlreadyDone(first.job_id)
        assert await causes(lab, first.job_id) == expected
    await clean_up(lab.job_store, keep_done_days=1, keep_dead_days=1)
    assert await lab.count("onceward_job_causes") == 3
    deleted = await clean_up(lab.job_store, keep_done_days=-1, keep_dead_days=-1)
    assert deleted["causes"] == 3
    assert await lab.count("onceward_job_causes") == 0


async def test_a_rolled_back_request_is_no_cause(lab: JobsLab) -> None:
    first = await enqueue(lab, 1, coalesce="today")
    cause = Cause("ada", "ada's phone", "request-2", "entry-2")
    merged = new_job("reconcile", 2, cause=cause, coalesce="today")
    unit = await lab.store.begin()
    assert await lab.job_store.enqueue(unit.statements, merged) == Merged(first.job_id)
    await unit.rollback()
    assert await causes(lab, first.job_id) == [("request-1", "entry-1")]


async def test_a_dead_letter_keeps_all_causes(lab: JobsLab) -> None:
    @lab.jobs.handler("reconcile", max_attempts=1)
    async def handler(_job: JobContext) -> None:
        raise RuntimeError("broken")

    first = await enqueue(lab, 1, coalesce="today", max_attempts=1)
    await enqueue(lab, 2, coalesce="today")
    await lab.start_worker()
    await lab.until(first.job_id, "dead")
    await clean_up(lab.job_store, keep_done_days=-1, keep_dead_days=-1)
    assert await causes(lab, first.job_id) == [("request-1", "entry-1"), ("request-2", "entry-2")]


# -- one trace ------------------------------------------------------------------------------------


class Traced:
    """An app with spans: an order enqueues a receipt, and the receipt enqueues a report."""

    def __init__(self, path: Path) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.onceward = Onceward(
            f"sqlite:///{path}/traced.db",
            tenants=SINGLE_TENANT,
            config=GuardConfig(spans=Spans(self.provider)),
        )
        app = FastAPI()
        self.onceward.install(app)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://shop"
        )

        @self.onceward.jobs.handler("receipt")
        async def receipt(job: JobContext) -> None:
            await job.enqueue("report", {}, resource_id="1")

        @self.onceward.jobs.handler("report")
        async def report(_job: JobContext) -> None:
            return

        @app.post("/orders", status_code=201)
        @self.onceward.guard("orders.create")
        async def create() -> dict[str, str]:
            await self.onceward.enqueue("receipt", {}, resource_id="1")
            return {"id": "1"}

    async def order(self, **headers: str) -> dict[str, ReadableSpan]:
        """Order, wait for both jobs, and return all spans by name."""
        key = {"Idempotency-Key": str(uuid4())}
        response = await self.client.post("/orders", json={}, headers=key | headers)
        assert response.status_code == 201
        worker = self.onceward.worker()
        await worker.start()

        async def all_done() -> bool:
            return len(self.exporter.get_finished_spans()) == 3

        await eventually(all_done)
        await worker.stop()
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
async def traced(tmp_path: Path) -> AsyncIterator[Traced]:
    made = Traced(tmp_path)
    await made.onceward.open()
    yield made
    await made.client.aclose()
    await made.onceward.close()


async def test_one_trace_spans_the_action_the_request_and_its_jobs(traced: Traced) -> None:
    spans = await traced.order(traceparent=TRACE, **{"X-Correlation-ID": "entry-7"})
    order, receipt, report = (
        spans[name]
        for name in ("onceward orders.create", "onceward job receipt", "onceward job report")
    )
    assert f"{order.context.trace_id:032x}" == TRACE[3:35]
    assert {span.context.trace_id for span in spans.values()} == {order.context.trace_id}
    parents = [span.parent.span_id for span in (order, receipt, report) if span.parent is not None]
    assert parents == [int(TRACE[36:52], 16), order.context.span_id, receipt.context.span_id]
    for span in (receipt, report):
        facts = dict(span.attributes or {})
        assert (facts["onceward.correlation_id"], facts["onceward.outcome"]) == ("entry-7", "done")


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-not-a-trace-01"}])
async def test_without_a_valid_trace_context_the_request_begins_the_trace(
    traced: Traced, headers: dict[str, str]
) -> None:
    spans = await traced.order(**headers)
    assert spans["onceward orders.create"].parent is None
    assert len({span.context.trace_id for span in spans.values()}) == 1


async def test_the_span_of_an_instrumented_framework_is_the_parent(traced: Traced) -> None:
    with traced.provider.get_tracer("asgi").start_as_current_span("POST /orders") as outer:
        await traced.client.post(
            "/orders", json={}, headers={"Idempotency-Key": str(uuid4()), "traceparent": TRACE}
        )
    (inner,) = (one for one in traced.exporter.get_finished_spans() if one.name != "POST /orders")
    assert inner.parent is not None
    assert inner.parent.span_id == outer.get_span_context().span_id
