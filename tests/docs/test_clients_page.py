"""The page for clients of a guarded API agrees with the tables of the code."""

import httpx
import pytest

from onceward.client import Client
from onceward.errors import InProgressError, RateLimitedError, RequestError, StoreUnavailableError
from onceward.guard.error_formats import render_error
from onceward_protocol.error_codes import CODES, ErrorFormat
from onceward_protocol.response_classification import (
    Conflicting,
    Refused,
    SignInNeeded,
    TooOld,
    TryLater,
    classify,
)
from packages.outbox.tests.samples import entry as an_entry
from tests.docs.pages import REFERENCE
from tests.docs.test_reference import rows

PAGE = REFERENCE / "your-apis-clients.md"
TABLE = [row for row in rows(PAGE) if len(row) == 5 and row[0] != "HTTP" and "---" not in row[0]]
ACTIONS: dict[str, type | tuple[type, ...]] = {
    "retry": TryLater,
    "wait": TryLater,
    "sign in": SignInNeeded,
    "read again": Conflicting,
    "fix": Refused,
    "stop": (Refused, TooOld),
}


def action_of(status: int, problem: str) -> str:
    (found,) = [row[4] for row in TABLE if row[:2] == [str(status), problem]]
    return found


@pytest.mark.parametrize("kind", CODES)
def test_every_error_has_a_row_with_its_status_and_codes(kind: str) -> None:
    code = CODES[kind]
    assert [row[2] for row in TABLE if row[:2] == [str(code.status), code.problem]] == [
        code.envelope
    ]


def test_rows_with_a_code_are_errors_of_the_guard() -> None:
    named = {(row[0], row[1], row[2]) for row in TABLE if row[1]}
    assert named == {(str(c.status), c.problem, c.envelope) for c in CODES.values()}
    defined = {row[0] for row in rows(PAGE) if len(row) == 3}
    assert {row[4] for row in TABLE} <= defined


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("error_format", ErrorFormat)
def test_outbox_and_client_do_what_the_page_says(kind: str, error_format: ErrorFormat) -> None:
    code = CODES[kind]
    action = action_of(code.status, code.problem)
    # A 422 with a code that no table has is tried once more; the page is about the second.
    entry = an_entry(attempt=2, last=code.status)
    assert isinstance(classify(code.status, code.name(error_format), entry), ACTIONS[action])

    rendered = render_error(kind, error_format, "request-1")
    responses = [httpx.Response(code.status, content=rendered.body), httpx.Response(201)]
    for each in responses:
        each.headers["content-type"] = "application/json"
    transport = httpx.MockTransport(lambda _: responses.pop(0))
    with Client("https://api.example", transport=transport, sleep=lambda _: None) as client:
        response = client.post("/orders")
    assert (response.attempts == 2) == (action in {"retry", "wait"})


@pytest.mark.parametrize(
    "error",
    [
        InProgressError("running", retry_after_seconds=1),
        RateLimitedError("slow down", retry_after_seconds=7),
        StoreUnavailableError("away"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_to_wait_for_have_retry_after(error: RequestError | StoreUnavailableError) -> None:
    rendered = render_error(error, ErrorFormat.PROBLEM, "request-1")
    (problem,) = [c.problem for c in CODES.values() if c.problem.encode() in rendered.body]
    assert action_of(rendered.status, problem) == "wait"
    assert int(dict(rendered.headers)[b"retry-after"]) >= 1
