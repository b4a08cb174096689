"""Which database a command works on: that of a URL, or that of an app."""

from dataclasses import dataclass
from typing import Final, Protocol

from onceward_protocol.cli.output import CommandError, redact_password

__all__ = ["AppTarget", "Target", "choose_target", "describe_target"]

_USAGE: Final = 2
_COMMAND_LINE: Final = "COMMANDLINE"


@dataclass(frozen=True, slots=True)
class AppTarget:
    """The store of an app, ``MODULE:NAME``: its database and the names of its tables."""

    name: str


Target = str | AppTarget
"""The URL of a database, or an app."""


class _Source(Protocol):
    @property
    def name(self) -> str: ...


class _Context(Protocol):
    """The part of ``typer.Context`` that says where an option comes from."""

    def get_parameter_source(self, name: str) -> _Source | None: ...


def choose_target(context: _Context, *, app: str | None, database: str) -> Target:
    """Return the app or the URL. The command line precedes the environment; the app the URL.

    Raises ``CommandError`` if both are on the command line.
    """
    has_app = app is not None and _is_on_command_line(context, "app")
    has_database = _is_on_command_line(context, "database")
    if has_app and has_database:
        raise CommandError("give --app or --database, not both: an app has its database", _USAGE)
    if app is not None and not has_database:
        return AppTarget(app)
    return database


def describe_target(target: Target) -> str:
    """Return the app's name, or the URL without its password."""
    return target.name if isinstance(target, AppTarget) else redact_password(target)


def _is_on_command_line(context: _Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == _COMMAND_LINE
