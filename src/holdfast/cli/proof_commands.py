"""The commands that prove: `torture`, `processes`, `demo`, `conform`, `bench`. Each in a file."""

from typing import Annotated

import typer

__all__ = ["add_proof"]


def add_proof(app: typer.Typer) -> None:
    """Hang the commands on the command line."""
    app.command()(demo)


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Which answers get lost.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Write the verdict as JSON.")] = False,
) -> None:
    """See it work: 40 taps without a network, a third of all answers lost, two kills.

    Starts a server and a device of its own in a temporary directory and removes both. Ends with
    exit code 1 if a tap happened twice, or not at all.

    For example:

        holdfast demo
    """
    from holdfast.cli.demo import show_demo

    raise typer.Exit(show_demo(as_json=json, seed=seed))
