"""The commands that prove: `torture`, `processes`, `demo`, `conform`, `bench`. Each in a file."""

import typer

__all__ = ["add_proof"]


def add_proof(app: typer.Typer) -> None:
    """Hang the commands on the command line."""
