"""Find versions with known vulnerabilities in the lock files, and in what requirements allow.

``requirements/advisories.toml`` is the list, so that this works without a network. A lower bound
is wrong if it lets a user install an affected version; ``!=`` excludes one above the bound.
"""

import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.lock_files import LOCKS, ROOT, Locked, read_lock

__all__ = ["Advisory", "check_locked", "check_requirements", "main", "read_advisories"]

ADVISORIES: Final = ROOT / "requirements" / "advisories.toml"
_PROJECTS: Final = tuple(sorted(ROOT.glob("packages/*/pyproject.toml")))
_TOOLS: Final = ROOT / "requirements-dev.txt"


@dataclass(frozen=True, slots=True)
class Advisory:
    """One vulnerability of one package. Each range is a specifier such as ``>=1.0,<1.2``."""

    package: str
    id: str
    ranges: tuple[SpecifierSet, ...]
    summary: str

    def affects(self, version: str | Version) -> bool:
        """Return whether a version is in one of the ranges."""
        return any(affected.contains(version, prereleases=True) for affected in self.ranges)

    def allowed_by(self, specifier: SpecifierSet) -> Version | None:
        """Return an affected version that a requirement allows, or None.

        Ranges begin at a version. So if any version of a range is allowed, that is the beginning
        of the range, or the lower bound of the requirement.
        """
        bounds = [Version(one.version) for one in specifier if one.operator in (">=", "==", "~=")]
        starts = [
            Version(one.version)
            for affected in self.ranges
            for one in affected
            if one.operator in (">=", "==")
        ]
        for version in sorted([*(bounds or [Version("0")]), *starts]):
            if specifier.contains(version, prereleases=True) and self.affects(version):
                return version
        return None


def read_advisories(path: Path = ADVISORIES) -> list[Advisory]:
    """Read the list."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["advisory"]
    return [
        Advisory(
            canonicalize_name(entry["package"]),
            entry["id"],
            tuple(SpecifierSet(affected) for affected in entry["affected"]),
            entry["summary"],
        )
        for entry in entries
    ]


def check_locked(locked: Iterable[Locked], advisories: Sequence[Advisory]) -> list[str]:
    """Return one line for each locked version that is affected."""
    return [
        f"{one.name} {one.version} is affected by {advisory.id} ({advisory.summary}): upgrade it "
        f'with make lock UPGRADE="--upgrade-package {one.name}"'
        for one in locked
        for advisory in advisories
        if advisory.package == one.name and advisory.affects(one.version)
    ]


def check_requirements(
    requirements: Iterable[Requirement], advisories: Sequence[Advisory]
) -> list[str]:
    """Return one line for each requirement that allows an affected version."""
    lines = []
    for requirement in requirements:
        for advisory in advisories:
            if advisory.package != canonicalize_name(requirement.name):
                continue
            version = advisory.allowed_by(requirement.specifier)
            if version is not None:
                lines.append(
                    f"{requirement} allows {version}, which is affected by {advisory.id} "
                    f"({advisory.summary}): raise the lower bound, or exclude it with !="
                )
    return lines


def _requirements() -> list[Requirement]:
    """Return the requirements of our packages, with all extras, and of the tools."""
    found = []
    for path in _PROJECTS:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {}).values()
        found += [text for texts in (project.get("dependencies", []), *extras) for text in texts]
    lines = _TOOLS.read_text(encoding="utf-8").splitlines()
    found += [line for line in lines if line and not line.startswith("#")]
    return [Requirement(text) for text in found]


def main() -> int:
    """Print what is affected; return 1 if anything is."""
    advisories = read_advisories()
    lines = check_requirements(_requirements(), advisories)
    packages = 0
    for path in LOCKS:
        locked = read_lock(path)
        packages += len(locked)
        lines += [f"{path.name}: {line}" for line in check_locked(locked, advisories)]
    for line in dict.fromkeys(lines):
        print(line, file=sys.stderr)
    if not lines:
        print(f"{packages} locked packages, {len(advisories)} advisories: none is affected")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
