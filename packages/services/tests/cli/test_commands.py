"""The commands this package adds to ``onceward``: help, bad usage, imports."""

import json

import pytest

from onceward.stores.parts import installed_parts
from packages.protocol.tests.cli.harness import run_script

from .conftest import Cli, Here, one_line


def test_help_lists_the_commands_of_this_package(here: Here) -> None:
    text = here("--help").stdout
    for command in (b"serve", b"worker", b"token"):
        assert command in text


def test_help_of_serve_has_examples(here: Here) -> None:
    assert b"onceward serve --port 0" in here("serve", "--help").stdout


@pytest.mark.parametrize("arguments", [["token"], ["serve", "--port", "x"]])
def test_bad_usage_is_exit_2_and_one_line(here: Here, arguments: list[str]) -> None:
    done = here(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert "--help" in one_line(done.stderr)


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_migrate_creates_tables_of_services_only_if_they_are_wanted(
    cli: Cli, database: str, request: pytest.FixtureRequest
) -> None:
    url = "sqlite:///services.db"
    if database == "postgres":
        url = str(request.getfixturevalue("postgres_url"))
    done = cli("migrate", "--database", url, "--json")
    applied = json.loads(done.stdout)["applied"]
    assert {found["namespace"] for found in applied} == {*installed_parts()}
    done = cli("migrate", "--services", "--database", url, "--json")
    applied = json.loads(done.stdout)["applied"]
    assert {"namespace": "routes", "number": 1, "name": "route_requests"} in applied


def test_worker_imports_no_web_framework(cli: Cli) -> None:
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['fastapi', 'starlette', 'uvicorn']))\n"
        "sys.argv = ['onceward', 'worker', '--queue', 'nowhere']\n"
        "from onceward_protocol.cli.main import main\n"
        "main()\n"
    )
    done = run_script(script, cwd=cli.directory)
    # The message comes after every service and its jobs were loaded.
    assert "unknown queue nowhere" in one_line(done.stderr)
    assert done.returncode == 2


def test_garbage_collection_is_resumed_when_the_server_is_ready(cli: Cli) -> None:
    script = (
        "import gc, sys\n"
        "from onceward_protocol.cli import main\nfrom onceward_services.cli import serve\n"
        "def run_in_process(app, settings, listener, ready):\n"
        "    before = gc.isenabled()\n"
        "    ready()\n"
        "    print(before, gc.isenabled())\n"
        "serve.run_in_process = run_in_process\n"
        "sys.argv = ['onceward', 'serve', '--port', '0']\n"
        "main.main()\n"
    )
    assert _last_line(script, cli) == b"False True"


def test_garbage_collection_is_resumed_when_the_worker_is_ready(cli: Cli) -> None:
    script = (
        "import gc, sys\n"
        "from onceward.cli import worker\nfrom onceward_protocol.cli import main\n"
        "async def until_stopped(worker, signals, *, once):\n"
        "    print(gc.isenabled())\n"
        "worker._until_stopped = until_stopped\n"
        "sys.argv = ['onceward', 'worker']\n"
        "main.main()\n"
    )
    assert _last_line(script, cli) == b"True"


def _last_line(script: str, cli: Cli) -> bytes:
    done = run_script(script, cwd=cli.directory)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_missing_dependency_is_reported_with_the_command_that_installs_it(cli: Cli) -> None:
    script = (
        "import sys\n"
        "sys.modules['uvicorn'] = None\n"
        "sys.argv = ['onceward', 'serve']\n"
        "from onceward_protocol.cli.main import main\n"
        "main()\n"
    )
    done = run_script(script, cwd=cli.directory)
    assert done.returncode == 1
    assert one_line(done.stderr).endswith("uvicorn: pip install uvicorn")
