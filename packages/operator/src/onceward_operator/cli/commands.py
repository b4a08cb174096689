"""The commands of operators: each is in a module of its name, imported when it is used."""

from typing import Final

import typer

from onceward.cli.commands import add_commands

__all__ = ["register"]

_COMMANDS: Final = {
    "top": "Show what the servers and workers do now: outcomes of requests, queues, what is late.",
    "trace": "Show one action from the tap to its effects: requests, record, audit events, jobs.",
    "tenant": "Export or erase everything that is stored of one tenant.",
    "audit": "Verify, export or seal the audit events.",
    "backup:backup": "Write a consistent copy of an SQLite database to a file, while the server "
    "runs.",
    "backup:restore": "Make a database from a backup, after checking it. Stop the server and its "
    "workers first.",
    "backup:restored": "Say that a database was restored: no response of before is replayed from "
    "memory or Redis.",
    "move": "Move a database from SQLite to PostgreSQL, and verify every table by count and hash.",
}


def register(app: typer.Typer) -> None:
    """Add the commands of operators to ``onceward``."""
    add_commands(app, "onceward_operator.cli", _COMMANDS)
