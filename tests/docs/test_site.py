"""The documentation site builds strictly, and loads nothing from other hosts."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.docs.test_api_reference import MODULES, public_objects

CONFIG = ROOT / "mkdocs.yml"


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


# One process builds the site, which takes longer than all tests of it.
pytestmark = pytest.mark.xdist_group("site")


def test_groups_of_tests_are_known_to_the_processes(request: pytest.FixtureRequest) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@site")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site")
    done = build(CONFIG, path)
    assert done.returncode == 0, done.stderr
    return path


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file()


def test_every_public_name_has_an_anchor_in_the_site(site: Path) -> None:
    pages = (site / "reference/api").glob("*.html")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    anchors = set(re.findall(r'id="(onceward[^"]*)"', text))
    missing = {path for name in MODULES for path, _ in public_objects(name)} - anchors
    assert missing == set()


def test_site_shows_states_as_a_table_and_decisions_on_one_page(site: Path) -> None:
    outbox = (site / "reference/outbox.html").read_text(encoding="utf-8")
    assert "stateDiagram" not in outbox
    assert re.search(r"<td>retry_later<br ?/?>release<br ?/?>watchdog</td>", outbox)
    listed = (site / "decisions.html").read_text(encoding="utf-8")
    for page in (DOCS / "decisions").glob("*.md"):
        link = f'href="decisions/{page.stem}.html"'
        assert link in listed
        assert link not in (site / "index.html").read_text(encoding="utf-8")


def test_operations_of_the_outbox_are_linked_to_their_signatures(site: Path) -> None:
    outbox = (site / "reference/outbox.html").read_text(encoding="utf-8")
    for name in ("enqueue", "entries", "claim_some", "retry_all", "check_integrity"):
        assert f'href="api/outbox.html#onceward_outbox.OutboxQueue.{name}"' in outbox


def test_search_ranks_guides_before_signatures(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    boosts = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in index["docs"]}
    guides = {boosts[f"how-to/{name}.html"] for name in ("guard-a-fastapi-app", "jobs", "operate")}
    signatures = {boost for page, boost in boosts.items() if page.startswith("reference/api/")}
    assert min(guides) > 1 > max(signatures)


class _Resources(HTMLParser):
    """Collects what a browser loads by itself, and links to files."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in {"script", "img", "iframe", "source", "video", "audio"} and "src" in values:
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") not in {"canonical", "prev", "next"}:
            self.loaded.append(values.get("href", ""))
        if tag == "a" and "href" in values:
            self.linked.append(values["href"])
        # The theme fetches Mermaid from another host for elements of this class.
        assert "mermaid" not in values.get("class", "").split()


def test_pages_load_nothing_from_other_hosts_and_link_to_existing_files(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = _Resources()
        found.feed(page.read_text(encoding="utf-8"))
        for url in found.loaded:
            assert not re.match(r"(?:[a-z]+:)?//", url), f"{page.name} loads {url}"
        if page.name == "404.html":  # its links are absolute
            continue
        for url in found.loaded + found.linked:
            path = re.split(r"[?#]", url)[0]
            if path and ":" not in path:
                assert (page.parent / path).exists(), f"{page.name} links to {url}"


def test_style_sheets_load_nothing_from_other_hosts(site: Path) -> None:
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[a link](gone.md)", "gone.md"),
        ("[an anchor](#gone)", "#gone"),
        ("![an image](gone.svg)", "gone.svg"),
        ("[a file](../gone.py)", "gone.py"),
    ],
)
def test_a_broken_reference_fails_the_build(tmp_path: Path, text: str, warning: str) -> None:
    done = build_small_site(tmp_path, text, ["index.md"])
    assert done.returncode != 0
    assert warning in done.stderr


def test_a_missing_page_fails_the_build(tmp_path: Path) -> None:
    done = build_small_site(tmp_path, "", ["index.md", "gone.md"])
    assert done.returncode != 0
    assert "gone.md" in done.stderr


def test_a_page_without_a_place_in_the_navigation_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "extra.md").write_text("# Extra\n")
    done = build_small_site(tmp_path, "", ["index.md"])
    assert done.returncode != 0
    assert "extra.md" in done.stderr


def build_small_site(folder: Path, text: str, nav: list[str]) -> subprocess.CompletedProcess[str]:
    """Build a page with the settings of the real site."""
    (folder / "docs").mkdir(exist_ok=True)
    (folder / "docs" / "index.md").write_text(f"# Page\n\n{text}\n")
    config = folder / "mkdocs.yml"
    config.write_text(f"INHERIT: {CONFIG}\ndocs_dir: docs\nhooks: []\nplugins: []\nnav: {nav}\n")
    return build(config, folder / "site")
