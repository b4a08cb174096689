"""A guarded request is one span with its outcome and without its key."""

from pathlib import Path

import httpx
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from onceward.observability.traces import Spans
from packages.onceward.tests.support.shop import CREATE, make_app


async def test_first_response_replay_and_error_each_leave_a_span(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app, onceward = make_app(f"sqlite:///{tmp_path}/shop.db", spans=Spans(provider))
    await onceward.open()
    try:
        unit = await onceward.store.begin()
        await unit.transaction.execute(CREATE)
        await unit.commit(None, None)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://shop"
        ) as client:
            key = {"Idempotency-Key": "a-secret-key", "X-Tenant": "ann"}
            await client.post("/orders", json={"item": "boots"}, headers=key)
            await client.post("/orders", json={"item": "boots"}, headers=key)
            await client.post("/orders", json={"item": "socks"})
            await client.get("/orders")
    finally:
        await onceward.close()
    spans = exporter.get_finished_spans()
    seen = [
        (
            s.name,
            (s.attributes or {})["http.response.status_code"],
            (s.attributes or {})["onceward.replayed"],
        )
        for s in spans
    ]
    name = "onceward orders.create"
    assert seen == [(name, 201, False), (name, 201, True), (name, 400, False)]
    assert (spans[0].attributes or {})["onceward.tenant"] == "ann"
    assert "a-secret-key" not in str([dict(s.attributes or {}) for s in spans])
    assert (spans[0].attributes or {})["onceward.key_hash"]
