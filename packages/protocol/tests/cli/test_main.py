"""``onceward`` itself: help, exit codes, and errors as one line without a traceback."""

import re

import pytest

from onceward_protocol.cli.main import report_errors
from onceward_protocol.cli.output import CommandError, printable, redact_password
from onceward_protocol.errors import ConfigurationError, OncewardError
from packages.protocol.tests.cli.harness import Here, environment, one_line, run_script


def test_help_and_version(here: Here) -> None:
    bare, help_ = here(), here("--help")
    assert bare.returncode == help_.returncode == 0
    assert bare.stdout.strip() == help_.stdout.strip()
    for command in (b"canonical", b"hash", b"migrate", b"sweep", b"keys", b"jobs", b"outbox"):
        assert command in help_.stdout
    assert here("--version").stdout.startswith(b"onceward ")


@pytest.mark.parametrize(
    "command",
    [
        ("canonical",),
        ("hash",),
        ("migrate",),
        ("sweep",),
        ("keys", "ls"),
        ("keys", "show"),
        ("jobs", "ls"),
        ("jobs", "show"),
        ("jobs", "dead"),
        ("jobs", "requeue"),
        ("jobs", "cancel"),
        ("jobs", "pause"),
        ("jobs", "resume"),
        ("jobs", "paused"),
    ],
)
def test_help_of_each_command_has_an_example(here: Here, command: tuple[str, ...]) -> None:
    text = here(*command, "--help").stdout.decode()
    examples = text.partition("Example")[2]
    assert f"onceward {' '.join(command)}" in examples


def test_help_lists_the_commands_in_panels(here: Here) -> None:
    text = here("--help", COLUMNS="80").stdout.decode()
    titles = re.findall(r"^╭─ (\w+) ", text, re.MULTILINE)
    assert titles == ["Options", "Run", "Look", "Repair", "Data", "Prove"]
    assert re.findall(r"^│ (\w+) ", text.partition("─ Repair ")[2], re.MULTILINE)[:2] == [
        "jobs",
        "outbox",
    ]


@pytest.mark.parametrize(
    "command", [("serve",), ("jobs", "ls"), ("jobs", "requeue"), ("outbox", "add"), ("chaos",)]
)
def test_help_shows_no_types_and_each_example_on_its_line(
    here: Here, command: tuple[str, ...]
) -> None:
    text = here(*command, "--help", COLUMNS="80").stdout.decode()
    assert not re.search(r"<(str|bool|int|list)|<=x|\bINTEGER\b|\bBOOLEAN\b", text)
    assert re.search(r"^ *Examples?: *$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80


def test_shell_completion_completes_commands_and_options(here: Here) -> None:
    assert b"_ONCEWARD_COMPLETE" in here("--show-completion", "bash").stdout
    for words, completed in (
        ("onceward job", b"jobs"),
        ("onceward jobs req", b"requeue"),
        ("onceward jobs requeue --que", b"--queue"),
    ):
        done = run_script(
            "from onceward_protocol.cli.main import main; main()",
            env=environment(
                _ONCEWARD_COMPLETE="complete_bash",
                COMP_WORDS=words,
                COMP_CWORD=str(len(words.split()) - 1),
            ),
        )
        assert done.stdout.split() == [completed], done.stderr


@pytest.mark.parametrize("arguments", [["dance"], ["hash", "--loud"], ["keys"], ["jobs"]])
def test_bad_usage_is_exit_2_and_one_line(here: Here, arguments: list[str]) -> None:
    done = here(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert "--help" in one_line(done.stderr)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("no", 2), 2),
        (CommandError("no"), 1),
        (ConfigurationError("wrong"), 2),
        (OncewardError("away"), 1),
        (ModuleNotFoundError("No module named 'fastapi'", name="fastapi"), 1),
        (RuntimeError("two\nlines"), 1),
        (KeyError("x"), 1),
    ],
)
def test_each_error_becomes_one_line_and_an_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert report_errors(fail) == code
    one_line(capsys.readouterr().err.encode())


def test_hash_imports_no_web_framework() -> None:
    heavy = ["fastapi", "starlette", "uvicorn", "pydantic_settings", "jwt", "limits", "asyncpg"]
    script = (
        "import sys, io\n"
        f"sys.modules.update(dict.fromkeys({heavy!r}))\n"
        "sys.argv = ['onceward', 'hash']\n"
        "from onceward_protocol.cli.main import main\n"
        "main()\n"
    )
    done = run_script(script, input=b"{}")
    assert done.stdout.startswith(b"44136fa355b3678a"), done.stderr


def test_garbage_collection_is_resumed_before_a_command_runs() -> None:
    script = (
        "import gc, sys\n"
        "from onceward_protocol.cli import commands, main\n"
        "seen = []\n"
        "commands.canonical_of = lambda *_: seen.append(gc.isenabled()) or b'{}'\n"
        "sys.argv = ['onceward', 'hash']\n"
        "held = []\n"
        "run, main._run = main._run, lambda: held.append(gc.isenabled()) or run()\n"
        "try:\n"
        "    main.main()\n"
        "except SystemExit:\n"
        "    print(held, seen, gc.isenabled())\n"
    )
    done = run_script(script)
    assert done.stdout.splitlines()[-1] == b"[False] [True] True", done.stderr


def test_passwords_and_escape_sequences_are_not_printed() -> None:
    assert redact_password("postgresql://me:p@ss:w@host/db") == "postgresql://me:***@host/db"
    assert redact_password("sqlite:///x.db") == "sqlite:///x.db"
    assert printable("a\x1b[31mb\tc") == "a\\x1b[31mb\\tc"
