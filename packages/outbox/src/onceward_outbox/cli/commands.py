"""``onceward outbox``: the queue of a device, inspected, changed and drained."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event as Flag
from threading import Lock
from typing import Annotated, Any, Final, NamedTuple, cast

import msgspec
import typer
from msgspec import UNSET

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
from onceward_outbox.entry import Entry, NewEntry, Reason, Resolution, Status
from onceward_outbox.errors import EntryInvalidError
from onceward_outbox.profile import Profile, unknown_profile
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.settings import QueueSettings, span_in
from onceward_outbox.transport import HttpTransport
from onceward_protocol.cli.app import CommandApp
from onceward_protocol.cli.load_object import load_object
from onceward_protocol.cli.output import CommandError, print_json, print_table
from onceward_protocol.errors import UsageError
from onceward_protocol.retry import DEVICE, RetryPolicy

_BAD_INPUT: Final = 2
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
_APP_CHECK_HEADER: Final = "X-Firebase-AppCheck"
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
# The drain makes these itself.
_RESERVED_HEADERS: Final = frozenset(
    {"authorization", "host", "content-length", "transfer-encoding"}
)
_MAX_COMMAND_SECONDS: Final = 30.0
_UNAUTHORIZED: Final = 401
_JSON_OR_FILE: Final = "JSON, @FILE, or - for standard input."

outbox_app = CommandApp(help="Inspect and drain the outbox of a device.")

Json = Annotated[bool, typer.Option("--json", help="Write JSON, for scripts.")]
EntryId = Annotated[str, typer.Argument(help="The entry's id, as outbox ls shows it.")]
AnyEntryId = Annotated[
    str | None, typer.Argument(help="The entry's id, as outbox ls shows it; or use --all.")
]
AllEntries = Annotated[bool, typer.Option("--all", help="All failed entries of --user.")]
OfUser = Annotated[str | None, typer.Option(help="With --all: the user whose entries are meant.")]
WithCode = Annotated[
    str | None, typer.Option(help="With --all: only those with this code of the server.")
]
WithReason = Annotated[
    str | None, typer.Option(help="With --all: only those with this reason, as outbox ls shows it.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="With --all: count them, and change nothing.")
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        help="A header, such as 'If-Match: \"7\"'. May be repeated.", metavar="NAME: VALUE"
    ),
]


def register(app: typer.Typer) -> None:
    """Add ``onceward outbox`` to ``onceward``."""
    app.add_typer(outbox_app, name="outbox")


@outbox_app.callback(invoke_without_command=True)
def outbox(
    context: typer.Context,
    db: Annotated[
        Path | None, typer.Option("--db", metavar="FILE", help="The file of the outbox.")
    ] = None,
    passphrase_env: Annotated[
        str | None,
        typer.Option(
            metavar="VAR", help="Environment variable with the passphrase, for an encrypted file."
        ),
    ] = None,
    allow_weak_passphrase: Annotated[
        bool,
        typer.Option(
            "--allow-weak-passphrase",
            help="Accept a passphrase of fewer than 12 characters, or in the form of a raw key.",
        ),
    ] = False,
    profiles: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="A Profile of the app, or a list of them; those of packages are found without it.",
        ),
    ] = None,
) -> None:
    """Inspect and drain the outbox of a device.

    Examples:
        onceward outbox --db outbox.db ls

    """
    if context.invoked_subcommand is None:
        raise CommandError(
            "name a command: add, ls, show, drain, retry, discard, resolve, edit, "
            "stats, prune or watchdog (try: onceward outbox --help)",
            2,
        )
    if db is None:
        if "--help" in sys.argv:
            return  # help needs no file
        raise CommandError("name the file: onceward outbox --db FILE … (try: --help)", 2)
    context.obj = _File(db, passphrase_env, allow_weak_passphrase, profiles)


@outbox_app.command("add")
def outbox_add(  # noqa: PLR0917 - typer turns them into options
    context: typer.Context,
    user: Annotated[str, typer.Option(help="The user whose action it is.")],
    op: Annotated[str, typer.Option(help="create, update, patch or delete.")],
    entity: Annotated[str, typer.Option(help="Type of the entity, such as note.")],
    endpoint: Annotated[str, typer.Option(help="The path on the server.")],
    payload: Annotated[str | None, typer.Option(help=_JSON_OR_FILE)] = None,
    header: Header = None,
    local_id: Annotated[
        str | None, typer.Option(help="Id of the entity on the device: a lowercase UUID.")
    ] = None,
    depends_on: Annotated[
        list[str] | None,
        typer.Option(help="An entry id, or a local id, that must succeed first. May be repeated."),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="Higher goes first.", show_default="by entity type")
    ] = None,
    conflict: Annotated[
        str | None, typer.Option(help="server_wins, client_wins, manual or merge.")
    ] = None,
    base_version: Annotated[
        str | None, typer.Option(help="The version of the entity that the change was made on.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help=f"The entity as the person saw it, for merges: {_JSON_OR_FILE}"),
    ] = None,
    once: Annotated[
        str | None,
        typer.Option(
            help="A name for the action: nothing is queued while the user has an entry with it "
            "that is unsettled or succeeded."
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The idempotency key.", show_default="a new one")
    ] = None,
    profile: Annotated[str, typer.Option(help="Name of the profile of the API.")] = "default",
    json: Json = False,
) -> None:
    """Queue one mutation. Creates the file and the user if they do not exist.

    Examples:
        onceward outbox --db outbox.db add --user ada --op create --entity note
        --endpoint /notes --payload '{"text": "Call back"}'

    """
    more: dict[str, Any] = {
        "local_id": local_id,
        "depends_on": tuple(depends_on or ()),
        "priority": priority,
        "conflict_resolution": conflict,
        "base_version": base_version,
        "once": once,
        "key": key,
        "profile": profile,
    }
    new = NewEntry(
        user_id=user,
        operation=cast("Any", op),  # checked when it is queued
        entity_type=entity,
        endpoint=endpoint,
        payload=None if payload is None else _raw(payload),
        headers=_headers(header or []),
        base=None if base is None else _raw(base),
        **{name: value for name, value in more.items() if value is not None},
    )
    with _opened(context, must_exist=False) as queue, queue.transaction():
        queue.add_user(user)
        entry = queue.enqueue(new)
    print_status(entry, as_json=json)


@outbox_app.command("ls")
def outbox_ls(  # noqa: PLR0917 - typer turns them into options
    context: typer.Context,
    user: Annotated[str | None, typer.Option(help="Only entries of this user.")] = None,
    status: Annotated[
        str | None,
        typer.Option(help="Only entries with this status: pending, in_flight, failed, conflict …"),
    ] = None,
    entity: Annotated[
        str | None, typer.Option(help="Only entries about this type of entity.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most this many.")] = 1000,
    json: Json = False,
) -> None:
    """List entries in the order in which they were queued.

    Examples:
        onceward outbox --db outbox.db ls --status failed

    """
    if status is not None and status not in set(Status):
        raise CommandError(f"--status should be one of {', '.join(Status)}", _BAD_INPUT)
    wanted = None if status is None else Status(status)
    with _opened(context) as queue:
        found = queue.entries(user, status=wanted, entity_type=entity, limit=limit)
    print_entries(found, as_json=json)


@outbox_app.command("show")
def outbox_show(context: typer.Context, entry_id: EntryId, json: Json = False) -> None:
    """Show one entry: its request, its dependencies, and every attempt.

    Examples:
        onceward outbox --db outbox.db show 019a8a51-7c1e-7b1f-a1de-2f6c3c1f3a10

    """
    with _opened(context) as queue:
        entry = queue.get(entry_id)
        attempts = queue.attempts(entry_id)
        dependents = queue.dependents(entry_id)
    print_entry(entry, attempts, dependents, as_json=json)


@outbox_app.command("drain")
def outbox_drain(  # noqa: PLR0917 - typer turns them into options
    context: typer.Context,
    user: Annotated[str, typer.Option(help="The user whose queue is sent.")],
    server: Annotated[str, typer.Option(metavar="URL", help="URL of the server.")],
    token: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_OUTBOX_TOKEN", metavar="T", help="Token of the user. Never stored."
        ),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="Stop after this long; retries that fall due in that time are sent."
        ),
    ] = None,
    app_check_command: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Prints an App Check token, sent as X-Firebase-AppCheck. Runs without a shell.",
        ),
    ] = None,
    header_command: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME: COMMAND",
            help="Prints the value of a header. Runs without a shell. May be repeated.",
        ),
    ] = None,
    allow_http: Annotated[
        bool,
        typer.Option("--allow-http", help="Accept http:// for a server on another machine."),
    ] = False,
    json: Json = False,
) -> None:
    """Send what a user's queue holds.

    Without --max-seconds it ends when nothing can be sent now. Ctrl-C or SIGTERM finishes the entry
    that is being sent and exits with 0. Exits with 1 if the server cannot be reached or does not
    accept the token; no entry fails because of that.

    Examples:
        onceward outbox --db outbox.db drain --user ada --server http://127.0.0.1:8000
        --token "$(onceward token --sub ada)"

    """
    stop = Flag()
    commands = [parse_header_command(given) for given in header_command or []]
    if app_check_command is not None:
        commands.append((_APP_CHECK_HEADER, app_check_command))
    at_send = HeaderCommands(commands) if commands else None
    with (
        _opened(context) as queue,
        HttpTransport(server, allow_http=allow_http) as transport,
        _stopping(stop),
        sending_bar(queue, user),
    ):
        drain = Drain(queue, transport, token, at_send=at_send, retry=_retry_in_environment())
        report = drain.run(_known(user, context, queue), max_seconds=max_seconds, stop=stop)
        stuck = queue.blocked_by(user)
    print_report(report, stuck, as_json=json)
    if report.unknown_profiles:
        message = unknown_profile(report.unknown_profiles[0])
        raise CommandError(f"{message}; {_PROFILES_ADVICE}")
    if report.ended is Ended.SIGNED_OUT and token is None:
        raise CommandError(_NOT_SIGNED_IN)
    if report.ended in _ADVICE:
        raise CommandError(f"{report.detail}: {_ADVICE[report.ended]}")


@outbox_app.command("retry")
def outbox_retry(  # noqa: PLR0917 - typer turns them into options
    context: typer.Context,
    entry_id: AnyEntryId = None,
    all_entries: AllEntries = False,
    user: OfUser = None,
    code: WithCode = None,
    reason: WithReason = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Send a failed entry again, or one that expired unsent; its parked dependents are revived.

    For example, after the server has been corrected:

        onceward outbox --db outbox.db retry --all --user ada --code SOLD_OUT --dry-run
    """
    only = _Filter(user, code, reason, dry_run)
    only.check(entry_id, all_entries=all_entries)
    with _opened(context) as queue:
        if entry_id is not None:
            print_status(queue.retry(entry_id), as_json=json)
            return
        found = queue.retry_all(
            _known(user, context, queue), reason=only.member, code=code, dry_run=dry_run
        )
    print_bulk("retried", found, dry_run=dry_run, as_json=json)


@outbox_app.command("discard")
def outbox_discard(  # noqa: PLR0917 - typer turns them into options
    context: typer.Context,
    entry_id: AnyEntryId = None,
    all_entries: AllEntries = False,
    user: OfUser = None,
    code: WithCode = None,
    reason: WithReason = None,
    dry_run: DryRun = False,
    with_dependents: Annotated[
        bool,
        typer.Option("--with-dependents", help="Also all entries that were parked because of it."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if it was sent and may have happened.")
    ] = False,
    json: Json = False,
) -> None:
    """Discard an entry that is failed, in conflict or not sent yet, or all failed ones."""
    only = _Filter(user, code, reason, dry_run)
    only.check(entry_id, all_entries=all_entries)
    with _opened(context) as queue:
        if entry_id is None:
            found = queue.discard_all(
                _known(user, context, queue),
                reason=only.member,
                code=code,
                with_dependents=with_dependents,
                dry_run=dry_run,
            )
            print_bulk("discarded", found, dry_run=dry_run, as_json=json)
            return
        if queue.get(entry_id).status is Status.PENDING:
            entry = queue.cancel(entry_id, force=force)
        else:
            entry = queue.discard(entry_id, with_dependents=with_dependents)
    print_status(entry, as_json=json)


@outbox_app.command("resolve")
def outbox_resolve(
    context: typer.Context,
    entry_id: EntryId,
    strategy: Annotated[
        str | None,
        typer.Option(help="server_wins, client_wins, merge or give_up."),
    ] = None,
    payload: Annotated[str | None, typer.Option(help=f"With merge: {_JSON_OR_FILE}")] = None,
    json: Json = False,
) -> None:
    """Resolve a conflict. Without --strategy, show base, mine and theirs side by side.

    Examples:
        onceward outbox --db outbox.db resolve 019a8a51-7c1e-7b1f-a1de-2f6c3c1f3a10
        --strategy client_wins

    """
    if strategy is not None and strategy not in set(Resolution):
        raise CommandError(f"--strategy should be one of {', '.join(Resolution)}", _BAD_INPUT)
    with _opened(context) as queue:
        entry = queue.get(entry_id)
        if strategy is None:
            print_sides(entry, as_json=json)
            return
        merged = UNSET if payload is None else _decoded(_raw(payload))
        entry = resolve_conflict(queue, entry, Resolution(strategy), payload=merged)
    print_status(entry, as_json=json)


@outbox_app.command("edit")
def outbox_edit(  # noqa: PLR0917 - typer turns them into options
    context: typer.Context,
    entry_id: EntryId,
    payload: Annotated[str | None, typer.Option(help=_JSON_OR_FILE)] = None,
    endpoint: Annotated[str | None, typer.Option(help="New path on the server.")] = None,
    header: Header = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even if it was sent and may have happened.")
    ] = False,
    json: Json = False,
) -> None:
    """Change the request of an entry. It gets a new key and keeps its place."""
    if payload is None and endpoint is None and not header:
        raise CommandError("nothing to change: use --payload, --endpoint or --header", _BAD_INPUT)
    with _opened(context) as queue:
        entry = queue.edit_payload(
            entry_id,
            UNSET if payload is None else _raw(payload),
            endpoint=UNSET if endpoint is None else endpoint,
            headers=_headers(header) if header else UNSET,
            force=force,
        )
    print_status(entry, as_json=json)


@outbox_app.command("stats")
def outbox_stats(
    context: typer.Context,
    user: Annotated[str | None, typer.Option(help="Only entries of this user.")] = None,
    json: Json = False,
) -> None:
    """Count entries."""
    with _opened(context) as queue:
        found = queue.stats(user)
    counts = {status.value: number for status, number in found.counts.items()}
    facts = counts | {
        "ready": found.ready,
        "waiting": found.waiting,
        "blocked": found.blocked,
        "unsent": found.unsent,
        "refused": found.refused,
        "oldest_pending_seconds": found.oldest_pending_seconds,
        "file_bytes": found.file_bytes,
    }
    if json:
        print_json(facts)
    else:
        rows = [(name, "-" if value is None else f"{value:g}") for name, value in facts.items()]
        print_table(("what", "count"), rows)


@outbox_app.command("prune")
def outbox_prune(
    context: typer.Context,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.")] = None,
    json: Json = False,
) -> None:
    """Remove entries that succeeded 7 days ago or were otherwise settled 30 days ago.

    Failed entries and conflicts are removed after 90 days, a week after an announcement.
    """
    with _opened(context) as queue:
        removed = queue.prune(limit=limit)
    if json:
        print_json({"removed": removed})
    else:
        print(f"{counted(removed)} removed")


@outbox_app.command("watchdog")
def outbox_watchdog(context: typer.Context, json: Json = False) -> None:
    """Return entries to the queue that an ended process had claimed, after two minutes."""
    with _opened(context) as queue:
        back = queue.watchdog()
    if json:
        print_json({"revived": [entry.id for entry in back]})
    else:
        print(f"{counted(len(back))} returned to the queue")


# -- the file of the queue ------------------------------------------------------------------------


class _File(NamedTuple):
    """The file of a queue, and where its passphrase and the app's profiles are."""

    path: Path
    passphrase_env: str | None
    allow_weak_passphrase: bool
    profiles: str | None


@contextmanager
def _opened(context: typer.Context, *, must_exist: bool = True) -> Iterator[OutboxQueue]:
    """Open the queue; a broken rule ends the command as bad input."""
    file: _File = context.obj
    if file.path.is_dir():
        raise CommandError(f"{file.path} is a directory: --db should name the file of a queue")
    # SQLite would create an empty file for every misspelt name.
    if must_exist and not file.path.exists():
        raise CommandError(f"{file.path} does not exist: onceward outbox … add creates it")
    profiles = () if file.profiles is None else _load_profiles(file.profiles)
    try:
        with OutboxQueue.open(
            file.path,
            passphrase=_passphrase(file.passphrase_env),
            allow_weak_passphrase=file.allow_weak_passphrase,
            settings=QueueSettings.from_environment(),
            profiles=profiles,
            create=not must_exist,
        ) as queue:
            yield queue
    except EntryInvalidError as error:
        text = f"{error.message} ({error.rule})"
        if error.rule == _UNKNOWN_PROFILE:
            text = f"{text}; {_PROFILES_ADVICE}"
        raise CommandError(text, _BAD_INPUT) from error


def _passphrase(variable: str | None) -> str | None:
    if variable is None:
        return None
    found = os.environ.get(variable)
    if not found:
        raise CommandError(
            f"the variable {variable} is empty: set it to the passphrase", _BAD_INPUT
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


def _known(user: str | None, context: typer.Context, queue: OutboxQueue) -> str:
    """Return the user, who has to be in the queue."""
    if user is None or user not in queue.users():
        raise CommandError(f"{context.obj.path} has no user {user}")
    return user


class _Filter(NamedTuple):
    """The options of ``--all``: which failed entries of a user are meant."""

    user: str | None
    code: str | None
    reason: str | None
    dry_run: bool

    def check(self, entry_id: str | None, *, all_entries: bool) -> None:
        """End the command as bad input unless this is one entry, or all of a user."""
        if all_entries == (entry_id is not None):
            raise CommandError("name one entry by its id, or use --all with --user", _BAD_INPUT)
        if all_entries and self.user is None:
            raise CommandError("--all needs --user: whose entries are meant", _BAD_INPUT)
        if not all_entries and self != (None, None, None, False):
            raise CommandError("--user, --code, --reason and --dry-run are for --all", _BAD_INPUT)
        if self.reason is not None and self.reason not in set(Reason):
            raise CommandError(f"--reason should be one of {', '.join(Reason)}", _BAD_INPUT)

    @property
    def member(self) -> Reason | None:
        return None if self.reason is None else Reason(self.reason)


# -- draining -------------------------------------------------------------------------------------


def _retry_in_environment() -> Callable[[Profile], RetryPolicy] | None:
    """Return the retry policies with shorter delays, if the environment sets them."""
    first = span_in(os.environ, "ONCEWARD_OUTBOX_RETRY_SECONDS")
    if first is None:
        return None
    seconds = first.total_seconds()

    def sooner(profile: Profile) -> RetryPolicy:
        """Shorten the delays, not the number of attempts."""
        return replace(
            profile.retry, first_seconds=seconds, ceiling_seconds=seconds * _MAX_WAIT_RATIO
        )

    return sooner


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


# -- values of options ---------------------------------------------------------------------------


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


def _decoded(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"the payload is not JSON: {error}", _BAD_INPUT) from error


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    for line in given:
        name, colon, value = line.partition(":")
        if not colon:
            raise UsageError("a --header should look like 'If-Match: \"7\"'")
        headers[name.strip()] = value.strip()
    return headers


# -- headers whose values a command prints, such as an attestation ---------------------------------


def parse_header_command(given: str) -> tuple[str, str]:
    """Return the name and the command in ``NAME: COMMAND``."""
    name, colon, command = given.partition(":")
    name, command = name.strip(), command.strip()
    if not colon or not _HEADER_NAME.fullmatch(name) or not command:
        raise CommandError("a --header-command should look like 'X-Proof: ./proof --fresh'", 2)
    if name.lower() in _RESERVED_HEADERS:
        raise CommandError(f"--header-command cannot set {name}", _BAD_INPUT)
    return name, command


class HeaderCommands:
    """Runs commands for the values of headers. Safe for use by several threads.

    A command runs without a shell, at the first send, and again for an entry that the server has
    refused with 401: the value may be valid for some minutes only. Its output is never shown.
    """

    def __init__(
        self, commands: Iterable[tuple[str, str]], *, max_seconds: float = _MAX_COMMAND_SECONDS
    ) -> None:
        """Raise ``CommandError`` for a command that cannot be parsed."""
        self._commands = {name: _split(name, command) for name, command in commands}
        self._max_seconds = max_seconds
        self._values: dict[str, str] | None = None
        # The attempt of each entry for which the values were made.
        self._made_for: dict[str, int] = {}
        self._lock = Lock()

    def __call__(self, entry: Entry) -> Mapping[str, str]:
        """Return the headers for a send of this entry."""
        with self._lock:
            was_refused = entry.last_error_code == _UNAUTHORIZED and (
                self._made_for.get(entry.id) != entry.claim_number
            )
            if self._values is None or was_refused:
                self._values = {
                    name: self._output_of(name, words) for name, words in self._commands.items()
                }
                self._made_for[entry.id] = entry.claim_number
            return self._values

    def _output_of(self, name: str, words: list[str]) -> str:
        try:
            done = subprocess.run(  # noqa: S603 - the user's own command
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=self._max_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CommandError(
                f"the command for {name} has not ended after {self._max_seconds:g} s"
            ) from None
        except OSError as error:
            raise CommandError(
                f"the command for {name} cannot be run: {words[0]}: {error.strerror}"
            ) from None
        if done.returncode != 0:
            raise CommandError(f"the command for {name} ended with {done.returncode}")
        value = done.stdout.decode("ascii", "replace").strip()
        if not _HEADER_VALUE.fullmatch(value):
            # Not shown: it was meant to be a secret.
            raise CommandError(f"the command for {name} should print one line of ASCII text")
        return value


def _split(name: str, command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CommandError(f"the command for {name} cannot be parsed: {error}", 2) from None
    if not words:
        raise CommandError(f"the command for {name} is empty", _BAD_INPUT)
    return words
