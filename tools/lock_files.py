"""Read the lock files: each package with its version and the hashes of its files."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["LOCKS", "ROOT", "Locked", "read_lock"]

ROOT: Final = Path(__file__).parents[1]
LOCKS: Final = tuple(
    ROOT / "requirements" / name for name in ("setup.txt", "server.txt", "all.txt", "npm.txt")
)

_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Locked:
    """One package of a lock file."""

    name: str
    version: str
    sha256: tuple[str, ...]


def read_lock(path: Path) -> list[Locked]:
    """Return the packages of a lock file. Raises ``ValueError`` for a line without a hash."""
    found = []
    text = re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in filter(None, map(str.strip, text.replace("\\\n", " ").splitlines())):
        hashes = tuple(_HASH.findall(line))
        requirement = Requirement(line.partition("--hash")[0].strip())
        pins = [pin.version for pin in requirement.specifier if pin.operator == "=="]
        if not hashes or len(pins) != 1 or len(requirement.specifier) != 1:
            raise ValueError(f"{path.name}: {requirement} has no hash, or is not pinned with ==")
        found.append(Locked(canonicalize_name(requirement.name), pins[0], hashes))
    return found
