"""Errors as responses: an app's own format, and what happens if it fails."""

import json
import logging
from typing import Any

import pytest

from onceward import ErrorFormat, Policy, ServiceError
from onceward.errors import (
    ConfigurationError,
    NotAuthenticatedError,
    PayloadMismatchError,
    RateLimitedError,
    StoreUnavailableError,
)
from onceward.guard.error_formats import ErrorInfo, render_error
from onceward.guard.request import stored_headers


def test_formatter_gets_all_members_of_the_error_and_returns_the_body() -> None:
    seen: list[ErrorInfo] = []

    def formatter(error: ErrorInfo) -> dict[str, Any]:
        seen.append(error)
        return {"ok": False, "why": error.code}

    mismatch = PayloadMismatchError("used", details={"expectedHash": "a"})
    response = render_error(mismatch, formatter, "id-1", ietf_statuses=True)
    assert (response.status, json.loads(response.body)) == (
        422,
        {"ok": False, "why": "idempotency.payload_mismatch"},
    )
    assert response.headers == (
        (b"content-type", b"application/json"),
        (b"onceward-error", b"idempotency.payload_mismatch"),
    )
    assert "onceward-error" not in stored_headers(response)
    title = "Key was used for another request"
    assert seen == [
        ErrorInfo(
            kind="payload_mismatch",
            code="idempotency.payload_mismatch",
            status=422,
            title=title,
            message="used",
            details={"expectedHash": "a"},
            request_id="id-1",
            retry_after=None,
        )
    ]


def test_formatter_may_return_content_type_and_body() -> None:
    response = render_error(
        ServiceError(409, "order.closed", "clösed"),
        lambda error: ("text/plain; charset=utf-8", f"{error.kind} {error.code}: {error.message}"),
        "id",
    )
    assert response.headers == ((b"content-type", b"text/plain; charset=utf-8"),)
    assert response.body.decode() == "service order.closed: clösed"
    as_bytes = render_error("internal", lambda _: ("application/x", b"\x00"), "id")
    assert (as_bytes.status, as_bytes.body) == (500, b"\x00")


def test_formatter_does_not_remove_the_headers_of_the_error() -> None:
    limited = render_error(
        RateLimitedError("slow down", retry_after_seconds=1.2),
        lambda error: {"wait": error.retry_after},
        "id",
    )
    assert (b"retry-after", b"2") in limited.headers
    assert json.loads(limited.body) == {"wait": 2}
    refused = render_error(NotAuthenticatedError("sign in"), lambda _: {}, "id")
    assert (b"www-authenticate", b"Bearer") in refused.headers


def test_formatter_never_sees_the_internal_message_of_an_outage() -> None:
    response = render_error(
        StoreUnavailableError("host db-7 is down"), lambda error: {"m": error.message}, "id"
    )
    assert b"db-7" not in response.body


@pytest.mark.parametrize(
    "formatter",
    [
        lambda _error: 1 / 0,
        lambda _error: None,
        lambda _error: {"a": object()},
        lambda _error: ("text/plain", 7),
    ],
)
def test_failing_formatter_is_logged_and_replaced_by_the_problem_format(
    formatter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    response = render_error(ServiceError(409, "order.closed", "closed"), formatter, "id")
    assert response.status == 409
    assert response.headers == ((b"content-type", b"application/problem+json"),)
    assert json.loads(response.body)["code"] == "order.closed"
    (line,) = caplog.records
    assert (line.name, line.levelno) == ("onceward.request", logging.ERROR)
    assert line.exc_info is not None


async def _coroutine(_error: ErrorInfo) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("wrong", ["envelope", None, {"a": 1}, _coroutine])
def test_policy_refuses_what_is_not_an_error_format(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="error_format must be"):
        Policy(error_format=wrong)


def test_built_in_formats_are_accepted() -> None:
    assert Policy(error_format=ErrorFormat.ENVELOPE).error_format is ErrorFormat.ENVELOPE
