"""The commands that prove: `torture`, `processes`, `demo`, `conform`, `bench`. Each in a file."""

from typing import Annotated

import typer

__all__ = ["add_proof"]


def add_proof(app: typer.Typer) -> None:
    """Hang the commands on the command line."""
    app.command()(demo)
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )(bench)


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


def bench(context: typer.Context) -> None:
    """Measure every speed line against its bare alternative and its peers, interleaved.

    Runs in a checkout, with the extra `bench` installed. `holdfast bench --help` lists the parts.

    For example:

        holdfast bench --only jobs walk
    """
    from holdfast.cli.bench import run_bench

    raise typer.Exit(run_bench(context.args))
