"""The three wheels: their files and requirements, and the library alone in a new environment."""

import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

import pytest

# One process builds the wheels for all of these tests.
pytestmark = pytest.mark.xdist_group("packaging")

ROOT = Path(__file__).parents[1]
IMPORT_NAMES = {"holdfast": "holdfast", "services": "holdfast_services", "lab": "holdfast_lab"}

ROUND_TRIP = """
import asyncio

from bare_asgi import app, holdfast


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
        "headers": [(b"idempotency-key", key.encode()), (b"content-type", b"text/plain")],
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
    assert len(await holdfast.store.read("SELECT text FROM notes")) == 1
    await holdfast.close()


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
def library_alone(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin directory of an environment with the library's wheel and msgspec only."""
    environment = tmp_path_factory.mktemp("library") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    (site_packages,) = environment.glob("lib/python3.*/site-packages")
    msgspec = distribution("msgspec")
    for file in msgspec.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = site_packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(msgspec.locate_file(file), target)  # type: ignore[arg-type]
    # No --no-deps: pip fails here if the library requires anything but msgspec.
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    run(*pip, "--quiet", "--no-index", "--no-compile", wheels["holdfast"])
    return environment / "bin"


def run(*command: str | Path, cwd: Path | None = None) -> None:
    # Not with PYTHONPATH: the environment under test would find more than is installed in it.
    done = subprocess.run(
        command, cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


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
    assert not [name for name in names if "/tests/" in name or "/test_" in name]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheels_contain_the_data_files_that_are_read_at_run_time(wheels: dict[str, Path]) -> None:
    suffixes = {}
    for package, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            suffixes[package] = {Path(name).suffix for name in archive.namelist()}
    assert ".sql" in suffixes["holdfast"]
    assert {".sql", ".json", ".toml"} <= suffixes["services"]


def test_library_requires_msgspec_only(wheels: dict[str, Path]) -> None:
    (requirement,) = requirements(wheels["holdfast"])
    assert requirement.startswith("msgspec")


def test_packages_require_each_other_in_the_same_version(wheels: dict[str, Path]) -> None:
    versions = {metadata(wheel)["Version"] for wheel in wheels.values()}
    (version,) = versions
    services, lab = requirements(wheels["services"]), requirements(wheels["lab"])
    assert [r for r in services if r.startswith("holdfast") and r.endswith(f"=={version}")]
    assert [r for r in lab if r.startswith("holdfast-services") and r.endswith(f"=={version}")]


def test_library_alone_replays_a_guarded_request(library_alone: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "bare_asgi.py", tmp_path)
    (tmp_path / "round_trip.py").write_text(ROUND_TRIP)
    run(library_alone / "python", "-W", "error", "round_trip.py", cwd=tmp_path)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("serve", "pip install holdfast-services"),
        ("simulate", "pip install holdfast-lab"),
        ("hash", 'pip install "holdfast[cli]"'),
    ],
)
def test_command_line_of_the_library_alone_names_what_to_install(
    library_alone: Path, command: str, named: str
) -> None:
    done = subprocess.run(
        [library_alone / "holdfast", command],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert named in line
