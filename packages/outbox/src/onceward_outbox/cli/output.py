"""Output of ``onceward outbox``: tables, both sides of a conflict, a progress bar."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from onceward_outbox.drain_state import DrainReport, Ended
from onceward_outbox.entry import Attempt, Entry, Status
from onceward_outbox.events import Event, EventKind
from onceward_outbox.queue import OutboxQueue
from onceward_protocol.cli.output import (
    CommandError,
    print_json,
    print_table,
    printable,
    shown_instant,
)

_MAX_LISTED: Final = 5
_MAX_ERROR_LENGTH: Final = 100
_SETTLED: Final = frozenset(
    {
        EventKind.SUCCEEDED,
        EventKind.FAILED,
        EventKind.CONFLICT,
        EventKind.EXPIRED,
        EventKind.DISCARDED,
    }
)


def print_status(entry: Entry, *, as_json: bool) -> None:
    """Print an entry's id and status, or all of it as JSON."""
    if as_json:
        print_json(_facts(entry))
    else:
        print(f"{entry.id}  {_status(entry)}")


def print_bulk(done: str, found: Sequence[Entry], *, dry_run: bool, as_json: bool) -> None:
    """Print how many entries were changed, or would be."""
    if as_json:
        ids = [entry.id for entry in found]
        print_json({"count": len(ids), "dry_run": dry_run, "ids": ids})
    else:
        print(f"{counted(len(found))} {'would be ' if dry_run else ''}{done}")


def print_entries(found: Sequence[Entry], *, as_json: bool) -> None:
    """Print entries, one line each."""
    if as_json:
        print_json([_facts(entry) for entry in found])
        return
    print_table(
        ("id", "user", "#", "what", "endpoint", "status", "sends", "next try", "error"),
        [
            (
                entry.id,
                entry.user_id,
                str(entry.sequence_number),
                f"{entry.operation} {entry.entity_type}",
                entry.endpoint,
                _status(entry),
                str(entry.attempt_count),
                shown_instant(entry.next_retry_at),
                _last_error(entry),
            )
            for entry in found
        ],
    )


def print_entry(
    entry: Entry, attempts: Sequence[Attempt], dependents: Sequence[Entry], *, as_json: bool
) -> None:
    """Print everything about one entry, with its attempts."""
    facts = _facts(entry) | {"dependents": [one.id for one in dependents]}
    if as_json:
        print_json(facts | {"attempts": [_attempt(attempt) for attempt in attempts]})
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {'-' if value is None else printable(_text(value))}")
    if not attempts:
        return
    print()
    print_table(
        ("send", "began", "ended", "outcome", "status", "code", "request id", "error"),
        [
            (
                str(one.number),
                shown_instant(one.started_at),
                shown_instant(one.ended_at),
                one.outcome.value,
                "-" if one.status is None else str(one.status),
                one.code or "-",
                one.request_id or "-",
                _error(one.error),
            )
            for one in attempts
        ],
    )


def print_report(report: DrainReport, stuck: Sequence[Entry], *, as_json: bool) -> None:
    """Print what a drain did, and which entries need a decision."""
    if as_json:
        waiting = [{"id": one.id, "status": one.status.value} for one in stuck]
        print_json(msgspec.to_builtins(report) | {"stuck": waiting})
        return
    rows = [
        (name, str(value))
        for name, value in msgspec.to_builtins(report).items()
        if isinstance(value, int) and value
    ]
    refused = f", {report.refused} refused" if report.refused else ""
    print(f"{report.ended}: {counted(report.succeeded)} succeeded, {report.unsent} unsent{refused}")
    if rows:
        print_table(("what", "count"), rows)
    if report.ended is Ended.WAITING and report.detail:
        print(report.detail)
    for one in stuck[:_MAX_LISTED]:
        ways = "resolve" if one.status is Status.CONFLICT else "retry, edit"
        error = (
            "" if one.last_error_code is None and not one.last_error else f": {_last_error(one)}"
        )
        print(f"{one.id} is {_status(one)} and needs a decision ({ways} or discard){error}")
    if len(stuck) > _MAX_LISTED:
        print(f"and {len(stuck) - _MAX_LISTED} more: see outbox ls --status failed, or conflict")


def print_sides(entry: Entry, *, as_json: bool) -> None:
    """Print base, mine and theirs side by side."""
    base, mine, theirs = (_json(text) for text in (entry.base, entry.payload, entry.theirs))
    if as_json:
        print_json(
            {
                "id": entry.id,
                "status": entry.status.value,
                "base": base,
                "mine": mine,
                "theirs": theirs,
                "theirs_version": entry.theirs_version,
                "conflict_fields": entry.conflict_fields,
            }
        )
        return
    if entry.status is not Status.CONFLICT:
        raise CommandError(f"there is no conflict to resolve: the entry is {entry.status}")
    sides = [_members(side) for side in (base, mine, theirs)]
    names = list(dict.fromkeys(name for side in sides for name in side))
    print_table(
        ("field", "base", "mine", "theirs"),
        [(name, *(_text(side[name]) if name in side else "-" for side in sides)) for name in names],
    )
    if entry.conflict_fields:
        print(f"changed on both sides: {', '.join(entry.conflict_fields)}")
    print("resolve it with --strategy client_wins, server_wins, give_up, or merge --payload …")


@contextmanager
def sending_bar(queue: OutboxQueue, user: str) -> Iterator[None]:
    """Show a progress bar if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        waiting = queue.stats(user).counts
        task = bar.add_task("sending", total=waiting[Status.PENDING] + waiting[Status.IN_FLIGHT])

        def listen(event: Event) -> None:
            if event.kind in _SETTLED:
                bar.advance(task)
            elif event.kind is EventKind.RETRYING:
                bar.update(task, description=f"next try in {event.delay_seconds or 0:.0f} s")
            elif event.kind is EventKind.CLAIMED:
                bar.update(task, description="sending")

        unsubscribe = queue.subscribe(listen)
        try:
            yield
        finally:
            unsubscribe()


def counted(count: int) -> str:
    """Return ``1 entry`` or ``2 entries``."""
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def _facts(entry: Entry) -> dict[str, Any]:
    facts = dict(msgspec.to_builtins(entry))
    for name in ("payload", "base", "theirs"):
        facts[name] = _json(facts[name])
    return facts | {"method": entry.method}


def _attempt(attempt: Attempt) -> dict[str, Any]:
    facts = dict(msgspec.to_builtins(attempt))
    del facts["entry_id"]
    return facts


def _members(side: Any) -> dict[str, Any]:
    """Return one side of a conflict as fields; empty if it is unknown."""
    if side is None:
        return {}
    return side if isinstance(side, dict) else {"(all)": side}


def _json(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _status(entry: Entry) -> str:
    return entry.status.value if entry.reason is None else f"{entry.status} ({entry.reason})"


def _last_error(entry: Entry) -> str:
    """Return one line about the last error of an entry: its status if the body was empty."""
    if entry.last_error or entry.last_error_code is None:
        return _error(entry.last_error)
    return f"HTTP {entry.last_error_code}"


def _error(text: str | None) -> str:
    """Return one line about an error: the sentence in an error body, or the text itself."""
    line = " ".join((_sentence(text or "") or text or "-").split())
    return line if len(line) <= _MAX_ERROR_LENGTH else f"{line[: _MAX_ERROR_LENGTH - 1]}…"


def _sentence(body: str) -> str | None:
    """Return the message of a JSON error body for a person, in the formats that servers use."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    error, details = value.get("error"), value.get("detail")
    inner = error if isinstance(error, dict) else {}
    # A list of what is wrong with the fields, as FastAPI sends it.
    first = details[0] if isinstance(details, list) and details else None
    found = (
        details,
        value.get("message"),
        inner.get("message"),
        first.get("msg") if isinstance(first, dict) else None,
        value.get("title"),
        error,
    )
    return next((text for text in found if isinstance(text, str) and text), None)
