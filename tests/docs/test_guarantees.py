"""The guarantees page: every promise names existing tests and known invariants."""

import re
from pathlib import Path

import pytest

from onceward_lab.checker import Rule
from tests.docs.pages import DOCS, anchors

PAGE = DOCS / "concepts" / "guarantees.md"
TEXT = PAGE.read_text(encoding="utf-8")
EVIDENCE = TEXT.partition("\n## Evidence\n")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in EVIDENCE.splitlines()
    if line.startswith("| [")
]
_LINK_AND_NAMES = re.compile(r"\[[^\]]+\]\(([^)]+)\)((?:,? `\w+`)+)")


def promises() -> list[str]:
    found = []
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE):
        if section.startswith("Promises"):
            found += re.findall(r"^### (.+)$", section, re.MULTILINE)
    return found


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_evidence_has_one_row_per_promise() -> None:
    assert [row[0] for row in ROWS] == [
        f"[{promise}](#{anchor_of(promise)})" for promise in promises()
    ]
    assert {anchor_of(promise) for promise in promises()} <= anchors(PAGE)


@pytest.mark.parametrize("row", ROWS, ids=[row[0].partition("]")[0][1:] for row in ROWS])
def test_tests_named_by_a_promise_exist(row: list[str]) -> None:
    found = _LINK_AND_NAMES.findall(row[1])
    assert found
    # The cell holds nothing but links and names.
    assert _LINK_AND_NAMES.sub("", row[1]).replace(",", "").strip() == ""
    for link, names in found:
        source = (Path(PAGE.parent) / link).resolve().read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert name.startswith("test_")
            assert re.search(rf"^\s*(?:async )?def {name}\(", source, re.MULTILINE), name


def test_invariants_are_exactly_the_rules_of_the_checker() -> None:
    named = {name for row in ROWS for name in row[2].split("; ")} - {"—"}
    assert named == {str(rule) for rule in Rule}
