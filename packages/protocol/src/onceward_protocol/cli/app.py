"""``CommandApp``: a ``typer.Typer`` whose help shows no types, and whose commands have examples."""

import re
from collections.abc import Callable
from inspect import cleandoc
from textwrap import dedent
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["PANELS", "CommandApp"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

PANELS: Final = {
    command: panel
    for panel, commands in {
        "Run": ("serve", "worker", "migrate", "token"),
        "Look": ("top", "trace", "keys", "canonical", "hash"),
        "Repair": ("jobs", "outbox", "sweep"),
        "Data": ("tenant", "audit", "backup", "restore", "restored", "move"),
        "Prove": ("demo", "simulate", "chaos", "conform", "attack", "bench"),
    }.items()
    for command in commands
}
"""The panel of each command in ``onceward --help``, in the order of the help."""

_EXAMPLES: Final = re.compile(r"^(Examples?:)\n+((?:    .*\n?|\n)+)", re.MULTILINE)


class _Help:
    """Shows the names of values in place of their types: ``--port PORT``, and nothing for flags."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.help: str | None = _EXAMPLES.sub(_as_code, cleandoc(options.get("help") or ""))

    def get_params(self, context: Any) -> list[Any]:
        found: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in found:
            # The range of a number: an error message names it.
            parameter.min = parameter.max = None
            if parameter.metavar is None:
                parameter.metavar = _value_name(parameter)
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = _no_type
        return found


class Command(_Help, TyperCommand):
    """A command."""


class Group(_Help, TyperGroup):
    """A group of commands; the commands of ``onceward`` itself are in panels."""

    def list_commands(self, context: Any) -> list[str]:
        order = list(PANELS)
        names = super().list_commands(context)
        if context.parent is None:
            names.sort(key=lambda name: order.index(name) if name in order else len(order))
        return names

    def get_command(self, context: Any, name: str) -> Any:
        found: Any = super().get_command(context, name)
        if found is not None and context.parent is None:
            found.rich_help_panel = PANELS.get(name)
        return found


class CommandApp(typer.Typer):
    """A group of commands, or one command, as ``onceward`` has them."""

    def __init__(self, **options: Any) -> None:
        given = {"add_completion": False, "pretty_exceptions_enable": False} | options
        super().__init__(cls=Group, rich_markup_mode="markdown", **given)

    def command(
        self, name: str | None = None, *, cls: Any = Command, **options: Any
    ) -> Callable[[CommandT], CommandT]:
        """Return the decorator that adds a function as a command."""
        return super().command(name, cls=cls, **options)


def _as_code(examples: re.Match[str]) -> str:
    """Return examples as a block of code: Markdown would make them one paragraph."""
    return f"{examples[1]}\n\n```\n{dedent(examples[2]).strip()}\n```\n"


def _value_name(parameter: Any) -> str:
    is_flag = getattr(parameter, "is_flag", False)
    return "" if is_flag else max(parameter.opts, key=len).lstrip("-").upper()


def _no_type(ctx: Any) -> None:
    """Replace the type beside the name of an argument."""
