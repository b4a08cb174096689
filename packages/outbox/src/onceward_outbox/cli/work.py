"""The work of ``onceward outbox``: the commands and their options are in ``outbox_commands.py``."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event as Flag
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from msgspec import UNSET

from onceward_outbox.cli.header_command import (
    APP_CHECK_HEADER,
    HeaderCommands,
    parse_header_command,
)
from onceward_outbox.cli.output import (
    counted,
    print_bulk,
    print_entries,
    print_entry,
    print_report,
    print_sides,
    print_status,
    sending_bar,
)
from onceward_outbox.conflicts import resolve_conflict
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import NewEntry, Reason, Resolution, Status
from onceward_outbox.errors import EntryInvalidError
from onceward_outbox.profile import Profile, unknown_profile
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.sender import AtSend
from onceward_outbox.settings import QueueSettings, span_in
from onceward_outbox.transport import HttpTransport
from onceward_protocol.cli.load_object import load_object
from onceward_protocol.cli.output import CommandError, print_json, print_table
from onceward_protocol.errors import UsageError
from onceward_protocol.retry import DEVICE, RetryPolicy

if TYPE_CHECKING:
    from onceward_protocol.operation import OperationName

__all__ = [
    "Place",
    "Selection",
    "add",
    "discard",
    "drain_user",
    "edit",
    "list_entries",
    "prune",
    "resolve",
    "retry",
    "show",
    "stats",
    "watchdog",
]

_BAD_INPUT: Final = 2
_RESOLUTIONS: Final[Mapping[str, Resolution]] = {
    "mine": Resolution.MINE,
    "theirs": Resolution.THEIRS,
    "merged": Resolution.MERGED,
    "give_up": Resolution.GIVE_UP,
    # The strategies of --conflict with the same effect.
    "client_wins": Resolution.MINE,
    "server_wins": Resolution.THEIRS,
}
_MAX_WAIT_RATIO: Final = DEVICE.ceiling_seconds / DEVICE.first_seconds
"""Ratio of the longest to the first delay."""

_ADVICE: Final[Mapping[Ended, str]] = {
    Ended.SIGNED_OUT: "use another --token; nothing was lost",
    Ended.OFFLINE: "the entries stay queued",
    Ended.HELD: "the entries stay queued",
}
_UNKNOWN_PROFILE: Final = "profile_must_be_known"
_PROFILES_ADVICE: Final = (
    "at a shell: onceward outbox --db FILE --profiles MODULE:NAME …, where NAME is a Profile "
    "of the app or a list of them"
)
_NOT_SIGNED_IN: Final = (
    "the server needs a token: give --token or ONCEWARD_OUTBOX_TOKEN; nothing was lost"
)


class Place(msgspec.Struct, frozen=True):
    """The file of a queue, and where its passphrase is."""

    path: Path
    passphrase_env: str | None
    allow_weak_passphrase: bool = False
    # Where the app has its profiles, as MODULE:NAME; those of packages are found without it.
    profiles: str | None = None

    @contextmanager
    def opened(self, *, must_exist: bool = True) -> Iterator[OutboxQueue]:
        """Open the queue; a broken rule ends the command as bad input."""
        if self.path.is_dir():
            raise CommandError(f"{self.path} is a directory: --db should name the file of a queue")
        # SQLite would create an empty file for every misspelt name.
        if must_exist and not self.path.exists():
            raise CommandError(f"{self.path} does not exist: onceward outbox … add creates it")
        profiles = () if self.profiles is None else _load_profiles(self.profiles)
        try:
            with OutboxQueue.open(
                self.path,
                passphrase=self._passphrase(),
                allow_weak_passphrase=self.allow_weak_passphrase,
                settings=QueueSettings.from_environment(),
                profiles=profiles,
                create=not must_exist,
            ) as queue:
                yield queue
        except EntryInvalidError as error:
            if error.rule == _UNKNOWN_PROFILE:
                text = f"{error.message} ({error.rule}); {_PROFILES_ADVICE}"
                raise CommandError(text, _BAD_INPUT) from error
            raise CommandError(f"{error.message} ({error.rule})", _BAD_INPUT) from error

    def _passphrase(self) -> str | None:
        if self.passphrase_env is None:
            return None
        found = os.environ.get(self.passphrase_env)
        if not found:
            raise CommandError(
                f"the variable {self.passphrase_env} is empty: set it to the passphrase", _BAD_INPUT
            )
        return found


def _load_profiles(name: str) -> list[Profile]:
    """Return the ``Profile`` at ``MODULE:NAME``, or those in a list of them."""
    found = load_object(
        name, option="--profiles", example="for example --profiles shop.sync:PROFILES"
    )
    profiles = [found] if isinstance(found, Profile) else found
    if not isinstance(profiles, list | tuple) or not all(
        isinstance(one, Profile) for one in profiles
    ):
        raise CommandError(
            f"{name} is of type {type(found).__name__}: expected a Profile of onceward_outbox, "
            "or a list of them",
            _BAD_INPUT,
        )
    return list(profiles)


def add(
    place: Place,
    *,
    user: str,
    operation: str,
    entity: str,
    endpoint: str,
    payload: str | None,
    headers: Sequence[str],
    as_json: bool,
    base: str | None = None,
    **more: Any,
) -> None:
    """Queue one mutation, and add the user."""
    new = NewEntry(
        user_id=user,
        operation=cast("OperationName", operation),  # checked when it is queued
        entity_type=entity,
        endpoint=endpoint,
        payload=None if payload is None else _raw(payload),
        headers=_headers(headers),
        base=None if base is None else _raw(base),
        **{name: value for name, value in more.items() if value is not None},
    )
    with place.opened(must_exist=False) as queue, queue.transaction():
        queue.add_user(user)
        entry = queue.enqueue(new)
    print_status(entry, as_json=as_json)


def list_entries(
    place: Place,
    *,
    user: str | None,
    status: str | None,
    entity: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List entries in the order in which they were queued."""
    if status is not None and status not in set(Status):
        raise CommandError(f"--status should be one of {', '.join(Status)}", _BAD_INPUT)
    wanted = None if status is None else Status(status)
    with place.opened() as queue:
        found = queue.entries(user, status=wanted, entity_type=entity, limit=limit)
    print_entries(found, as_json=as_json)


def show(place: Place, entry_id: str, *, as_json: bool) -> None:
    """Show everything about one entry, its sends included."""
    with place.opened() as queue:
        entry = queue.get(entry_id)
        attempts = queue.attempts(entry_id)
        dependents = queue.dependents(entry_id)
    print_entry(entry, attempts, dependents, as_json=as_json)


def drain_user(
    place: Place,
    *,
    user: str,
    server: str,
    token: str | None,
    max_seconds: float | None,
    app_check_command: str | None = None,
    header_commands: Sequence[str] = (),
    allow_http: bool = False,
    as_json: bool,
) -> None:
    """Send what a user's queue holds, and print the report."""
    stop = Flag()
    at_send = _at_send(app_check_command, header_commands)
    with (
        place.opened() as queue,
        HttpTransport(server, allow_http=allow_http) as transport,
        _stopping(stop),
        sending_bar(queue, user),
    ):
        if user not in queue.users():
            raise CommandError(f"{place.path} has no user {user}")
        drain = _drain(queue, transport, token, at_send)
        report = drain.run(user, max_seconds=max_seconds, stop=stop)
        stuck = queue.blocked_by(user)
    print_report(report, stuck, as_json=as_json)
    if report.unknown_profiles:
        message = unknown_profile(report.unknown_profiles[0])
        raise CommandError(f"{message}; {_PROFILES_ADVICE}")
    if report.ended is Ended.SIGNED_OUT and token is None:
        raise CommandError(_NOT_SIGNED_IN)
    if report.ended in _ADVICE:
        raise CommandError(f"{report.detail}: {_ADVICE[report.ended]}")


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """One entry, or all failed entries of a user that match: the arguments of bulk commands."""

    entry_id: str | None = None
    all_entries: bool = False
    user: str | None = None
    code: str | None = None
    reason: str | None = None
    dry_run: bool = False

    def check(self) -> None:
        """End the command as bad input unless this is one entry, or all of a user."""
        filters = (self.user, self.code, self.reason)
        if self.all_entries == (self.entry_id is not None):
            raise CommandError("name one entry by its id, or use --all with --user", _BAD_INPUT)
        if self.all_entries and self.user is None:
            raise CommandError("--all needs --user: whose entries are meant", _BAD_INPUT)
        if not self.all_entries and (self.dry_run or any(one is not None for one in filters)):
            raise CommandError("--user, --code, --reason and --dry-run are for --all", _BAD_INPUT)
        if self.reason is not None and self.reason not in set(Reason):
            raise CommandError(f"--reason should be one of {', '.join(Reason)}", _BAD_INPUT)

    def known_user(self, place: "Place", queue: OutboxQueue) -> str:
        """Return the user, who has to be in the queue."""
        if self.user is None or self.user not in queue.users():
            raise CommandError(f"{place.path} has no user {self.user}")
        return self.user

    @property
    def chosen_reason(self) -> Reason | None:
        """The reason that entries must have; None for any."""
        return None if self.reason is None else Reason(self.reason)


def retry(place: Place, selection: Selection, *, as_json: bool) -> None:
    """Send a failed entry again, or all that match."""
    selection.check()
    with place.opened() as queue:
        if selection.entry_id is not None:
            print_status(queue.retry(selection.entry_id), as_json=as_json)
            return
        found = queue.retry_all(
            selection.known_user(place, queue),
            reason=selection.chosen_reason,
            code=selection.code,
            dry_run=selection.dry_run,
        )
    print_bulk("retried", found, dry_run=selection.dry_run, as_json=as_json)


def discard(
    place: Place, selection: Selection, *, with_dependents: bool, force: bool, as_json: bool
) -> None:
    """Discard an entry that is failed, in conflict or not sent yet, or all failed that match."""
    selection.check()
    entry_id = selection.entry_id
    with place.opened() as queue:
        if entry_id is None:
            found = queue.discard_all(
                selection.known_user(place, queue),
                reason=selection.chosen_reason,
                code=selection.code,
                with_dependents=with_dependents,
                dry_run=selection.dry_run,
            )
            print_bulk("discarded", found, dry_run=selection.dry_run, as_json=as_json)
            return
        if queue.get(entry_id).status is Status.PENDING:
            entry = queue.cancel(entry_id, force=force)
        else:
            entry = queue.discard(entry_id, with_dependents=with_dependents)
    print_status(entry, as_json=as_json)


def resolve(
    place: Place, entry_id: str, *, strategy: str | None, payload: str | None, as_json: bool
) -> None:
    """Resolve a conflict; without a strategy, show both sides."""
    if strategy is not None and strategy not in _RESOLUTIONS:
        raise CommandError(f"--strategy should be one of {', '.join(_RESOLUTIONS)}", _BAD_INPUT)
    with place.opened() as queue:
        entry = queue.get(entry_id)
        if strategy is None:
            print_sides(entry, as_json=as_json)
            return
        merged = UNSET if payload is None else msgspec.json.decode(_checked(_raw(payload)))
        entry = resolve_conflict(queue, entry, _RESOLUTIONS[strategy], payload=merged)
    print_status(entry, as_json=as_json)


def edit(
    place: Place,
    entry_id: str,
    *,
    payload: str | None,
    endpoint: str | None,
    headers: Sequence[str],
    force: bool,
    as_json: bool,
) -> None:
    """Change the request of an entry; it gets a new key."""
    if payload is None and endpoint is None and not headers:
        raise CommandError("nothing to change: use --payload, --endpoint or --header", _BAD_INPUT)
    with place.opened() as queue:
        entry = queue.edit_payload(
            entry_id,
            UNSET if payload is None else _raw(payload),
            endpoint=UNSET if endpoint is None else endpoint,
            headers=_headers(headers) if headers else UNSET,
            force=force,
        )
    print_status(entry, as_json=as_json)


def stats(place: Place, *, user: str | None, as_json: bool) -> None:
    """Count entries."""
    with place.opened() as queue:
        found = queue.stats(user)
    counts = {status.value: number for status, number in found.counts.items()}
    facts = counts | {
        "ready": found.ready,
        "waiting": found.waiting,
        "blocked": found.blocked,
        "unsent": found.unsent,
        "oldest_pending_seconds": found.oldest_pending_seconds,
        "file_bytes": found.file_bytes,
    }
    if as_json:
        print_json(facts)
    else:
        rows = [(name, "-" if value is None else f"{value:g}") for name, value in facts.items()]
        print_table(("what", "count"), rows)


def prune(place: Place, *, limit: int | None, as_json: bool) -> None:
    """Remove old settled entries."""
    with place.opened() as queue:
        removed = queue.prune(limit=limit)
    if as_json:
        print_json({"removed": removed})
    else:
        print(f"{counted(removed)} removed")


def watchdog(place: Place, *, as_json: bool) -> None:
    """Return the claims of ended processes to the queue."""
    with place.opened() as queue:
        back = queue.watchdog()
    if as_json:
        print_json({"revived": [entry.id for entry in back]})
    else:
        print(f"{counted(len(back))} returned to the queue")


# ------------------------------------------------------------------ draining


def _at_send(app_check_command: str | None, header_commands: Sequence[str]) -> AtSend | None:
    commands = [parse_header_command(given) for given in header_commands]
    if app_check_command is not None:
        commands.append((APP_CHECK_HEADER, app_check_command))
    return HeaderCommands(commands) if commands else None


def _drain(
    queue: OutboxQueue, transport: HttpTransport, token: str | None, at_send: AtSend | None
) -> Drain:
    """Return a drain, with shorter delays if the environment sets them."""
    first = span_in(os.environ, "ONCEWARD_OUTBOX_RETRY_SECONDS")
    if first is None:
        return Drain(queue, transport, token, at_send=at_send)
    seconds = first.total_seconds()

    def sooner(profile: Profile) -> RetryPolicy:
        """Shorten the delays, not the number of attempts."""
        return replace(
            profile.retry, first_seconds=seconds, ceiling_seconds=seconds * _MAX_WAIT_RATIO
        )

    return Drain(queue, transport, token, at_send=at_send, retry=sooner)


@contextmanager
def _stopping(stop: Flag) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM end the drain after the entry that is being sent."""
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------ parsing options


def _raw(given: str) -> bytes:
    """Return JSON from the option itself, from a file (@name) or from standard input (-)."""
    if given == "-":
        return sys.stdin.buffer.read()
    if given.startswith("@"):
        try:
            return Path(given[1:]).read_bytes()
        except OSError as error:
            raise CommandError(
                f"{given[1:]} cannot be read: {error.strerror}", _BAD_INPUT
            ) from error
    return given.encode("utf-8", "surrogateescape")


def _checked(raw: bytes) -> bytes:
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"the payload is not JSON: {error}", _BAD_INPUT) from error
    return raw


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    for line in given:
        name, colon, value = line.partition(":")
        if not colon:
            raise UsageError("a --header should look like 'If-Match: \"7\"'")
        headers[name.strip()] = value.strip()
    return headers
