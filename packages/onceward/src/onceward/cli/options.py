"""Options and output that several commands share, and the database or app they work on."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from datetime import datetime
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, cast

import typer

from onceward.tenants import ALL_TENANTS, TenantFilter
from onceward_protocol.cli.app import CommandApp
from onceward_protocol.cli.output import (
    CommandError,
    printable,
    redact_password,
    shown_instant,
)

if TYPE_CHECKING:
    from onceward import Onceward


CommandT = TypeVar("CommandT", bound=Callable[..., None])

DEFAULT_DATABASE: Final = "sqlite:///onceward.db"
USAGE: Final = 2
"""The exit code for bad usage."""

Database = Annotated[
    str,
    typer.Option(
        "--database",
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

_COMMAND_LINE: Final = "COMMANDLINE"


@dataclass(frozen=True, slots=True)
class AppTarget:
    """The store of an app, ``MODULE:NAME``: its database and the names of its tables."""

    name: str

    def load(self) -> "Onceward":
        """Import the app. Raises ``CommandError``."""
        from onceward.cli.app_loader import load_onceward

        return load_onceward(self.name)


Target = str | AppTarget
"""The URL of a database, or an app."""


def new_app() -> typer.Typer:
    """Return an app for one command or a group, as ``onceward`` has them."""
    return CommandApp()


def new_group(name: str) -> typer.Typer:
    """Return an app for a group that refuses to run without one of its commands."""
    group = new_app()

    @group.callback(invoke_without_command=True)
    def require_command(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            *others, last = context.command.list_commands(context)  # type: ignore[attr-defined]
            raise CommandError(
                f"onceward {name} needs a command: {', '.join(others)} or {last} "
                f"(try: onceward {name} --help)",
                USAGE,
            )

    return group


def command(app: typer.Typer, name: str) -> Callable[[CommandT], CommandT]:
    """Add the decorated function to ``app`` as a command.

    A parameter of type ``Target`` is what ``--database`` and ``--app`` choose. One whose type is a
    dataclass has an option for each field. All others are options and arguments of typer.
    """

    def add(function: CommandT) -> CommandT:
        parameters = signature(function).parameters.values()

        def run(**given: Any) -> None:
            function(**{one.name: _value(one, given) for one in parameters})

        options = [
            option.replace(kind=Parameter.KEYWORD_ONLY)
            for one in parameters
            for option in _options(one)
        ]
        typed: Any = run
        typed.__signature__ = Signature(options)
        typed.__annotations__ = {option.name: option.annotation for option in options}
        app.command(name, help=function.__doc__)(run)
        return function

    return add


def _maker(parameter: Parameter) -> Callable[..., Any] | None:
    """Return the maker of a parameter value from several options; None if it is one."""
    if parameter.annotation == Target:
        return choose_target
    found = parameter.annotation
    return cast("Callable[..., Any]", found) if is_dataclass(found) else None


def _options(parameter: Parameter) -> list[Parameter]:
    maker = _maker(parameter)
    return [parameter] if maker is None else list(signature(maker).parameters.values())


def _value(parameter: Parameter, given: Mapping[str, Any]) -> Any:
    maker = _maker(parameter)
    if maker is None:
        return given[parameter.name]
    return maker(**{option.name: given[option.name] for option in _options(parameter)})


def choose_target(
    context: typer.Context, *, app: App = None, database: Database = DEFAULT_DATABASE
) -> Target:
    """Return the app or the URL. The command line precedes the environment; the app the URL.

    Raises ``CommandError`` if both are on the command line.
    """
    has_app = app is not None and _is_on_command_line(context, "app")
    has_database = _is_on_command_line(context, "database")
    if has_app and has_database:
        raise CommandError("give --app or --database, not both: an app has its database", USAGE)
    if app is not None and not has_database:
        return AppTarget(app)
    return database


def describe_target(target: Target) -> str:
    """Return the app's name, or the URL without its password."""
    return target.name if isinstance(target, AppTarget) else redact_password(target)


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == _COMMAND_LINE


def tenant_or_all(given: str | None) -> TenantFilter:
    """Return ``--tenant``; all tenants without it. Raises ``CommandError`` if it is empty."""
    return ALL_TENANTS if given is None else check_tenant(given)


def check_tenant(given: str) -> str:
    """Return a tenant. An empty one, as of an unset shell variable, is a ``CommandError``."""
    if not given.strip():
        raise CommandError(
            "--tenant is empty: name a tenant, or leave it out for all tenants", USAGE
        )
    return given


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print a name and a value per line; None as a dash, on a terminal instants with their age."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        text = "-" if value is None else printable(str(value))
        if name.endswith("_at") and value is not None and sys.stdout.isatty():
            text += f" ({shown_instant(datetime.fromisoformat(text))})"
        print(f"{name:<{width}}  {text}")
