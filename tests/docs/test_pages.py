"""Links, titles and pictures of the pages, and sections that must exist."""

import re
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, anchors, links, name_of, prose


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_point_to_existing_files_and_headings(page: Path) -> None:
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", link
            continue
        target = page if not parts.path else (page.parent / parts.path).resolve()
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if parts.fragment:
            assert parts.fragment in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_begins_with_its_only_title(page: Path) -> None:
    text = prose(page)
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1


def test_every_page_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    left = [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in seen:
            continue
        seen.add(page)
        paths = (urlsplit(link).path for link in links(page))
        found = ((page.parent / path).resolve() for path in paths if path.endswith(".md"))
        left += [target for target in found if target in PAGES]
    missing = {name_of(page) for page in set(PAGES) - seen}
    assert missing == set()


def test_decision_numbers_are_unique() -> None:
    numbers = [page.name[:4] for page in sorted((DOCS / "decisions").glob("*.md"))]
    assert all(number.isdigit() for number in numbers)
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("page", sorted((DOCS / "decisions").glob("*.md")), ids=name_of)
def test_decision_has_context_choice_and_rejected(page: Path) -> None:
    assert {"context", "choice", "rejected"} <= anchors(page)


def test_changelog_begins_with_the_current_or_the_next_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    project = (ROOT / "packages/onceward/pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(\d+)\.(\d+)\.(\d+)"$', project, re.MULTILINE)
    assert version is not None
    entries = re.findall(
        r"^## \[(\d+)\.(\d+)\.(\d+)\] - (Unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE
    )
    assert len(entries) == len(re.findall(r"^## ", text, re.MULTILINE))
    current = tuple(map(int, version.groups()))
    *newest, date = entries[0]
    numbers = tuple(map(int, newest))
    assert numbers == current or (numbers > current and date == "Unreleased")


MAX_WORDS = 80_000
BOOKS = ("guard-a-fastapi-app", "jobs", "offline-app")
MAX_WORDS_OF_A_BOOK = 3_000


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def test_documentation_is_at_most_80_000_words() -> None:
    pages = [page for page in PAGES if page.parent != ROOT]
    assert sum(words(page) for page in pages) <= MAX_WORDS


@pytest.mark.parametrize("name", BOOKS)
def test_book_is_short(name: str) -> None:
    assert words(DOCS / f"how-to/{name}.md") <= MAX_WORDS_OF_A_BOOK


def test_readme_and_home_page_open_alike() -> None:
    openings = [
        re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8")).partition("pip install")[0]
        for page in (ROOT / "README.md", DOCS / "index.md")
    ]
    assert openings[0] == openings[1]
    assert "kill -9" in openings[0]


def test_pictures_are_well_formed_with_title_description_and_dark_mode() -> None:
    for picture in (DOCS / "images").glob("*.svg"):
        root = ET.parse(picture).getroot()
        names = {element.tag.rpartition("}")[2] for element in root}
        assert {"title", "desc"} <= names
        assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8")


# Records of decisions with more words than others, and why.
MAX_DECISION_WORDS = 350
LONG_DECISIONS = {
    "0001": "lists all records",
    "0002": "one row for each dependency",
    "0003": "the argument for the whole design",
    "0004": "four layers of the request, with numbers",
    "0007": "errors, redirects and requests without a key are one rule",
    "0012": "every mechanism of the queue",
    "0015": "every mechanism of the outbox",
    "0043": "one row for each index",
    "0053": "every way in which a failover could lose a commit",
    "0059": "hashes of vendored files",
}
DECISIONS = sorted(page for page in PAGES if page.parent.name == "decisions")


@pytest.mark.parametrize("page", DECISIONS, ids=name_of)
def test_decision_is_short_or_has_a_reason(page: Path) -> None:
    words = len(page.read_text(encoding="utf-8").split())
    assert words <= (900 if page.name[:4] in LONG_DECISIONS else MAX_DECISION_WORDS)
