"""Commands of other packages: found by entry point, missing, broken, renamed."""

from importlib.metadata import EntryPoints, entry_points, metadata
from pathlib import Path
from uuid import uuid4

import pytest

from onceward_protocol.cli import plugins
from onceward_protocol.cli.commands import create_app
from onceward_protocol.cli.plugins import (
    PACKAGE_OF_COMMAND,
    RENAMED_COMMANDS,
    add_plugins,
    install_argument,
)
from packages.protocol.tests.cli.harness import Here, one_line, run_script

WITHOUT_TYPER = (
    "import sys\n"
    "from importlib.metadata import EntryPoints\n"
    "from onceward_protocol.cli import plugins\n"
    "plugins._installed = lambda: EntryPoints()\n"
    "sys.modules['typer'] = None\n"
    "sys.argv = ['onceward', *{arguments!r}]\n"
    "from onceward_protocol.cli.main import main\n"
    "main()\n"
)
GREET = "def register(app):\n    @app.command()\n    def greet():\n        print('hello')\n"


@pytest.fixture
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_installed", EntryPoints)


def install(directory: Path, package: str, code: str, group: str = plugins.GROUP) -> None:
    """Write an installed package with an entry point, as pip leaves it in site-packages."""
    module = f"plugin_{uuid4().hex}"  # no test finds the module of another in sys.modules
    (directory / f"{module}.py").write_text(code)
    metadata = directory / f"{module}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{module} = {module}:register\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "site-packages"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    return directory


@pytest.mark.usefixtures("_nothing_installed")
@pytest.mark.parametrize(("command", "package"), PACKAGE_OF_COMMAND.items())
@pytest.mark.parametrize("arguments", [(), ("--port", "0", "x"), ("--help",)])
def test_command_of_a_missing_package_names_the_package(
    here: Here, command: str, package: str, arguments: tuple[str, ...]
) -> None:
    done = here(command, *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"the package {package}, which is not installed" in one_line(done.stderr)


@pytest.mark.usefixtures("_nothing_installed")
def test_commands_of_missing_packages_are_not_in_the_help(here: Here) -> None:
    done = here("--help")
    assert done.stderr == b""
    text = done.stdout.decode()
    for command in (*PACKAGE_OF_COMMAND, *RENAMED_COMMANDS):
        assert f"│ {command} " not in text
        assert f"onceward {command}" not in text


@pytest.mark.parametrize(("old", "new"), RENAMED_COMMANDS.items())
def test_old_name_of_a_command_prints_the_new_one(here: Here, old: str, new: str) -> None:
    done = here(old, "--seconds", "5")
    assert (done.returncode, done.stdout) == (2, b"")
    assert one_line(done.stderr) == f"onceward: onceward {old} is now named onceward {new}"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--port", "0"], "the package onceward-services"),
        (["demo"], "the package onceward-lab"),
        (["torture"], "onceward simulate"),
        (["hash"], 'pip install "onceward-protocol[cli]"'),
        (["--help"], 'pip install "onceward-protocol[cli]"'),
        ([], 'pip install "onceward-protocol[cli]"'),
    ],
)
def test_command_line_without_typer_names_what_to_install(arguments: list[str], named: str) -> None:
    done = run_script(WITHOUT_TYPER.format(arguments=arguments))
    assert (done.returncode, done.stdout) == (2, b"")
    assert named in one_line(done.stderr)


def test_entry_point_adds_a_command(here: Here, packages: Path) -> None:
    install(packages, "greeter", GREET)
    assert b"greet" in here("--help").stdout
    done = here("greet")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"hello\n", b"")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import a_module_that_is_not_installed\n", "a_module_that_is_not_installed"),
        ("def register(app):\n    raise RuntimeError('two\\nlines')\n", "RuntimeError: two lines"),
        ("", "AttributeError"),
        ("def\n", "SyntaxError"),
    ],
)
def test_broken_package_costs_one_warning_and_no_other_command(
    here: Here, packages: Path, code: str, reason: str
) -> None:
    install(packages, "broken-plugin", code)
    install(packages, "greeter", GREET)
    done = here("greet")
    assert (done.returncode, done.stdout) == (0, b"hello\n")
    warning = one_line(done.stderr)
    assert warning.startswith("onceward: warning: cannot load the commands of broken-plugin: ")
    assert reason in warning
    help_ = here("--help")
    assert help_.returncode == 0
    assert "broken-plugin" in one_line(help_.stderr)


def test_command_of_a_broken_package_does_not_say_that_it_is_missing(
    here: Here, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(packages, "onceward-services", "import a_module_that_is_not_installed\n", "test.group")
    found = entry_points(group="test.group")
    monkeypatch.setattr(plugins, "_installed", lambda: found)
    done = here("serve")
    assert (done.returncode, done.stdout) == (2, b"")
    warning, error = done.stderr.decode().splitlines()
    assert "a_module_that_is_not_installed" in warning
    assert error.startswith("onceward: onceward serve is part of onceward-services, which cannot")


def test_command_of_a_package_loads_no_other_package(here: Here, packages: Path) -> None:
    install(packages, "broken-plugin", "import a_module_that_is_not_installed\n")
    for arguments in (["hash", "nowhere.json"], ["jobs"], ["outbox"]):
        assert "broken-plugin" not in here(*arguments).stderr.decode()
    for arguments in ([], ["--help"], ["dance"]):
        assert "broken-plugin" in here(*arguments).stderr.decode()


def test_installed_packages_replace_the_hints() -> None:
    app = create_app()
    add_plugins(app, [])
    names = plugins._names(app)
    assert names >= set(PACKAGE_OF_COMMAND)
    assert not names & set(RENAMED_COMMANDS)


@pytest.mark.parametrize(
    ("module", "argument"),
    [
        ("asyncpg", '"onceward[postgres]"'),
        ("opentelemetry.sdk", '"onceward[otel]"'),
        ("something_else.inner", "something_else"),
    ],
)
def test_missing_module_is_named_with_what_installs_it(module: str, argument: str) -> None:
    assert install_argument(module) == argument


def test_each_extra_that_is_suggested_exists() -> None:
    for requirement in plugins._REQUIREMENT_OF_MODULE.values():
        name, _, rest = requirement.strip('"').partition("[")
        assert rest.removesuffix("]") in (metadata(name).get_all("Provides-Extra") or [])
