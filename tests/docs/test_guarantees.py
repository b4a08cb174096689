"""The guarantees page: every promise names existing tests and known invariants."""

import re
from pathlib import Path

import pytest

from onceward_lab.checker import Rule
from tests.docs.pages import DOCS

PAGE = DOCS / "concepts" / "guarantees.md"
TEXT = PAGE.read_text(encoding="utf-8")
_TEST = re.compile(r"\[`(\w+)`\]\(([^)]+)\)")


def promises() -> dict[str, str]:
    """Return the text of each promise by its title."""
    found = {}
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE):
        if section.startswith("Promises"):
            for promise in section.split("\n### ")[1:]:
                title, _, text = promise.partition("\n")
                assert title not in found
                found[title] = text
    return found


PROMISES = promises()


def evidence_of(promise: str) -> tuple[str, set[str]]:
    """Return the part of a promise that names its tests, and its invariants."""
    tests, _, invariants = PROMISES[promise].partition("\nTests: ")[2].partition("\nInvariants: ")
    return tests, set(invariants.strip().removesuffix(".").split("; ")) - {""}


def test_page_has_promises() -> None:
    assert len(PROMISES) > 40


@pytest.mark.parametrize("promise", PROMISES)
def test_tests_named_by_a_promise_exist(promise: str) -> None:
    tests, _ = evidence_of(promise)
    found = _TEST.findall(tests)
    assert found
    # The line holds nothing but names with links.
    assert _TEST.sub("", tests).translate(str.maketrans("", "", ",.\n ")) == ""
    for name, link in found:
        source = (Path(PAGE.parent) / link).resolve().read_text(encoding="utf-8")
        assert name.startswith("test_")
        assert re.search(rf"^\s*(?:async )?def {name}\(", source, re.MULTILINE), name


def test_invariants_are_exactly_the_rules_of_the_checker() -> None:
    named = set[str]().union(*(evidence_of(promise)[1] for promise in PROMISES))
    assert named == {str(rule) for rule in Rule}
