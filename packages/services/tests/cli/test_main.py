"""The command line: help, errors in one line, no tracebacks."""

import subprocess
import sys
from typing import Any

import pytest

from holdfast.cli.main import tell_errors
from holdfast.cli.output import Failure, shown, without_password
from holdfast.errors import ConfigurationError, StoreUnavailableError

from .conftest import Cli, Here, environment, one_line


def test_help_and_version(here: Here) -> None:
    bare, asked = here(), here("--help")
    assert bare.returncode == asked.returncode == 0
    assert bare.stdout.strip() == asked.stdout.strip()
    for command in (b"serve", b"token", b"canonical", b"hash", b"migrate", b"sweep", b"keys"):
        assert command in asked.stdout
    assert here("--version").stdout.startswith(b"holdfast ")


def test_the_help_of_a_command_has_examples(here: Here) -> None:
    assert b"holdfast serve --port 0" in here("serve", "--help").stdout


@pytest.mark.parametrize(
    "arguments", [["dance"], ["hash", "--loud"], ["token"], ["serve", "--port", "x"], ["keys"]]
)
def test_bad_usage_is_exit_2_and_one_line(here: Here, arguments: list[str]) -> None:
    done = here(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert "--help" in one_line(done.stderr)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Failure("no", 2), 2),
        (Failure("no"), 1),
        (ConfigurationError("wrong"), 2),
        (StoreUnavailableError("away"), 1),
        (ModuleNotFoundError("No module named 'fastapi'", name="fastapi"), 1),
        (RuntimeError("two\nlines"), 1),
        (KeyError("x"), 1),
    ],
)
def test_every_error_is_one_line_and_a_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert tell_errors(fail) == code
    one_line(capsys.readouterr().err.encode())


def test_the_light_commands_need_no_web_framework() -> None:
    heavy = ["fastapi", "starlette", "uvicorn", "pydantic_settings", "jwt", "limits", "asyncpg"]
    script = (
        "import sys, io\n"
        f"sys.modules.update(dict.fromkeys({heavy!r}))\n"
        "sys.argv = ['holdfast', 'hash']\n"
        "from holdfast.cli.main import main\n"
        "main()\n"
    )
    done = _run(script, input=b"{}")
    assert done.stdout.startswith(b"44136fa355b3678a"), done.stderr


def test_a_worker_needs_no_web_framework(cli: Cli) -> None:
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['fastapi', 'starlette', 'uvicorn']))\n"
        "sys.argv = ['holdfast', 'worker', '--queue', 'nowhere']\n"
        "from holdfast.cli.main import main\n"
        "main()\n"
    )
    done = _run(script, cwd=cli.directory)
    # By then it has imported the jobs of all services.
    assert "unknown queue nowhere" in one_line(done.stderr)
    assert done.returncode == 2


def test_garbage_collector_is_enabled_once_a_command_runs() -> None:
    script = (
        "import gc, sys\n"
        "from holdfast.cli import canonical, main\n"
        "seen = []\n"
        "canonical.canonical_of = lambda *_: seen.append(gc.isenabled()) or b'{}'\n"
        "sys.argv = ['holdfast', 'hash']\n"
        "held = []\n"
        "run, main._run = main._run, lambda: held.append(gc.isenabled()) or run()\n"
        "try:\n"
        "    main.main()\n"
        "except SystemExit:\n"
        "    print(held, seen, gc.isenabled())\n"
    )
    done = _run(script)
    assert done.stdout.splitlines()[-1] == b"[False] [True] True", done.stderr


def test_garbage_collector_is_enabled_once_a_server_is_ready(cli: Cli) -> None:
    script = (
        "import gc, sys\n"
        "from holdfast.cli import main\nfrom holdfast_services.cli import serve\n"
        "def run_in_process(app, settings, listener, ready):\n"
        "    before = gc.isenabled()\n"
        "    ready()\n"
        "    print(before, gc.isenabled())\n"
        "serve.run_in_process = run_in_process\n"
        "sys.argv = ['holdfast', 'serve', '--port', '0']\n"
        "main.main()\n"
    )
    assert _last_line(script, cli) == b"False True"


def test_garbage_collector_is_enabled_once_a_worker_runs(cli: Cli) -> None:
    script = (
        "import gc, os, signal, sys\n"
        "from holdfast.cli import main\nfrom holdfast_services.cli import worker\n"
        "async def report_depths(holdfast, metrics):\n"
        "    print(gc.isenabled())\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "worker._report_depths = report_depths\n"
        "sys.argv = ['holdfast', 'worker']\n"
        "main.main()\n"
    )
    assert _last_line(script, cli) == b"True"


def _run(script: str, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """Run a script in a new process."""
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env=environment(),
        check=False,
        **options,
    )


def _last_line(script: str, cli: Cli) -> bytes:
    done = _run(script, cwd=cli.directory)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_missing_package_is_reported_with_the_command_to_install_it(cli: Cli) -> None:
    script = (
        "import sys\n"
        "sys.modules['uvicorn'] = None\n"
        "sys.argv = ['holdfast', 'serve']\n"
        "from holdfast.cli.main import main\n"
        "main()\n"
    )
    done = _run(script, cwd=cli.directory)
    assert done.returncode == 1
    assert 'pip install "holdfast[all]"' in one_line(done.stderr)


def test_passwords_and_escape_sequences_are_not_shown() -> None:
    assert without_password("postgresql://me:p@ss:w@host/db") == "postgresql://me:***@host/db"
    assert without_password("sqlite:///x.db") == "sqlite:///x.db"
    assert shown("a\x1b[31mb\tc") == "a\\x1b[31mb\\tc"
