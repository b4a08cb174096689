"""``onceward outbox`` with ``--all`` and ``--once``, in this process."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onceward_outbox import OutboxQueue, Reason
from onceward_outbox.cli.commands import outbox_app
from onceward_protocol.cli.output import CommandError
from packages.outbox.tests.outcomes import fail
from packages.outbox.tests.queue_harness import new


@pytest.fixture
def db(quick_path: Path) -> Path:
    """A queue with failed entries: two sold out, one gone."""
    path = quick_path / "outbox.db"
    with OutboxQueue.open(path) as queue:
        queue.add_user("ada")
        for code in ("SOLD_OUT", "SOLD_OUT", "GONE"):
            queue.enqueue(new())
            claimed = queue.claim("ada")
            assert claimed is not None
            fail(queue, claimed, reason=Reason.RESPONSE, http_status=422, code=code)
    return path


def run(db: Path, *arguments: str) -> str:
    done = CliRunner().invoke(outbox_app, ["--db", str(db), *arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def statuses(db: Path) -> list[str]:
    return [entry["status"] for entry in json.loads(run(db, "ls", "--json"))]


def test_retry_all_counts_first_and_then_retries(db: Path) -> None:
    wanted = ("--all", "--user", "ada", "--code", "SOLD_OUT", "--reason", "answer")
    assert run(db, "retry", *wanted, "--dry-run") == "2 entries would be retried\n"
    assert statuses(db) == ["failed"] * 3
    done: Any = json.loads(run(db, "retry", *wanted, "--json"))
    assert (done["count"], done["dry_run"], len(done["ids"])) == (2, False, 2)
    assert statuses(db) == ["pending", "pending", "failed"]
    assert run(db, "retry", "--all", "--user", "ada") == "1 entry retried\n"


def test_discard_all_discards_what_matches(db: Path) -> None:
    wanted = ("discard", "--all", "--user", "ada", "--code", "GONE")
    assert run(db, *wanted, "--dry-run") == "1 entry would be discarded\n"
    assert run(db, *wanted) == "1 entry discarded\n"
    assert statuses(db) == ["failed", "failed", "discarded"]


@pytest.mark.parametrize("command", ["retry", "discard"])
@pytest.mark.parametrize(
    ("arguments", "message", "exit_code"),
    [
        ((), "name one entry by its id, or use --all with --user", 2),
        (("0190", "--all", "--user", "ada"), "name one entry by its id", 2),
        (("--all",), "--all needs --user", 2),
        (("0190", "--code", "GONE"), "are for --all", 2),
        (("0190", "--dry-run"), "are for --all", 2),
        (("--all", "--user", "ada", "--reason", "bored"), "--reason should be one of", 2),
        (("--all", "--user", "bo"), "has no user bo", 1),
    ],
)
def test_contradicting_arguments_are_refused(
    db: Path, command: str, arguments: tuple[str, ...], message: str, exit_code: int
) -> None:
    with pytest.raises(CommandError, match=message) as refused:
        run(db, command, *arguments)
    assert refused.value.code == exit_code
    assert statuses(db) == ["failed"] * 3


def test_add_with_once_queues_one_entry(db: Path) -> None:
    new_entry = ("--user", "ada", "--op", "create", "--entity", "quest", "--endpoint", "/quests")
    first, second = (
        json.loads(run(db, "add", *new_entry, "--once", "quest.start:001", "--json"))
        for _ in range(2)
    )
    assert first == second
    assert first["once"] == "quest.start:001"
    assert len(statuses(db)) == 4
