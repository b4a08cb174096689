"""What a person who stops or looks at a server does not want to see."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

from packages.services.tests.cli.conftest import Cli, Server

Serve = Callable[..., Server]


def test_workers_end_without_a_word_and_without_an_abort(serve: Serve) -> None:
    server = serve("--workers", "2")
    assert server.stop() == 0
    assert "Fatal" not in server.stderr()


def test_looking_at_another_programs_database_changes_nothing(cli: Cli, tmp_path: Path) -> None:
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
