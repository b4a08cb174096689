"""Packages and extras: the page lists all of them, and a module without its extra names it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, REFERENCE, ROOT, name_of, prose
from tests.docs.test_reference import row, rows

PAGE = REFERENCE / "installation.md"
_NAME = re.compile(r"[A-Za-z0-9-]+")
_REQUIREMENT = re.compile(r"((?:onceward(?:-\w+)?|packages/\w+))\[([a-z,]+)\]")
_OWN_EXTRA = re.compile(r"onceward-(\w+)\[(\w+)\]")
FOLDERS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def project(package: str) -> dict[str, Any]:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def extras(package: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = project(package).get("optional-dependencies", {})
    return found


def distribution(package: str) -> str:
    name: str = project(package)["name"]
    return name


def brought_by(requirement: str) -> list[str]:
    """Return the packages of a requirement; of an extra of our own packages, those that it adds."""
    if own := _OWN_EXTRA.match(requirement):
        return [name for each in extras(own[1])[own[2]] for name in brought_by(each)]
    match = _NAME.match(requirement)
    assert match is not None
    return [match[0]]


def needed_by(package: str) -> set[str]:
    """Return the folders of our packages that a package requires, directly or not, and its own."""
    folders = {distribution(folder): folder for folder in FOLDERS}
    found: set[str] = set()
    left = [(package, "")]
    while left:
        folder, names = left.pop()
        found.add(folder)
        lines = [*project(folder).get("dependencies", [])]
        lines += [each for name in names.split(",") for each in extras(folder).get(name, [])]
        own = (re.match(r"(onceward[\w-]*)(?:\[([\w,]+)\])?", line) for line in lines)
        left += [(folders[match[1]], match[2] or "") for match in own if match]
    return found


@pytest.mark.parametrize("extra", extras("onceward"))
def test_installation_page_has_every_extra_with_its_packages(extra: str) -> None:
    _, use, brings = row(PAGE, extra)
    assert use
    if extra != "all":
        names = [name for r in extras("onceward")[extra] for name in brought_by(r)]
        assert brings.split(", ") == names


@pytest.mark.parametrize("package", FOLDERS)
def test_installation_page_has_every_package_with_its_install_line(package: str) -> None:
    _, what, who, install = row(PAGE, distribution(package))
    assert what
    assert who
    paths = re.findall(r"\./packages/(\w+)", install)
    assert install == " ".join(["pip install", *(f"./packages/{path}" for path in paths)])
    assert paths[-1] == package
    assert set(paths) == needed_by(package)


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("packages/*/README.md"))], ids=name_of)
def test_page_installs_from_the_checkout_or_from_built_wheels(page: Path) -> None:
    if page.parent.name == "decisions":
        return
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        # The message of a module whose extra is missing.
        if "No module named" in line:
            continue
        for command in re.findall(r"pip install ([^#`|]*)", line):
            from_index = re.search(r"(?<![\w./-])onceward", command)
            around = " ".join(lines[max(number - 1, 0) : number + 2]).lower()
            if from_index and "--find-links" not in command:
                assert "once released" in around, f"line {number + 1}: {line.strip()}"


def test_installation_page_has_no_unknown_extra() -> None:
    table = prose(PAGE).partition("## Extras of onceward")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)) == set(extras("onceward"))


def test_installation_page_has_the_extras_of_the_other_packages() -> None:
    names = {cells[0] for cells in rows(PAGE)}
    for package in set(FOLDERS) - {"onceward"}:
        assert {f"onceward-{package}[{extra}]" for extra in extras(package)} <= names


def test_extra_all_has_every_extra_but_testing() -> None:
    (requirement,) = extras("onceward")["all"]
    listed = requirement.removeprefix("onceward[").removesuffix("]").split(",")
    assert set(listed) == set(extras("onceward")) - {"all", "testing"}


def test_readme_of_the_library_has_every_extra() -> None:
    table = (ROOT / "packages/onceward/README.md").read_text(encoding="utf-8")
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    named = {name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == set(extras("onceward"))


def test_requirements_in_pages_name_existing_extras() -> None:
    known = {distribution(folder): extras(folder) for folder in FOLDERS}
    known |= {f"packages/{folder}": extras(folder) for folder in FOLDERS}
    # Decision records also name what existed before.
    pages = [page for page in PAGES if page.parent.name != "decisions"]
    for page in [*pages, *ROOT.glob("packages/*/README.md")]:
        text = page.read_text(encoding="utf-8")
        for package, names in _REQUIREMENT.findall(text):
            assert set(names.split(",")) <= set(known[package]), f"{name_of(page)}: {names}"


# Module that users import: its extra.
MODULES = {
    "onceward.client": "client",
    "onceward.django": "django",
    "onceward.flask": "flask",
    "onceward.observability.metrics": "metrics",
    "onceward.sign_in.jwt_auth": "jwt",
    "onceward.guard.rate_limits": "limits",
    "onceward.stores.sessions.django": "django",
    "onceward.stores.psycopg": "psycopg",
    "onceward.stores.redis": "redis",
    "onceward.stores.sessions.sqlalchemy": "sqlalchemy",
}

WITHOUT_PACKAGES = """
import sys
from importlib import import_module

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""

IMPORT_EACH = """
for module in {modules}:
    try:
        import_module(module)
    except Exception as error:
        mro = [each.__name__ for each in type(error).__mro__]
        print(module, "ImportError" in mro and "ConfigurationError" in mro, error)
"""

BLOCKED = {
    *("aiosqlite", "apsw", "asyncpg", "django", "flask", "httpx", "jwt", "limits", "nats"),
    *("opentelemetry", "prometheus_client", "psycopg", "redis", "sqlalchemy", "werkzeug"),
}


def _run(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES.format(blocked=BLOCKED) + script],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_module_without_its_extra_names_the_extra() -> None:
    done = _run(IMPORT_EACH.format(modules=list(MODULES)))
    assert done.stderr == ""
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert list(lines) == list(MODULES)
    for module, extra in MODULES.items():
        assert lines[module].startswith("True No module named "), lines[module]
        assert lines[module].endswith(f': pip install "onceward[{extra}]"'), lines[module]


def test_worker_of_an_app_without_an_extra_prints_the_command_to_run(tmp_path: Any) -> None:
    (tmp_path / "shop.py").write_text(
        "from onceward.observability.metrics import PrometheusMetrics\n"
    )
    script = (
        "sys.argv = ['onceward', 'worker', '--app', 'shop:onceward']\n"
        "from onceward_protocol.cli.main import main\nmain()\n"
    )
    done = _run(script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "onceward: shop cannot be imported: No module named 'prometheus_client': "
        'pip install "onceward[metrics]"\n'
    )
