"""The flows page names files that exist, and none more than twice in one flow."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

TEXT = (DOCS / "concepts" / "flows.md").read_text(encoding="utf-8")
LIBRARY = ROOT / "packages" / "onceward" / "src" / "onceward"
FLOWS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]


def file_of(path: str) -> Path:
    """Return the file that a path of the page names."""
    package = path.partition("/")[0]
    if package.startswith("onceward_"):
        return ROOT / "packages" / package.removeprefix("onceward_") / "src" / path
    return LIBRARY / path


_STEP = re.compile(r"^\| \d+ \| `([^`]+)` \|", re.MULTILINE)


def test_there_are_three_flows() -> None:
    assert len(FLOWS) == 3


@pytest.mark.parametrize("flow", FLOWS, ids=[flow.partition("\n")[0] for flow in FLOWS])
def test_files_of_a_flow_exist_and_none_is_visited_three_times(flow: str) -> None:
    counts = Counter(_STEP.findall(flow))
    assert counts
    for path, visits in counts.items():
        assert file_of(path).is_file(), path
        assert visits <= 2, path
    for path in re.findall(r"`([a-z_/]+\.(?:py|sql))`", flow):
        assert file_of(path).is_file(), path
