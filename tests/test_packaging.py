"""The eight wheels: their files, their requirements, and new environments with nothing else."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from email import message_from_bytes
from email.message import Message
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from packages.onceward.tests.support.serving import free_port
from tests.docs.pages import python_blocks

# One process builds the wheels for all of these tests.
pytestmark = pytest.mark.xdist_group("packaging")

ROOT = Path(__file__).parents[1]
IMPORT_NAMES = {
    "protocol": "onceward_protocol",
    "onceward": "onceward",
    "outbox": "onceward_outbox",
    "operator": "onceward_operator",
    "testing": "onceward_testing",
    "nats": "onceward_nats",
    "services": "onceward_services",
    "lab": "onceward_lab",
}
# A command of the package, and what it prints in an environment that has nothing else.
COMMANDS = {
    "protocol": ("hash", 'pip install "onceward-protocol[cli]"'),
    "onceward": ("migrate", 'pip install "onceward-protocol[cli]"'),
    "outbox": ("outbox", 'pip install "onceward-protocol[cli]"'),
    "operator": ("trace", "The X-Correlation-ID of a request"),
    "testing": ("serve", "the package onceward-services, which is not installed"),
    "nats": ("worker", 'pip install "onceward-protocol[cli]"'),
    "services": ("token", "--app-check"),
    "lab": ("simulate", "--planted"),
}

ROUND_TRIP = """
import asyncio

from bare_asgi import app, onceward


async def post(key: str) -> tuple[int, bytes, bytes | None]:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/notes",
        "raw_path": b"/notes",
        "query_string": b"",
        "headers": [
            (b"idempotency-key", key.encode()),
            (b"content-type", b"text/plain"),
            (b"x-token", b"token-1"),
        ],
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"milk", "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], body, dict(sent[0]["headers"]).get(b"idempotency-replayed")


async def main() -> None:
    first, second = await post("a-note"), await post("a-note")
    assert (first[0], first[2]) == (201, None), first
    assert second == (*first[:2], b"true"), second
    assert len(await onceward.store.read("SELECT text FROM notes")) == 1
    await onceward.close()


asyncio.run(main())
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build each package with the build backend of this environment, without a network."""
    directory = tmp_path_factory.mktemp("wheels")
    found = {}
    for package in IMPORT_NAMES:
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory / package],
            cwd=ROOT / "packages" / package,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (found[package],) = (directory / package).glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environments(
    wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function that installs one package alone, once, and returns the bin directory."""

    @cache
    def install(package: str) -> Path:
        return new_environment(tmp_path_factory.mktemp(package), wheels, package)

    return install


@pytest.fixture(scope="module")
def library_alone(environments: Callable[[str], Path]) -> Path:
    """Return the bin directory of an environment with the library's wheel and what it requires."""
    return environments("onceward")


@pytest.fixture(scope="module")
def server_installed(environments: Callable[[str], Path]) -> Path:
    """Return the bin directory of an environment in which ``onceward-services`` is installed."""
    return environments("services")


def new_environment(directory: Path, wheels: dict[str, Path], package: str) -> Path:
    """Install a package by its name from the wheels, without a network; return the bin directory.

    What others have made is copied from the environment of the tests if the package requires it,
    and nothing else: pip fails if that is not enough, and so does an import that no requirement
    covers.
    """
    name = distribution_name(package)
    environment = directory / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    (site_packages,) = environment.glob("lib/python3.*/site-packages")
    for required in required_by(name, wheels.values()):
        for file in distribution(required).files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = site_packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(Path(str(distribution(required).locate_file(file))), target)
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install")
    directories = [f"--find-links={wheel.parent}" for wheel in wheels.values()]
    run(*pip, "--quiet", "--no-index", "--no-compile", *directories, name)
    return environment / "bin"


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def distribution_name(package: str) -> str:
    return IMPORT_NAMES[package].replace("_", "-")


def required_by(wanted: str, wheels: Iterable[Path]) -> set[str]:
    """Return the distributions of others that one of our packages needs, with what those need."""
    own = {canonicalize_name(str(metadata(wheel)["Name"])): metadata(wheel) for wheel in wheels}
    seen: set[tuple[str, str]] = set()
    left = [(canonicalize_name(wanted), "")]
    while left:
        name, extra = left.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        about = own[name] if name in own else distribution(name).metadata
        for line in about.get_all("Requires-Dist") or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                found = canonicalize_name(needed.name)
                left += [(found, ""), *((found, each) for each in needed.extras)]
    return {name for name, _ in seen} - set(own)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    # Not with PYTHONPATH: the environment under test would find more than is installed in it.
    done = subprocess.run(
        command, cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def requirements(wheel: Path) -> list[str]:
    """Return what an installation without extras requires."""
    every = metadata(wheel).get_all("Requires-Dist") or []
    return [requirement for requirement in every if "extra ==" not in requirement]


@pytest.mark.parametrize("package", IMPORT_NAMES)
def test_wheel_contains_every_source_and_data_file_and_nothing_else(
    wheels: dict[str, Path], package: str
) -> None:
    source = ROOT / "packages" / package / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / IMPORT_NAMES[package]).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheels[package]) as archive:
        names = archive.namelist()
    files = {name for name in names if ".dist-info/" not in name}
    assert files == expected
    assert f"{IMPORT_NAMES[package]}/py.typed" in files
    assert not [
        name for name in names if re.search(r"/tests?/|/test_|__pycache__|\.pyc$|\.db$", name)
    ]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheels_contain_the_data_files_that_are_read_at_run_time(wheels: dict[str, Path]) -> None:
    suffixes = {}
    for package, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            suffixes[package] = {Path(name).suffix for name in archive.namelist()}
    assert ".sql" in suffixes["onceward"]
    assert {".sql", ".json", ".toml", ".html", ".css", ".js"} <= suffixes["services"]


# A wheel that is suddenly larger has a file that should not be in it.
MAX_KILOBYTES = {
    "protocol": 80,
    "onceward": 600,
    "outbox": 230,
    "operator": 190,
    "testing": 80,
    "nats": 40,
    "services": 330,
    "lab": 400,
}


@pytest.mark.parametrize("package", IMPORT_NAMES)
def test_wheel_is_small(wheels: dict[str, Path], package: str) -> None:
    assert wheels[package].stat().st_size <= MAX_KILOBYTES[package] * 1024


@pytest.mark.parametrize("package", IMPORT_NAMES)
def test_wheel_names_its_pythons_and_describes_itself_without_relative_links(
    wheels: dict[str, Path], package: str
) -> None:
    about = metadata(wheels[package])
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert about["Requires-Python"] == ">=3.11"
    assert about["License-Expression"] == "Apache-2.0"
    assert pythons | {"Typing :: Typed"} <= set(about.get_all("Classifier") or ())
    # A package index shows the README without the repository around it.
    links = re.findall(r"\]\(([^)]+)\)", str(about.get_payload()))
    assert [link for link in links if not link.startswith("https://")] == []


def test_server_and_protocol_require_msgspec_only(wheels: dict[str, Path]) -> None:
    names = {
        package: {Requirement(r).name for r in requirements(wheels[package])} for package in wheels
    }
    assert names["protocol"] == {"msgspec"}
    assert names["onceward"] == {"msgspec", "onceward-protocol"}


def test_packages_require_each_other_in_the_same_version(wheels: dict[str, Path]) -> None:
    (version,) = {metadata(wheel)["Version"] for wheel in wheels.values()}
    for wheel in wheels.values():
        for line in metadata(wheel).get_all("Requires-Dist") or ():
            needed = Requirement(line)
            if needed.name.startswith("onceward") and needed.name != metadata(wheel)["Name"]:
                assert str(needed.specifier) == f"=={version}", line


@pytest.mark.parametrize("package", IMPORT_NAMES)
def test_package_installs_imports_and_runs_alone(
    environments: Callable[[str], Path], package: str, tmp_path: Path
) -> None:
    binaries = environments(package)
    run(binaries / "python", "-W", "error", "-c", f"import {IMPORT_NAMES[package]}", cwd=tmp_path)
    command, printed = COMMANDS[package]
    done = subprocess.run(
        [binaries / "onceward", command, "--help"],
        cwd=tmp_path,
        env={"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert printed in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_library_alone_replays_a_guarded_request(library_alone: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "bare_asgi.py", tmp_path)
    (tmp_path / "round_trip.py").write_text(ROUND_TRIP)
    run(library_alone / "python", "-W", "error", "round_trip.py", cwd=tmp_path)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("serve", "the package onceward-services"),
        ("simulate", "the package onceward-lab"),
        ("hash", 'pip install "onceward-protocol[cli]"'),
    ],
)
def test_command_line_of_the_library_alone_names_what_to_install(
    library_alone: Path, command: str, named: str
) -> None:
    done = subprocess.run(
        [library_alone / "onceward", command],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert named in line


# -- the README, from the wheels -----------------------------------------------------------------


def shop_of_the_readme() -> str:
    """Return the app that the README's diff leads to."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^```diff\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert found is not None
    return "".join(line[1:] + "\n" for line in found[1].splitlines() if not line.startswith("-"))


class Served:
    """A server process. Requests wait until it listens."""

    def __init__(self, *command: str | Path, port: int, cwd: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._errors = cwd / "stderr"
        environment = {"PATH": "/usr/bin:/bin"}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(command, cwd=cwd, env=environment, stderr=errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def request(self, path: str, *, method: str = "GET", **headers: str) -> tuple[Any, bytes]:
        """Return the headers and the body; an error status raises."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for _ in range(600):
            try:
                with urlopen(Request(self._url + path, method=method, headers=named)) as response:
                    return response.headers, response.read()
            except URLError as error:
                refused = isinstance(error.reason, ConnectionRefusedError)
                if not refused or self._process.poll() is not None:
                    raise AssertionError(f"{error}: {self._errors.read_text()}") from error
                time.sleep(0.05)
        raise AssertionError(self._errors.read_text())


def test_readme_shop_runs_from_the_installed_wheels(server_installed: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(shop_of_the_readme())
    port = free_port()
    uvicorn = (server_installed / "python", "-m", "uvicorn", "shop:app", "--port", str(port))
    with Served(*uvicorn, port=port, cwd=tmp_path) as shop:
        key = {"Idempotency_Key": "order-1", "X_Token": "token-1"}
        first, second = (shop.request("/orders?item=boots", method="POST", **key) for _ in range(2))
    assert first[1] == second[1] == b'{"ordered":"boots"}'
    assert (first[0]["Idempotency-Replayed"], second[0]["Idempotency-Replayed"]) == (None, "true")


def test_readme_outbox_runs_from_the_outbox_alone(
    environments: Callable[[str], Path], tmp_path: Path
) -> None:
    (block,) = python_blocks(ROOT / "README.md")
    (tmp_path / "app.py").write_text(block.text)
    run(environments("outbox") / "python", "-W", "error", "app.py", cwd=tmp_path)


def test_installed_server_serves_its_pages_and_services(
    server_installed: Path, tmp_path: Path
) -> None:
    token = run(server_installed / "onceward", "token", "--sub", "ada", cwd=tmp_path).strip()
    port = free_port()
    serve = (server_installed / "onceward", "serve", "--port", str(port))
    with Served(*serve, port=port, cwd=tmp_path) as server:
        about = json.loads(server.request("/", Accept="application/json")[1])
        pages = [server.request(path)[1] for path in ("/docs", "/docs/swagger-ui-bundle.js")]
        walker = json.loads(server.request("/tree/state", Authorization=f"Bearer {token}")[1])
    assert [service["name"] for service in about["services"]] == [
        "routes",
        "walk",
        "field",
        "planning",
    ]
    assert all(pages)
    assert walker
