"""Commands that other installed packages add to ``onceward``, found through entry points.

A package adds commands with an entry point in its ``pyproject.toml``::

    [project.entry-points."onceward.commands"]
    my-package = "my_package.cli:register"

``register`` gets the ``typer.Typer`` of ``onceward`` and adds its commands to it. It is called for
``onceward --help`` and for every command that the library does not have itself, so commands should
import what they need when they run.

The same module may have three more functions:

- ``default_worker``, of a package with jobs: what ``onceward worker`` runs without ``--app``;
- ``tenant_tables()``, of a package with migrations: a ``TenantTable`` for each table with rows of
  tenants, in a mapping from the namespace of the migrations that create them. ``onceward tenant``
  exports and erases them in databases that have these migrations;
- ``retention()``: a mapping of the same kind to ``Retention`` rules, for ``onceward sweep``.

This module works without typer: ``onceward serve`` names the package to install even where only
the library itself is installed.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from onceward_protocol.cli.output import CommandError, print_warning

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    import typer

__all__ = [
    "GROUP",
    "PACKAGE_OF_COMMAND",
    "RENAMED_COMMANDS",
    "add_plugins",
    "declared_by_packages",
    "default_worker",
    "error_without_typer",
    "install_argument",
]

GROUP: Final = "onceward.commands"

PACKAGE_OF_COMMAND: Final = {
    command: package
    for package, commands in {
        "onceward": ("jobs", "keys", "migrate", "sweep", "worker"),
        "onceward-outbox": ("outbox",),
        "onceward-operator": (
            "audit",
            "backup",
            "move",
            "restore",
            "restored",
            "tenant",
            "top",
            "trace",
        ),
        "onceward-services": ("serve", "token"),
        "onceward-lab": ("attack", "bench", "chaos", "conform", "demo", "simulate"),
    }.items()
    for command in commands
}
"""Commands of the project's other packages, to load only the package that is needed,
and to name it where it is not installed."""

RENAMED_COMMANDS: Final = {"torture": "simulate", "siege": "chaos"}
"""Commands of versions before 0.1, with their present names."""

# Extras of packages that are installed already: pip adds only what is missing.
_REQUIREMENT_OF_MODULE: Final = {
    "asyncpg": '"onceward[postgres]"',
    "django": '"onceward[django]"',
    "flask": '"onceward[flask]"',
    "httpx": '"onceward[client]"',
    "jwt": '"onceward[jwt]"',
    "limits": '"onceward[limits]"',
    "opentelemetry": '"onceward[otel]"',
    "psycopg": '"onceward[psycopg]"',
    "prometheus_client": '"onceward[metrics]"',
    "redis": '"onceward[redis]"',
    "rich": '"onceward-protocol[cli]"',
    "sqlalchemy": '"onceward[sqlalchemy]"',
}

_USAGE: Final = 2


def add_plugins(app: "typer.Typer", arguments: Sequence[str]) -> None:
    """Add the commands of installed packages to ``app``, as far as a command line needs them.

    A command of this project loads its own package only; ``--help`` and all other commands load
    every package. A package whose commands cannot be loaded costs one warning on stderr; all other
    commands work. Raises ``CommandError`` for a command in ``PACKAGE_OF_COMMAND`` that no package
    added.
    """
    wanted = _command(arguments)
    if wanted in _names(app):
        return
    only = PACKAGE_OF_COMMAND.get(wanted)
    failed = set()
    for entry_point in _installed():
        package = entry_point.dist.name if entry_point.dist else entry_point.module
        if only not in (None, package):
            continue
        try:
            entry_point.load()(app)
        except Exception as error:  # noqa: BLE001 - a broken package must not break the others
            failed.add(package)
            print_warning(f"cannot load the commands of {package}: {type(error).__name__}: {error}")
    missing = None if wanted in _names(app) else _missing(wanted, is_broken=only in failed)
    if missing is not None:
        raise missing


def default_worker() -> Callable[..., int] | None:
    """Return the default ``onceward worker`` without ``--app``, if an installed package has it."""
    from importlib import import_module

    for entry_point in _installed():
        module: Any = import_module(entry_point.module)
        found: Callable[..., int] | None = getattr(module, "default_worker", None)
        if found is not None:
            return found
    return None


def declared_by_packages(function: str) -> dict[str, list[Any]]:
    """Return the declarations of installed packages for the namespaces of their migrations.

    ``function`` is ``tenant_tables`` or ``retention``.
    """
    from importlib import import_module

    found: dict[str, list[Any]] = {}
    for entry_point in _installed():
        declared = getattr(import_module(entry_point.module), function, None)
        for namespace, declarations in (declared() if declared is not None else {}).items():
            found.setdefault(namespace, []).extend(declarations)
    return found


def error_without_typer(arguments: Sequence[str]) -> CommandError:
    """Return the error for a command line that cannot be parsed because typer or rich is missing.

    ``arguments`` are those of the command line, without the program's name.
    """
    name = _command(arguments)
    installed = {point.dist.name for point in _installed() if point.dist}
    missing = None if PACKAGE_OF_COMMAND.get(name) in installed else _missing(name)
    return missing or CommandError(
        'the command line needs typer and rich: pip install "onceward-protocol[cli]"', _USAGE
    )


def install_argument(module: str) -> str:
    """Return the argument of ``pip install``, in shell quotes, that installs a missing module.

    A module that no extra brings is named itself: a package of ours requires it, so it was removed.
    """
    name = module.partition(".")[0]
    return _REQUIREMENT_OF_MODULE.get(name, name)


def _installed() -> "EntryPoints":
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def _command(arguments: Sequence[str]) -> str:
    """Return the first argument that is not an option; the options of ``onceward`` are flags."""
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def _missing(name: str, *, is_broken: bool = False) -> CommandError | None:
    """Return the error for a command that another package has, or that was renamed."""
    package = PACKAGE_OF_COMMAND.get(name)
    if name in RENAMED_COMMANDS:
        line = f"onceward {name} is now named onceward {RENAMED_COMMANDS[name]}"
    elif package is None:
        return None
    elif is_broken:
        line = f"onceward {name} is part of {package}, which cannot be loaded (see the warning)"
    else:
        line = f"onceward {name} is part of the package {package}, which is not installed"
    return CommandError(line, _USAGE)


def _names(app: "typer.Typer") -> set[str | None]:
    commands = {
        command.name or command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
        if command.callback
    }
    return commands | {group.name for group in app.registered_groups}
