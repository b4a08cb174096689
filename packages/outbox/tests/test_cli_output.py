"""Errors in the output of ``onceward outbox``: the sentence for a person, not the raw body."""

import json
from typing import Any

import pytest

from onceward_outbox import EventKind
from onceward_outbox.cli.output import print_entries, print_entry, print_report, print_sides
from onceward_outbox.entry import Status
from packages.onceward.tests.support.outbox_harness import Scripted, drain, response
from packages.outbox.tests.outcomes import record_conflict
from packages.outbox.tests.queue_harness import Lab, new

PROBLEM = {
    "type": "urn:onceward:problem:order.closed",
    "title": "Closed",
    "status": 400,
    "detail": "the order is closed",
    "code": "order.closed",
}


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (PROBLEM, "the order is closed"),
        ({"error": "CLOSED", "message": "the order is closed"}, "the order is closed"),
        ({"error": {"code": "closed", "message": "it is closed"}}, "it is closed"),
        ({"detail": [{"loc": ["body", "n"], "msg": "Field required"}]}, "Field required"),
        ({"title": "Closed"}, "Closed"),
        ({"error": "CLOSED"}, "CLOSED"),
        ({"reason": 1}, '{"reason": 1}'),
        ([1], "[1]"),
    ],
)
def test_error_is_shown_by_its_sentence(
    lab: Lab, capsys: pytest.CaptureFixture[str], body: Any, shown: str
) -> None:
    entry = lab.queue.enqueue(new())
    report = drain(lab.queue, entry.user_id, Scripted([response(400, body)]))
    entry = lab.queue.get(entry.id)
    assert entry.status is Status.FAILED
    print_entries([entry], as_json=False)
    assert capsys.readouterr().out.rstrip().endswith(f"\t{shown}")
    print_entry(entry, lab.queue.attempts(entry.id), [], as_json=False)
    assert capsys.readouterr().out.rstrip().endswith(f"\t{shown}")
    print_report(report, [entry], as_json=False)
    assert capsys.readouterr().out.rstrip().endswith(f": {shown}")
    print_entries([entry], as_json=True)  # scripts get the body as it came
    assert json.loads(json.loads(capsys.readouterr().out)[0]["last_error"]) == body


def test_redirect_error_begins_with_the_path_to_use(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = lab.queue.enqueue(new())
    moved = response(307, headers={"location": f"{entry.endpoint}/?a=1"})
    drain(lab.queue, entry.user_id, Scripted([moved]))
    print_entries([lab.queue.get(entry.id)], as_json=False)
    shown = f"\tuse the path {entry.endpoint}/: the server redirects (307) to {entry.endpoint}/?a=1"
    assert capsys.readouterr().out.rstrip().endswith(shown)


def test_response_without_a_body_is_shown_by_its_status(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = lab.queue.enqueue(new())
    drain(lab.queue, entry.user_id, Scripted([response(503, headers={"retry-after": "4"})]))
    print_entries([lab.queue.get(entry.id)], as_json=False)
    names, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    shown = dict(zip(names, row, strict=True))
    # The send does not count for max_attempts, so it is not shown as part of them.
    assert (shown["sends"], shown["error"]) == ("1", "HTTP 503")
    [retrying] = [event for event in lab.events if event.kind is EventKind.RETRYING]
    assert retrying.detail == "HTTP 503, next attempt in 4 s"


def test_sides_of_a_conflict_name_the_fields_that_both_have_changed(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = lab.queue.enqueue(
        new(operation="patch", endpoint="/n/5", base={"n": 1, "m": 1}, payload={"n": 2})
    )
    record_conflict(lab.queue, lab.claim(), theirs={"n": 3, "m": 1}, fields=["/n"])
    entry = lab.queue.get(entry.id)
    print_sides(entry, as_json=False)
    assert "changed on both sides: /n\n" in capsys.readouterr().out
    print_sides(entry, as_json=True)
    assert json.loads(capsys.readouterr().out)["conflict_fields"] == ["/n"]
