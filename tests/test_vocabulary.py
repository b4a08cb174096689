"""Retired words do not come back into code, tests or documentation.

``docs/glossary.md`` has the words to use. Each pattern below is a word or phrase that was replaced,
with its replacement. Identifiers are split first: ``is_told`` and ``IsTold`` read as "is told".
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("packages", "docs", "examples", "tests")
FILES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "mkdocs.yml", "conftest.py")
SUFFIXES = {".py", ".sql", ".md", ".svg", ".yml"}

RETIRED = {
    # Metaphors.
    r"bells?": "notifier, notification",
    r"(?:rings?|rang) (?:the|a) \w+": "notify",
    r"nursery|nurseries": "fork server",
    r"besieg\w+": "fault injector, inject faults",
    r"sieges?": "chaos run",
    r"tortur\w+": "simulation, simulate",
    r"forts?": "cluster",
    r"unwatched|watchers?": "metrics, no-op metrics",
    r"bury|buried|buries|burying": "dead-letter",
    r"wish(?:es|ed)?": "options, arguments",
    r"desks?": "admin, service",
    r"(?:throws?|thrown|rolls?) (?:no |the )?dice": "use randomness",
    r"(?:is|are|was|gets?) tired": "attempts exhausted",
    r"(?:takes?|took) (?:its|their) leave": "stops, ends",
    r"(?:puts?|putting) aside": "discard, settle",
    r"lets? go": "release",
    r"by hands?": "manually, by an operator, by the user",
    r"looks? away": "ignore",
    # Private words for standard things.
    r"rooms? of (?:its|their|our) own": "module, package",
    r"rooms?": "module, namespace, package, capacity",
    r"(?<!\.)dialects?": "error format",  # SQLAlchemy's attribute keeps its name
    r"intakes?": "idempotency, guard",
    r"(?:the|in|no|some) troubles?|troubles": "error, failure",
    r"whoever": "name the subject: the caller, the worker, an operator",
    r"(?:is|are|was|were|be|been|being) told": "gets, is reported, is logged",
    r"stands? (?:in|for|beside|behind|still|at|as|here|below|above|there)": "is, means, replaces",
    r"(?:gives?|given|gave|giving) back": "release",
    # Documents that readers do not have.
    r"(?<!rfc \d{4} )§ ?\d": "cite docs/reference/protocol.md by heading",
    r"seed 00\d": "cite docs/reference/protocol.md by heading",
    r"the contract(?:'s)?(?! (?:suite|tests?)s?)": "the protocol",
}
_RETIRED = {
    re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])"): hint for pattern, hint in RETIRED.items()
}
# Names that stay: data of older versions, and values that dashboards query.
KEPT = {
    r'"torture"|"siege"': "former names of commands, which the command line still recognizes",
    r"[\"`]given_back[\"`]": "value of the label outcome of onceward_job_seconds",
    r"[Tt]he contract of ``ports": "what every adapter of a port must do",
}
_KEPT = re.compile("|".join(KEPT))
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Hit(NamedTuple):
    """A retired word in a file."""

    path: str
    line: int
    words: str
    hint: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: "{self.words}" → {self.hint}'


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path != Path(__file__):
                yield path
    yield from (ROOT / name for name in FILES)


def hits_in(text: str, path: str = "") -> list[Hit]:
    """Find retired words, also where a line break or an underscore separates them."""
    kept = _KEPT.sub(lambda match: " " * len(match[0]), text)
    plain = _CAMEL.sub(" ", kept).replace("_", " ")
    # A line break within a phrase counts as a space; lines are counted in the text with breaks.
    flat = plain.replace("\n", " ").lower()
    return [
        Hit(path, plain.count("\n", 0, match.start()) + 1, match[0], hint)
        for pattern, hint in _RETIRED.items()
        for match in pattern.finditer(flat)
    ]


def all_hits() -> list[Hit]:
    return [
        hit
        for path in sources()
        for hit in hits_in(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]


def test_no_retired_word_is_used() -> None:
    hits = all_hits()
    assert not hits, f"{len(hits)} retired words:\n" + "\n".join(str(hit) for hit in hits)


@pytest.mark.parametrize(
    "text",
    [
        "ring_the_bell()",
        "class Bell:",
        "JobWatcher",
        "the caller is\ntold",
        "contract §4",
        "a room of its own",
        "it stands for a key",
    ],
)
def test_retired_words_are_found(text: str) -> None:
    assert hits_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "an effort",
        "RFC 9110 §11.6.1",
        "the contract suite",
        "comfortable",
        "a mushroom",
        "label",
        "engine.dialect.name",
    ],
)
def test_other_words_are_not_found(text: str) -> None:
    assert not hits_in(text)


if __name__ == "__main__":
    for hit in all_hits():
        print(hit)
