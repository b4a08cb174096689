"""The command ``onceward`` itself, and the commands of the protocol: ``canonical`` and ``hash``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from onceward_protocol.cli.app import CommandApp
from onceward_protocol.cli.gc import resume_gc
from onceward_protocol.cli.output import CommandError
from onceward_protocol.errors import BodyInvalidError
from onceward_protocol.fingerprint import canonical_json

__all__ = ["create_app"]

# These two do most of their imports after the command line is parsed, and resume the garbage
# collector themselves when they are ready.
_RESUME_GC_THEMSELVES: Final = frozenset({"serve", "worker"})

JsonFile = Annotated[
    Path | None, typer.Argument(help="A file that contains JSON; standard input if absent or -.")
]
Volatile = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD",
        help="Leave out this top-level field, such as a send time. May be repeated.",
    ),
]


def create_app() -> CommandApp:
    """Return a new ``onceward`` with the protocol's commands, without those of other packages."""
    app = CommandApp(
        name="onceward",
        help="Exactly-once effects for apps that work offline.",
        epilog="Every command has examples: onceward hash --help",
        invoke_without_command=True,
        add_completion=True,
    )
    app.callback()(root)
    app.command()(canonical)
    app.command("hash")(hash_)
    return app


def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Exactly-once effects for apps that work offline."""
    if context.invoked_subcommand not in _RESUME_GC_THEMSELVES:
        resume_gc()
    if version:
        from importlib.metadata import version as version_of

        print(f"onceward {version_of('onceward-protocol')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def canonical(file: JsonFile = None, volatile: Volatile = None) -> None:
    """Write the canonical form of JSON (RFC 8785): the bytes that the server hashes.

    Exits with 2 and one line on stderr if the input is not valid JSON.

    Examples:
        onceward canonical order.json

        echo '{"b": 1.0, "a": 2}' | onceward canonical

    """
    sys.stdout.buffer.write(canonical_of(file, volatile or []))
    if sys.stdout.isatty():
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


def hash_(file: JsonFile = None, volatile: Volatile = None) -> None:
    """Write the SHA-256 of the canonical form of JSON, in hex.

    Two requests with the same hash have the same body for the server. Exits with 2 and one line
    on stderr if the input is not valid JSON.

    Examples:
        onceward hash order.json

        onceward hash --volatile clientSubmittedAt < order.json

    """
    from hashlib import sha256

    print(sha256(canonical_of(file, volatile or [])).hexdigest())


def canonical_of(file: Path | None, volatile: Sequence[str]) -> bytes:
    """Return the canonical form of the JSON in ``file`` (None or ``-``: stdin).

    Raises ``CommandError`` with exit code 2 if it cannot be read or is not valid JSON.
    """
    name = "standard input" if file is None or str(file) == "-" else str(file)
    try:
        raw = sys.stdin.buffer.read() if name == "standard input" else Path(name).read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror}", 2) from error
    try:
        return canonical_json(raw, volatile=frozenset(volatile))
    except BodyInvalidError as error:
        raise CommandError(f"{name}: {error}", 2) from error
