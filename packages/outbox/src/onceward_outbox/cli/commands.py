"""The commands and options of ``onceward outbox``. The work is in ``work.py``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from onceward_protocol.cli.output import CommandError

__all__ = ["outbox_app", "register"]

outbox_app = typer.Typer(
    help="Inspect and drain the outbox of a device.",
    no_args_is_help=False,
    rich_markup_mode="markdown",
)

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
_JSON_OR_FILE = "JSON, @FILE, or - for standard input."


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

    For example:

        onceward outbox --db outbox.db ls
    """
    from onceward_outbox.cli.work import Place

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
    context.obj = Place(db, passphrase_env, allow_weak_passphrase, profiles)


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
            help="A name for the action: nothing is queued while the user has an unsettled entry "
            "with it."
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The idempotency key.", show_default="a new one")
    ] = None,
    profile: Annotated[str, typer.Option(help="Name of the profile of the API.")] = "default",
    json: Json = False,
) -> None:
    """Queue one mutation. Creates the file and the user if they do not exist.

    For example:

        onceward outbox --db outbox.db add --user ada --op create --entity note
        --endpoint /notes --payload '{"text": "Call back"}'
    """
    from onceward_outbox.cli.work import add

    add(
        context.obj,
        user=user,
        operation=op,
        entity=entity,
        endpoint=endpoint,
        payload=payload,
        headers=header or [],
        as_json=json,
        local_id=local_id,
        depends_on=tuple(depends_on or ()),
        priority=priority,
        conflict_resolution=conflict,
        base_version=base_version,
        base=base,
        once=once,
        key=key,
        profile=profile,
    )


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

    For example:

        onceward outbox --db outbox.db ls --status failed
    """
    from onceward_outbox.cli.work import list_entries

    list_entries(context.obj, user=user, status=status, entity=entity, limit=limit, as_json=json)


@outbox_app.command("show")
def outbox_show(context: typer.Context, entry_id: EntryId, json: Json = False) -> None:
    """Show one entry: its request, its dependencies, and every attempt.

    For example:

        onceward outbox --db outbox.db show 019a8a51-7c1e-7b1f-a1de-2f6c3c1f3a10
    """
    from onceward_outbox.cli.work import show

    show(context.obj, entry_id, as_json=json)


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

    For example:

        onceward outbox --db outbox.db drain --user ada --server http://127.0.0.1:8000
        --token "$(onceward token --sub ada)"
    """
    from onceward_outbox.cli.work import drain_user

    drain_user(
        context.obj,
        user=user,
        server=server,
        token=token,
        max_seconds=max_seconds,
        app_check_command=app_check_command,
        header_commands=header_command or [],
        allow_http=allow_http,
        as_json=json,
    )


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
    """Send a failed entry again, with the same key; its parked dependents are revived.

    For example, after the server has been corrected:

        onceward outbox --db outbox.db retry --all --user ada --code SOLD_OUT --dry-run
    """
    from onceward_outbox.cli.work import Selection, retry

    selection = Selection(
        entry_id=entry_id,
        all_entries=all_entries,
        user=user,
        code=code,
        reason=reason,
        dry_run=dry_run,
    )
    retry(context.obj, selection, as_json=json)


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
    from onceward_outbox.cli.work import Selection, discard

    selection = Selection(
        entry_id=entry_id,
        all_entries=all_entries,
        user=user,
        code=code,
        reason=reason,
        dry_run=dry_run,
    )
    discard(context.obj, selection, with_dependents=with_dependents, force=force, as_json=json)


@outbox_app.command("resolve")
def outbox_resolve(
    context: typer.Context,
    entry_id: EntryId,
    strategy: Annotated[
        str | None,
        typer.Option(help="mine (or client_wins), theirs (or server_wins), merged or give_up."),
    ] = None,
    payload: Annotated[str | None, typer.Option(help=f"With merged: {_JSON_OR_FILE}")] = None,
    json: Json = False,
) -> None:
    """Resolve a conflict. Without --strategy, show base, mine and theirs side by side.

    For example:

        onceward outbox --db outbox.db resolve 019a8a51-7c1e-7b1f-a1de-2f6c3c1f3a10
        --strategy mine
    """
    from onceward_outbox.cli.work import resolve

    resolve(context.obj, entry_id, strategy=strategy, payload=payload, as_json=json)


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
    from onceward_outbox.cli.work import edit

    edit(
        context.obj,
        entry_id,
        payload=payload,
        endpoint=endpoint,
        headers=header or [],
        force=force,
        as_json=json,
    )


@outbox_app.command("stats")
def outbox_stats(
    context: typer.Context,
    user: Annotated[str | None, typer.Option(help="Only entries of this user.")] = None,
    json: Json = False,
) -> None:
    """Count entries."""
    from onceward_outbox.cli.work import stats

    stats(context.obj, user=user, as_json=json)


@outbox_app.command("prune")
def outbox_prune(
    context: typer.Context,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.")] = None,
    json: Json = False,
) -> None:
    """Remove entries that succeeded 7 days ago or were otherwise settled 30 days ago.

    Failed entries and conflicts are removed after 90 days, a week after an announcement.
    """
    from onceward_outbox.cli.work import prune

    prune(context.obj, limit=limit, as_json=json)


@outbox_app.command("watchdog")
def outbox_watchdog(context: typer.Context, json: Json = False) -> None:
    """Return entries to the queue that an ended process had claimed, after two minutes."""
    from onceward_outbox.cli.work import watchdog

    watchdog(context.obj, as_json=json)
