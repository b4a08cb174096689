"""Writes the generated test vectors of `conformance/`: the core's tables, said in plain JSON.

Only what *is* a table is generated: errors, retries, transitions. The other files are written by
hand, because a vector made by the code it is to judge would repeat its opinion.

``python -m holdfast_lab.vectors`` says which files differ, ``--write`` writes them.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from holdfast.core.error_formats import CODES, Code
from holdfast.core.outbox_entry import (
    TRANSITIONS,
    Action,
    Entry,
    Operation,
    Status,
)
from holdfast.core.response_classification import BY_CODE, TryLater, Verdict, classify
from holdfast.core.retry import CLIENT, DEVICE, QUEUE, WORKER, RetryPolicy, is_transient
from holdfast_services.walk.outbox_profile import PROFILE as WALK

__all__ = ["GENERATED", "VERSION", "entry_of", "generated", "main", "said"]

VERSION: Final = 1
"""Raised when the meaning of a field changes; new cases and new fields do not raise it."""

_IETF: Final = MappingProxyType({"payload_mismatch": 422})
_RETRIES: Final = MappingProxyType(
    {"device": DEVICE, "queue": QUEUE, "client": CLIENT, "worker": WORKER}
)
_QUEUE_ATTEMPTS: Final = 12
_TRIES_SHOWN: Final = 13
_NOON: Final = datetime(2026, 1, 31, 12, tzinfo=UTC)

# The status each of the outbox's codes comes with (contract, sections 4, 5 and 9).
_CONFLICTS: Final = frozenset(
    {
        "IDEMPOTENCY_CONFLICT",
        "IDEMPOTENCY_IN_PROGRESS",
        "idempotency.payload_mismatch",
        "idempotency.in_progress",
        "concurrency.version_mismatch",
        "ALREADY_ALLOCATED",
        "QUEST_ALREADY_COMPLETED",
        "QUEST_ALREADY_IN_PROGRESS",
    }
)
# Answers without a code of the table, each with the operation that got it.
_PLAIN: Final[tuple[tuple[int | None, Operation], ...]] = (
    (200, Operation.CREATE),
    (201, Operation.CREATE),
    (202, Operation.CREATE),
    (204, Operation.DELETE),
    (302, Operation.CREATE),
    (307, Operation.CREATE),
    (400, Operation.CREATE),
    (401, Operation.CREATE),
    (403, Operation.CREATE),
    (404, Operation.UPDATE),
    (404, Operation.DELETE),
    (408, Operation.CREATE),
    (409, Operation.UPDATE),
    (410, Operation.PATCH),
    (410, Operation.DELETE),
    (412, Operation.UPDATE),
    (413, Operation.CREATE),
    (425, Operation.CREATE),
    (428, Operation.UPDATE),
    (429, Operation.CREATE),
    (500, Operation.CREATE),
    (502, Operation.CREATE),
    (503, Operation.CREATE),
    (504, Operation.CREATE),
    (None, Operation.CREATE),
)

# How Retry-After is read at noon of 31 January 2026; written by hand, as RFC 9110 has it.
_RETRY_AFTER: Final[tuple[tuple[str | None, float | None], ...]] = (
    ("120", 120.0),
    (" 5 ", 5.0),
    ("0", 0.0),
    ("-5", 0.0),
    ("Sat, 31 Jan 2026 12:02:00 GMT", 120.0),
    ("Sat, 31 Jan 2026 11:00:00 GMT", 0.0),
    ("99999999999999999999", 2147483647.0),
    ("1.5", None),
    ("soon", None),
    ("", None),
    (None, None),
)


def generated(name: str) -> str:
    """Return the text of one generated file."""
    what, cases = GENERATED[name]
    content = {"version": VERSION, "what": what, "cases": list(cases())}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def said(verdict: Verdict) -> dict[str, Any]:
    """Write a verdict of the outbox as the vectors have it."""
    name = type(verdict).__name__
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    told: dict[str, Any] = {"device": words.removeprefix("_")}
    if isinstance(verdict, TryLater):
        told["outcome_unknown"] = verdict.outcome_unknown
    return told


def entry_of(
    operation: str = "create", *, attempt: int = 1, previous_status: int | None = None
) -> Entry:
    """Return an entry that was claimed for its n-th send; all that does not matter is blank."""
    return Entry(
        id="entry",
        user_id="user",
        operation=Operation(operation),
        entity_type="contact",
        local_id=None,
        server_id=None,
        endpoint="/api/v1/contacts",
        payload=None,
        headers={},
        idempotency_key="key",
        status=Status.IN_FLIGHT,
        attempt_count=attempt,
        max_attempts=_QUEUE_ATTEMPTS,
        next_retry_at=None,
        last_error=None,
        last_error_code=previous_status,
        sequence_number=1,
        dependency_ids=(),
        created_at=_NOON,
        synced_at=None,
        conflict_resolution=None,
        priority=5,
        client_generated_at=_NOON,
        profile="field",
        lane=None,
        reason=None,
        local_refs=(),
        payload_version=1,
        base=None,
        base_version=None,
        theirs=None,
        theirs_version=None,
        forced=False,
        outcome_unknown=False,
        claim_number=1,
        waiting_for=0,
    )


def _errors() -> Iterator[dict[str, Any]]:
    for kind, code in CODES.items():
        yield {
            "name": kind,
            "about": "code",
            "status": code.status,
            "ietf_status": _IETF.get(kind, code.status),
            "envelope": code.envelope,
            "problem": code.problem,
            "retryable": _may_do_better(code.status, code.problem),
        }
    answers = {(code.status, name): None for code in CODES.values() for name in _names(code)}
    answers |= {
        (409 if name in _CONFLICTS else 422, name): None for name in (*BY_CODE, *WALK.codes)
    }
    for status, name in answers:
        yield _answer(f"{status} with {name}", status, code=name)
    for plain, operation in _PLAIN:
        told = "no answer" if plain is None else str(plain)
        yield _answer(f"{told} to a {operation}", plain, operation=operation)
    yield _answer("422 with an unknown code, first send", 422, code="SOMETHING_NEW")
    yield _answer(
        "422 with an unknown code, after another 422",
        422,
        code="SOMETHING_NEW",
        attempt=2,
        previous_status=422,
    )
    yield _answer(
        "422 with an unknown code, after a 503",
        422,
        code="SOMETHING_NEW",
        attempt=2,
        previous_status=503,
    )


def _names(code: Code) -> tuple[str, str]:
    return code.envelope, code.problem


def _may_do_better(status: int, code: str) -> bool:
    """Say whether the same request, sent again, may get another answer by itself."""
    return is_transient(status) or isinstance(BY_CODE.get(code), TryLater)


def _answer(
    name: str,
    status: int | None,
    *,
    code: str | None = None,
    operation: Operation = Operation.CREATE,
    attempt: int = 1,
    previous_status: int | None = None,
) -> dict[str, Any]:
    entry = entry_of(operation, attempt=attempt, previous_status=previous_status)
    return {
        "name": name,
        "about": "answer",
        "status": status,
        "code": code,
        "operation": str(operation),
        "attempt": attempt,
        "previous_status": previous_status,
        **said(classify(status, code, entry, WALK.codes)),
    }


def _retries() -> Iterator[dict[str, Any]]:
    for preset, policy in _RETRIES.items():
        limit = _QUEUE_ATTEMPTS if policy.attempts is None else policy.attempts
        for attempt in range(1, _TRIES_SHOWN + 1):
            yield {
                "name": f"{preset}, attempt {attempt}",
                "about": "delay",
                "preset": preset,
                "attempt": attempt,
                "max_attempts": limit,
                **_bounds(policy, attempt),
                "gives_up": policy.gives_up_after(attempt, max_attempts=limit),
            }
        for after in (1, 60, 7200):
            yield {
                "name": f"{preset}, first attempt, Retry-After {after}",
                "about": "retry_after_floor",
                "preset": preset,
                "attempt": 1,
                "retry_after_seconds": after,
                **_bounds(policy, 1, retry_after_seconds=after),
            }
    for status in (None, 200, 400, 401, 404, 408, 409, 422, 425, 428, 429, 500, 502, 503, 599):
        yield {
            "name": "no answer" if status is None else f"status {status}",
            "about": "transient",
            "status": status,
            "transient": is_transient(status),
        }
    for value, seconds in _RETRY_AFTER:
        yield {
            "name": "no Retry-After" if value is None else f"Retry-After: {value!r}",
            "about": "retry_after_header",
            "value": value,
            "now": _NOON.isoformat(),
            "seconds": seconds,
        }


def _bounds(policy: RetryPolicy, attempt: int, **floor: float) -> dict[str, Any]:
    """Return between what a delay lies; the dice are from 0 to 1, and the ends are included."""
    low = policy.delay_seconds(attempt, random=0.0, **floor)
    high = policy.delay_seconds(attempt, random=1.0, **floor)
    return {"min_seconds": low, "max_seconds": high}


def _transitions() -> Iterator[dict[str, Any]]:
    for action in Action:
        for status in Status:
            to = TRANSITIONS[action].get(status)
            case: dict[str, Any] = {
                "name": f"{action} when {status}",
                "action": str(action),
                "from": str(status),
            }
            yield case | ({"refused": "transition"} if to is None else {"to": str(to)})


GENERATED: Final[Mapping[str, tuple[str, Callable[[], Iterator[dict[str, Any]]]]]] = (
    MappingProxyType(
        {
            "errors.json": (
                "Every code in both dialects, and what a device does with an answer.",
                _errors,
            ),
            "retries.json": (
                "How long to wait after an attempt failed, and when to stop.",
                _retries,
            ),
            "transitions.json": (
                "What may become of an entry of the device's queue: every action in every status.",
                _transitions,
            ),
        }
    )
)
"""The files that are generated: what each is about, and its cases."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the files of a directory with the tables, or write them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m holdfast_lab.vectors", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("conformance"))
    chosen = parser.parse_args(arguments)
    if not chosen.directory.is_dir():
        parser.error(f"there is no directory {chosen.directory}; run it at the root of a checkout")
    stale = 0
    for name in GENERATED:
        path = chosen.directory / name
        text = generated(name)
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if chosen.write:
            path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{'wrote' if chosen.write else 'differs:'} {path}\n")
    return 1 if stale and not chosen.write else 0


if __name__ == "__main__":
    sys.exit(main())
