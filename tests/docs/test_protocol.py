"""The protocol page agrees with the tables in the code."""

import re
from datetime import timedelta
from importlib import import_module

import pytest

from onceward.guard.policy import NEVER_STORED, ErrorsStored, Policy, Staleness
from onceward_lab.conformance.harness import Check
from onceward_outbox.entry import DEFAULT_MAX_ATTEMPTS, ConflictResolution, Status
from onceward_outbox.profile import DEFAULT_PROFILE
from onceward_protocol.error_codes import CODES
from onceward_protocol.operation import METHODS
from onceward_protocol.response_classification import BY_CODE
from onceward_protocol.retry import CLIENT, DEVICE, QUEUE, WORKER, RetryPolicy
from tests.docs.pages import REFERENCE, ROOT

PAGE = REFERENCE / "protocol.md"
TEXT = PAGE.read_text(encoding="utf-8")


def section(heading: str) -> str:
    found = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert found, heading
    return found


def cells(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def test_error_codes_are_those_of_the_code() -> None:
    shown = {(row[1][:3], row[2], row[3]) for row in cells(section("Error codes"))[2:]}
    assert shown == {(str(code.status), code.envelope, code.problem) for code in CODES.values()}


def test_statuses_that_are_never_stored() -> None:
    sentence = section("Stored responses").partition("Never stored")[2].partition("every 5xx")[0]
    assert {int(status) for status in re.findall(r"\d{3}", sentence)} == NEVER_STORED


def test_staleness_defaults() -> None:
    assert (Staleness().cap, Staleness().grace) == (timedelta(days=7), timedelta(hours=6))
    assert "cap of 7 days and grace of 6 hours" in section("Staleness")


@pytest.mark.parametrize(
    ("preset", "policy"),
    [("DEVICE", DEVICE), ("QUEUE", QUEUE), ("CLIENT", CLIENT), ("WORKER", WORKER)],
)
def test_retry_presets(preset: str, policy: RetryPolicy) -> None:
    (row,) = [row for row in cells(section("Retry")) if row[0] == preset]
    seconds = {"200\u2013500 ms": 0.5, "5 s": 5, "2 s": 2, "1 s": 1, "5 min": 300, "30 min": 1800}
    jitter = re.search(r"\d+", row[5])
    assert seconds[row[2]] == policy.first_seconds
    assert float(row[3]) == policy.factor
    assert seconds[row[4]] == policy.ceiling_seconds
    assert (int(jitter[0]) / 100 if jitter else 0) == policy.jitter_fraction
    if policy.attempts is None:
        assert f"{DEFAULT_MAX_ATTEMPTS} by default" in row[6]
    else:
        assert row[6].startswith(str(policy.attempts))


def test_outbox_vocabulary_is_complete() -> None:
    entries = section("Outbox: entries")
    for operation, method in METHODS.items():
        assert f"`{operation}`" in entries
        assert method in entries
    assert all(f"`{status}`" in TEXT or f"{status} " in TEXT for status in Status)
    assert {row[0] for row in cells(section("Outbox: conflicts"))[2:]} == set(ConflictResolution)
    responses = section("Outbox: responses")
    assert all(f"`{code}`" in responses for code in BY_CODE)


SERVICES = ("walk", "planning", "routes", "field")
SPANS = {
    "7 days": timedelta(days=7),
    "24 hours": timedelta(hours=24),
    "4 hours": timedelta(hours=4),
}
ERRORS = {
    "only stale actions": ErrorsStored.STALE_ONLY,
    "4xx of the handler": ErrorsStored.HANDLER_4XX,
    "none": ErrorsStored.NONE,
}


def column(heading: str, name: str) -> dict[str, str]:
    """Return a column of the last table of a section, by the first cell of each row."""
    rows = cells(section(heading))
    head = next(row for row in rows if name in row)
    return {row[0]: row[head.index(name)] for row in rows[rows.index(head) + 2 :]}


@pytest.mark.parametrize("service", SERVICES)
def test_policies_of_the_services(service: str) -> None:
    policy: Policy = import_module(f"onceward_services.{service}.policy").POLICY
    shown = column("Policy settings", service)
    assert shown["key"] == ("required" if policy.key_required else "optional")
    assert shown["key format"] == policy.key_format
    assert SPANS[shown["lifetime of a success"]] == policy.success_ttl
    assert ERRORS[shown["stored errors"]] == policy.errors_stored
    if policy.errors_stored is not ErrorsStored.NONE:
        assert SPANS[shown["lifetime of an error"]] == policy.error_ttl
    assert (shown["staleness"] == "none") == (policy.staleness is None)
    assert shown["error format"] == policy.error_format


@pytest.mark.parametrize("name", ["default", *SERVICES])
def test_outbox_profiles(name: str) -> None:
    profile = (
        DEFAULT_PROFILE
        if name == "default"
        else import_module(f"onceward_services.{name}.outbox_profile").PROFILE
    )
    shown = column("Outbox: profiles", name)
    assert shown["order"].startswith("strict") == profile.strict_order
    assert {"QUEUE": QUEUE, "DEVICE": DEVICE}[shown["retry preset"]] == profile.retry
    assert SPANS[shown["key lifetime on the server, at least"]] == profile.key_lifetime
    without_version = shown["client_wins, if the server names no version"]
    assert (without_version != "If-Match: *") == profile.force_with_version
    assert (shown["priorities"] == "5 for all") == (not profile.priorities)
    assert (shown["times of the action"] == "body") == (profile.request_format is not None)
    assert (shown["response codes, recovery"] == "none") == (not profile.codes)
    responses = section("Outbox: responses")
    assert all(f"`{code}`" in responses for code in profile.codes)


def test_conformance_checks_cite_headings_of_the_page() -> None:
    modules = [
        import_module(f"onceward_lab.conformance.{path.stem}")
        for path in (ROOT / "packages/lab/src/onceward_lab/conformance").glob("[a-z]*.py")
    ]
    checks = {
        check
        for module in modules
        for value in vars(module).values()
        if isinstance(value, tuple)
        for check in value
        if isinstance(check, Check)
    }
    headings = {*re.findall(r"^## (.+)$", TEXT, re.MULTILINE), ""}
    assert len(checks) > 30
    assert {check.section for check in checks} <= headings
