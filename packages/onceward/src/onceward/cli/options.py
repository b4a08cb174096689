"""Options that several commands have: which database, app and tenant a command works on."""

from dataclasses import dataclass
from typing import Annotated, Final, Protocol

import typer

from onceward.tenants import ALL_TENANTS, TenantFilter
from onceward_protocol.cli.output import CommandError, redact_password

__all__ = [
    "DEFAULT_DATABASE",
    "App",
    "AppTarget",
    "Database",
    "Environment",
    "Json",
    "Limit",
    "RedisUrl",
    "Target",
    "Tenant",
    "check_tenant",
    "choose_target",
    "describe_target",
    "tenant_or_all",
]

DEFAULT_DATABASE: Final = "sqlite:///onceward.db"

Database = Annotated[
    str,
    typer.Option(
        envvar="ONCEWARD_DATABASE_URL",
        metavar="URL",
        help="The server's database: sqlite:///file.db or postgresql://user@host/name.",
    ),
]
App = Annotated[
    str | None,
    typer.Option(
        "--app",
        envvar="ONCEWARD_APP",
        metavar="MODULE:NAME",
        help="Your app, such as shop.main:onceward: its database and tables instead of --database.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of text.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis",
        envvar="ONCEWARD_REDIS_URL",
        metavar="URL",
        help="The Redis server that caches records.",
    ),
]
Environment = Annotated[
    str,
    typer.Option(
        "--environment",
        envvar="ONCEWARD_ENVIRONMENT",
        help="The environment in the names of Redis keys.",
    ),
]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant. Default: all tenants.")]
Limit = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="The largest number of rows to show.")
]

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


def tenant_or_all(given: str | None) -> TenantFilter:
    """Return ``--tenant``; all tenants without it. Raises ``CommandError`` if it is empty."""
    return ALL_TENANTS if given is None else check_tenant(given)


def check_tenant(given: str) -> str:
    """Return a tenant. An empty one, as of an unset shell variable, is a ``CommandError``."""
    if not given.strip():
        raise CommandError("--tenant is empty: name a tenant, or leave it out for all tenants", 2)
    return given
