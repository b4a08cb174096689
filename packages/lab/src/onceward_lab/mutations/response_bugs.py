"""Bugs of the outbox about versions, refusals, outages and responses that are not the service's."""

import re
from typing import Any

from onceward_lab.mutations.planting import Replacement, bug, untyped
from onceward_outbox import (
    backoff,
    completion,
    dependencies,
    drain_run,
    responses,
    sender,
    transaction,
)
from onceward_outbox.backoff import Backoff
from onceward_outbox.outcome import AttemptResult
from onceward_outbox.responses import Responses
from onceward_protocol.response_classification import AttestationNeeded, SignInNeeded

COMPLETION, DEPENDENCIES, DRAIN_RUN, SENDER, TRANSACTION = (
    untyped(module) for module in (completion, dependencies, drain_run, sender, transaction)
)
BACKOFF, RESPONSES = untyped(backoff), untyped(responses)


def _version_to_send(wrong: str) -> Replacement:
    """Claim entries with another version than the base followed along own successes."""
    right = TRANSACTION.statement
    changed = {}
    for name in ("claim_some", "claim_behind"):
        changed[name], count = re.subn(
            r"SELECT CASE coalesce\(base_version.*?FROM entity_versions AS known(.*?)"
            r"AND CASE coalesce\(base_version, ''\).*?END\)",
            rf"SELECT {wrong} FROM entity_versions AS known\1)",
            right(name),
            count=1,
            flags=re.DOTALL,
        )
        assert count == 1, name
    return TRANSACTION, "statement", lambda name: changed.get(name) or right(name)


@bug
def version_not_sent() -> list[Replacement]:
    right = SENDER.build_request

    def build_request(*args: Any, **options: Any) -> Any:
        return right(*args, **options | {"version": None})

    return [(SENDER, "build_request", build_request)]


@bug
def version_not_followed() -> list[Replacement]:
    # Each edit is sent with the version it was made on, whatever the device has written since.
    return [
        _version_to_send("coalesce(base_version, known.version)"),
        (DRAIN_RUN, "follow", lambda behind, _done, _produced: behind),
        (COMPLETION, "resend_on_own", lambda *_, **_options: None),
    ]


@bug
def latest_version_sent() -> list[Replacement]:
    # Also that of another client, which the person has not seen.
    return [_version_to_send("coalesce(known.seen, known.version)")]


@bug
def version_of_success_forgotten() -> list[Replacement]:
    return [(COMPLETION, "record_success", lambda *_: None)]


@bug
def retry_names_another_version() -> list[Replacement]:
    return [(COMPLETION, "_is_frozen", lambda *_, **_options: False)]


@bug
def older_edit_overwrites_a_newer_one() -> list[Replacement]:
    # A refused edit that is retried follows the versions of the edits that were made after it.
    return [(DEPENDENCIES, "_has_later_edit", lambda *_: False)]


@bug
def automatic_merge_adopts_the_server_side() -> list[Replacement]:
    # The edits behind it overwrite what no person has seen.
    right = COMPLETION.resolution.resolve

    def resolve(*args: Any, **options: Any) -> Any:
        return right(*args, **options | {"adopts": True})

    return [(COMPLETION.resolution, "resolve", resolve)]


@bug
def unknown_base_not_read() -> list[Replacement]:
    return [(RESPONSES, "has_unknown_base", lambda *_: False)]


@bug
def refused_entry_keeps_its_lane() -> list[Replacement]:
    return [(COMPLETION, "leave_lane", lambda _tx, entry: entry)]


@bug
def refusal_does_not_park_its_chain() -> list[Replacement]:
    return [(COMPLETION, "bind_chain", lambda *_: None)]


@bug
def captive_portal_taken_for_success() -> list[Replacement]:
    return [(RESPONSES, "_is_recognised", lambda *_: True)]


@bug
def outage_counts_as_attempt() -> list[Replacement]:
    return [(BACKOFF, "counts_as_attempt", lambda *_: True)]


@bug
def silence_counts_as_attempt() -> list[Replacement]:
    # Also if the server responds to nothing, so that an hour of silence fails the whole queue.
    return [(Backoff, "silence_code", lambda *_: None)]


@bug
def unread_base_counts_as_attempt() -> list[Replacement]:
    def no_response(self: Any, send: Any, failure: Any) -> Any:
        entry, result = send.entry, AttemptResult(error=failure.reason)
        return self._backoff.retry_later(entry, result, outcome_unknown=entry.outcome_unknown)

    return [(Responses, "_no_response_to_read", no_response)]


@bug
def refused_attestation_pauses_all() -> list[Replacement]:
    right = RESPONSES.classify

    def classify(*args: Any, **options: Any) -> Any:
        verdict = right(*args, **options)
        return SignInNeeded() if isinstance(verdict, AttestationNeeded) else verdict

    return [(RESPONSES, "classify", classify)]
