"""The first sentences about a record are true in every state of its key."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onceward.ports import Row
from onceward.records import Record, RecordId, RequestFingerprint
from onceward_operator.console.verdict import Verdict, verdict_of

NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)


def record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "id": RecordId("bob", "POST /charges", "key-1"),
        "fingerprint": RequestFingerprint("a", "b"),
        "status": 201,
        "headers": {},
        "body": b"",
        "created_at": NOW - timedelta(hours=1),
        "expires_at": NOW + timedelta(hours=23),
        "request_id": "first",
        "correlation_id": "tap",
    }
    return Record(**(values | changes))


def logged(outcome: str, *, request_id: str = "later", original: str | None = None) -> Row:
    return {"outcome": outcome, "request_id": request_id, "original_request_id": original}


def about(
    found: Record, *repeats: Row, jobs: tuple[str, ...] = (), is_logged: bool = True
) -> Verdict:
    return verdict_of(
        found,
        repeats=repeats,
        most_repeats=200,
        jobs=[{"state": state} for state in jobs],
        most_jobs=100,
        code="order.closed" if found.status >= 400 else None,
        is_logged=is_logged,
        now=NOW,
    )


def text_of(verdict: Verdict) -> str:
    return " ".join((verdict.headline, *(point.text for point in verdict.points)))


def test_executed_request_is_said_to_have_run_once() -> None:
    verdict = about(record())
    assert verdict.headline == (
        "This request was executed once, at 2026-11-18 11:00:00 UTC, and responded with 201."
    )
    assert verdict.tone == "good"
    assert "No replay is in the log." in text_of(verdict)
    assert "requests with its key get the same response" in text_of(verdict)


def test_replays_and_mismatches_are_counted_apart() -> None:
    replay = logged("replayed", original="first")
    verdict = about(record(), replay, replay, replay, logged("mismatched", original="first"))
    assert "3 replays got the same response; nothing ran again." in text_of(verdict)
    assert "1 other request with this key differed" in text_of(verdict)
    assert verdict.tone == "warn"


def test_number_of_a_cut_list_has_a_plus_sign() -> None:
    verdict = about(record(), *[logged("replayed", original="first")] * 200)
    assert "200+ replays got the same response" in text_of(verdict)


def test_refused_request_is_not_called_executed() -> None:
    verdict = about(record(status=422))
    assert verdict.headline.startswith("This request was refused with 422 (order.closed), at ")
    assert "executed" not in verdict.headline
    assert verdict.tone == "warn"


def test_stored_refusal_of_a_stale_action_is_not_a_failed_attempt() -> None:
    verdict = about(record(status=422), logged("stale", request_id="first"))
    assert "attempt" not in text_of(verdict)


def test_expired_record_says_that_the_next_request_runs() -> None:
    verdict = about(record(expires_at=NOW))
    assert "This record has expired" in text_of(verdict)
    assert "the next request with its key runs." in text_of(verdict)
    assert "get the same response" not in text_of(verdict)
    assert verdict.tone == "warn"


def test_earlier_execution_of_the_key_is_named() -> None:
    verdict = about(record(), logged("replayed", original="earlier"))
    assert "The key was executed before, by the request earlier" in text_of(verdict)
    # Not a replay of this record.
    assert "No replay is in the log." in text_of(verdict)
    assert verdict.tone == "bad"


def test_unreadable_record_has_no_outcome() -> None:
    verdict = about(record(status=0))
    assert "cannot be read" in verdict.headline
    assert "executed" not in verdict.headline
    assert verdict.tone == "bad"


def test_requests_that_came_while_it_ran_and_failed_attempts_are_counted() -> None:
    verdict = about(
        record(), logged("in_progress"), logged("rolled_back"), logged("refused"), logged("limited")
    )
    assert "1 request arrived while another one ran, and did not run." in text_of(verdict)
    assert "3 attempts with this key failed or got an error that is not stored." in text_of(verdict)
    assert verdict.tone == "good"


def test_executed_request_whose_client_got_503_is_distinguished_from_other_outages() -> None:
    verdict = about(record(), logged("unavailable", request_id="first"), logged("unavailable"))
    assert "Its client got 503, although the request was executed" in text_of(verdict)
    assert "1 attempt with this key failed" in text_of(verdict)


@pytest.mark.parametrize(
    ("jobs", "expected", "tone"),
    [
        ((), "No job of it is stored", "good"),
        (("done", "waiting", "done"), "It enqueued 3 jobs: 2 done, 1 waiting; no job", "good"),
        (("done", "dead"), "2 jobs: 1 dead, 1 done. 1 is a dead letter: not done.", "bad"),
        (("dead", "dead"), "2 are dead letters: not done.", "bad"),
    ],
)
def test_jobs_are_counted_by_state(jobs: tuple[str, ...], expected: str, tone: str) -> None:
    verdict = about(record(), jobs=jobs)
    assert expected in text_of(verdict)
    assert verdict.tone == tone


def test_app_without_a_log_does_not_claim_that_there_were_no_replays() -> None:
    verdict = about(record(), is_logged=False)
    assert "Replays and refusals are not logged by this app." in text_of(verdict)
    assert "No replay" not in text_of(verdict)
