"""OpenTelemetry spans of guarded requests."""

import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span

from onceward.errors import ConfigurationError
from onceward.observability.traces import SpanHandle, Spans


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Spans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(provider)


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_span_has_the_attributes_of_request_and_response(spans, exporter):
    attributes = {"tenant": "acme", "key_hash": "0123456789ab", "request_id": "r1"}
    with spans.request("tree.allocate", attributes) as span:
        span.outcome(200, replayed=True)
    span = only(exporter)
    assert span.name == "onceward tree.allocate"
    assert attributes_of(span) == {
        "onceward.endpoint": "tree.allocate",
        "onceward.tenant": "acme",
        "onceward.key_hash": "0123456789ab",
        "onceward.request_id": "r1",
        "onceward.replayed": True,
        "http.response.status_code": 200,
    }
    assert span.status.status_code is StatusCode.UNSET


def test_hash_is_shortened_and_raw_key_left_out(spans, exporter):
    attributes = {
        "onceward.key_hash": "0123456789ab" * 5,
        "idempotency_key": "raw",
        "onceward.token": "raw",
        "body": "raw",
    }
    with spans.request("e", attributes):
        pass
    assert attributes_of(only(exporter)) == {
        "onceward.endpoint": "e",
        "onceward.key_hash": "0123456789ab",
    }


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (201, StatusCode.UNSET),
        (409, StatusCode.UNSET),
        (500, StatusCode.ERROR),
        (503, StatusCode.ERROR),
    ],
)
def test_only_server_errors_mark_the_span_as_an_error(spans, exporter, status, expected):
    with spans.request("e", {}) as span:
        span.outcome(status, replayed=False)
    assert only(exporter).status.status_code is expected


def test_only_the_type_of_an_exception_is_recorded(spans, exporter):
    with pytest.raises(ValueError), spans.request("e", {}):
        raise ValueError("the body was: hunter2")
    span = only(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert attributes_of(span)["error.type"] == "ValueError"
    assert "hunter2" not in span.to_json()


def test_nested_span_is_a_child_of_the_request(spans, exporter):
    with spans.request("outer", {}), spans.request("inner", {}):
        assert get_current_span().is_recording()
    inner, outer = exporter.get_finished_spans()
    assert inner.parent.span_id == outer.context.span_id


def test_global_tracer_provider_is_the_default():
    with Spans().request("e", {"tenant": "acme"}) as span:
        span.outcome(200, replayed=False)
        assert isinstance(span, SpanHandle)


def test_missing_opentelemetry_is_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r'pip install "onceward\[otel\]"'):
        Spans()
