"""The guarantees page: every promise names tests that exist and invariants that are checked."""

import re
from pathlib import Path

import pytest

from holdfast_lab.checker import Rule
from tests.docs.pages import DOCS, anchors

PAGE = DOCS / "guarantees.md"
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


def test_every_promise_has_its_row_and_no_other() -> None:
    assert [row[0] for row in ROWS] == [
        f"[{promise}](#{anchor_of(promise)})" for promise in promises()
    ]
    assert {anchor_of(promise) for promise in promises()} <= anchors(PAGE)


@pytest.mark.parametrize("row", ROWS, ids=[row[0].partition("]")[0][1:] for row in ROWS])
def test_every_test_that_a_promise_names_exists(row: list[str]) -> None:
    found = _LINK_AND_NAMES.findall(row[1])
    assert found
    # Nothing stands in the cell that was not looked at.
    assert _LINK_AND_NAMES.sub("", row[1]).replace(",", "").strip() == ""
    for link, names in found:
        source = (Path(PAGE.parent) / link).resolve().read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert name.startswith("test_")
            assert re.search(rf"^\s*(?:async )?def {name}\(", source, re.MULTILINE), name


def test_every_invariant_is_one_of_the_checkers_and_each_is_named() -> None:
    named = {name for row in ROWS for name in row[2].split("; ")} - {"—"}
    assert named == {str(rule) for rule in Rule}
