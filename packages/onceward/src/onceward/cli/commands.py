"""The commands of the library: each is in a module of its name, imported when it is used."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperCommand

COMMANDS: Final = {
    "migrate": "Create or update Onceward's tables in a database.",
    "sweep": "Delete expired records and old rows, in small batches.",
    "worker": "Run jobs: those of your app, or those of the installed services.",
    "keys": "List, show and remove idempotency records: a key, its request and the stored "
    "response.",
    "jobs": "List, show and cancel jobs, requeue dead letters, pause queues.",
}
"""Commands and groups of commands, with their lines in ``onceward --help``."""


def register(app: typer.Typer) -> None:
    """Add the commands of the server library to ``onceward``."""
    add_commands(app, "onceward.cli", COMMANDS)


def add_commands(app: typer.Typer, package: str, commands: Mapping[str, str]) -> None:
    """Add commands and groups, by name with their lines in the help, to ``onceward``.

    Each is in the module of ``package`` that has its name, or the name before the colon in
    ``MODULE:NAME``; the module is imported when the command is used.
    """
    for place, text in commands.items():
        module, _, name = place.partition(":")
        made = _lazy(f"{package}.{module}", name or module, text)
        app.command(name or module, cls=made, help=text)(_not_loaded)


def _not_loaded() -> None:
    """Hold the place of a function that is not imported yet."""


def _lazy(module: str, name: str, text: str) -> type[TyperCommand]:
    @cache
    def load() -> Any:
        found: Any = typer.main.get_command(import_module(module).app)
        found = getattr(found, "commands", {}).get(name, found)
        found.help = found.help or text
        return found

    class Lazy(TyperCommand):
        """A command or group. What the list of commands does not show comes from the module."""

        params = property(lambda _: load().params, lambda _, _none: None)
        # Only a group has it.
        commands = property(lambda _: load().commands)

        def make_context(self, *arguments: Any, **options: Any) -> Any:
            return load().make_context(*arguments, **options)

    return Lazy
