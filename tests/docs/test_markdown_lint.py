"""``make lint`` checks the Markdown of the documentation."""

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT


def test_lint_finds_a_mistake_in_markdown(tmp_path: Path) -> None:
    assert "pymarkdown scan --recurse docs" in (ROOT / "Makefile").read_text(encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nText.\n\n### A level is missing\n", encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).with_name("pymarkdown"), "scan", page],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "MD001" in done.stdout
