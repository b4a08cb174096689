"""The project's former name is only where it is explained."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORMER = "hold" + "fast"
EXPLAINED = {"CHANGELOG.md", "docs/decisions/0061-name-and-packages.md"}


def test_former_name_is_in_the_changelog_and_one_decision_only() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    named = {
        str(path.relative_to(ROOT))
        for path in files
        if FORMER.encode() in path.read_bytes().lower() or FORMER in path.name.lower()
    }
    assert named == EXPLAINED
