"""Commands that other installed packages add to ``holdfast``, found through entry points."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final

import typer

from holdfast.cli.output import Failure

__all__ = ["PACKAGE_OF_COMMAND", "add_plugins", "missing_package"]

GROUP: Final = "holdfast.commands"
"""An entry point of this group is a function that takes the ``typer.Typer`` and adds commands."""

PACKAGE_OF_COMMAND: Final = {
    "serve": "holdfast-services",
    "token": "holdfast-services",
    "worker": "holdfast-services",
    "bench": "holdfast-lab",
    "chaos": "holdfast-lab",
    "conform": "holdfast-lab",
    "demo": "holdfast-lab",
    "simulate": "holdfast-lab",
}
"""Commands of the project's other packages, for a helpful message where one is not installed."""


def add_plugins(app: typer.Typer) -> None:
    """Add the commands of installed packages, and a hint for each one that is not installed."""
    for entry_point in entry_points(group=GROUP):
        entry_point.load()(app)
    present = {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback
    }
    for name, package in PACKAGE_OF_COMMAND.items():
        if name not in present:
            app.command(
                name,
                hidden=True,
                add_help_option=False,
                context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            )(_not_installed(name, package))


def missing_package(name: str, package: str) -> Failure:
    """Return the error for a command whose package is not installed."""
    return Failure(f"holdfast {name} is part of another package: pip install {package}", 2)


def _not_installed(name: str, package: str) -> Callable[[], Any]:
    def command() -> None:
        raise missing_package(name, package)

    return command
