"""No noise in the output of a server that stops."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

from packages.services.tests.cli.conftest import Cli, Server

Serve = Callable[..., Server]


def test_workers_exit_without_output_and_without_abort(serve: Serve) -> None:
    server = serve("--workers", "2")
    assert server.stop() == 0
    assert "Fatal" not in server.stderr()


def test_reading_a_database_of_another_program_changes_nothing(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (a)")
    db.close()
    for command in (("keys", "ls"), ("sweep",)):
        done = cli(*command, "--database", f"sqlite:///{path}")
        assert done.returncode == 1
        assert b"holdfast migrate" in done.stderr
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]
    db.close()
