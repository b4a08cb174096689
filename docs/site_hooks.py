"""MkDocs hooks: decisions, state diagrams as tables, copies of files, weights in the search.

Operations of the outbox are linked to their signatures, which only the site has.
decisions.md gets a list of all decisions: a new one needs no line anywhere. A Mermaid state
diagram, which a repository's web page draws, becomes a table: drawing it needs a script that the
theme loads from another host.

Pages link to tests, examples and project files by their relative path, which works on a
repository's web page. The site holds only ``docs/``, so a hook adds each linked file under
``repository/`` and points the link at the copy. A link to a file that does not exist stays as it
is, and the strict build fails on it.
"""  # noqa: INP001 - a script beside the pages

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Project files with a place in the navigation.
NAMED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "README.md": "index.md",
}
# Shown as they are. Other files get the ending .txt, so that a browser shows the text.
SHOWN = {".md", ".svg", ".png", ".json", ".txt"}

# How much a page counts in the search of the site, by the beginning of its path: guides before
# signatures, and both before records of decisions. The first that fits.
SEARCH_BOOST = {
    "how-to/guard-a-fastapi-app.md": 4.0,
    "how-to/jobs.md": 4.0,
    "how-to/offline-app.md": 4.0,
    "how-to/": 2.0,
    "quickstart.md": 2.0,
    "concepts/guarantees.md": 1.5,
    "reference/api/": 0.3,
    "decisions/": 0.3,
    "services/": 0.5,
    "repository/": 0.2,
    "changelog.md": 0.2,
}

# Inline links, and reference definitions such as "[test]: ../tests/test_x.py".
_LINK = re.compile(r"(?:(?<=\]\()|(?<=\]: ))(?![a-z]+:)([^)#\s]+)(?=[)#]|$)", re.MULTILINE)

# A state diagram, and its arrows.
_DIAGRAM = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ARROW = re.compile(r"^ *(\S+) --> (\S+): (.+)$", re.MULTILINE)

# A public method of a class, and a name or call in a page.
_METHOD = re.compile(r"^    def ([a-z]\w*)\(", re.MULTILINE)
_NAME = re.compile(r"`(\w+)(?:\([^`]*\))?`")


def site_path(target: Path) -> str:
    """Return where the site has a file of the repository."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    path = target.relative_to(ROOT).as_posix()
    if path in NAMED:
        return NAMED[path]
    return f"repository/{path}" if target.suffix in SHOWN else f"repository/{path}.txt"


def linked(source: Path, text: str) -> set[Path]:
    """Return the files outside ``docs/`` that a page links to."""
    targets = {(source.parent / link).resolve() for link in _LINK.findall(text)}
    return {
        target
        for target in targets
        if target.is_file() and target.is_relative_to(ROOT) and not target.is_relative_to(DOCS)
    }


def decisions() -> str:
    """Return the list of all decisions, in Markdown."""
    pages = sorted((DOCS / "decisions").glob("0*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages]
    return "".join(
        f"- [{title}](decisions/{page.name})\n" for page, title in zip(pages, titles, strict=True)
    )


def state_table(diagram: str) -> str:
    """Return a table of a Mermaid state diagram: a row for each state, a column for each target."""
    arrows = [(found[1], found[2], found[3]) for found in _ARROW.finditer(diagram)]
    targets = list(dict.fromkeys(after for _, after, _ in arrows))
    rows = [
        "| from \\ to | " + " | ".join(_state(after, "removed") for after in targets) + " |",
        "| --- |" + " --- |" * len(targets),
    ]
    for before in dict.fromkeys(before for before, _, _ in arrows):
        by = {after: actions for source, after, actions in arrows if source == before}
        cells = (by.get(after, "").replace(", ", "<br>") for after in targets)
        rows.append(f"| {_state(before, 'new')} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def with_operations_linked(page: str) -> str:
    """Link the operations that the page of the outbox lists to their signatures."""
    before, heading, rest = page.partition("## Operations\n")
    section, end, after = rest.partition("\n### ")
    folder = ROOT / "packages/outbox/src/onceward_outbox"
    files = ("entries.py", "maintenance.py", "queue.py")
    sources = [(folder / name).read_text(encoding="utf-8") for name in files]
    names = {name for source in sources for name in _METHOD.findall(source)}

    def linked_name(found: re.Match[str]) -> str:
        is_operation = found[1] in names
        return f"[{found[0]}][onceward_outbox.OutboxQueue.{found[1]}]" if is_operation else found[0]

    return before + heading + _NAME.sub(linked_name, section) + end + after


def search_boost(path: str) -> float:
    """Return the weight of a page in the search of the site."""
    return next((boost for start, boost in SEARCH_BOOST.items() if path.startswith(start)), 1.0)


def _state(name: str, outside: str) -> str:
    return f"*{outside}*" if name == "[*]" else f"`{name}`"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the named project files, and every file that a page links to."""
    found = [ROOT / name for name in NAMED if NAMED[name] != "index.md"]
    pages = [Path(str(file.abs_src_path)) for file in files.documentation_pages()]
    seen: set[Path] = set()
    while pages or found:
        for page in pages:
            found += linked(page, page.read_text(encoding="utf-8"))
        pages = []
        for target in found:
            if target in seen or site_path(target) == "index.md":
                continue
            seen.add(target)
            files.append(File.generated(config, site_path(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                pages.append(target)
        found = []
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave ``docs/`` at the copies, and weigh the page for the search."""
    del config, files
    page.meta["search"] = {"boost": search_boost(page.file.src_uri)}
    source = Path(str(page.file.abs_src_path))
    here = Path(page.file.src_uri).parent

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[1]).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return link[0]
        return os.path.relpath(site_path(target), here)

    markdown = markdown.replace("<!-- list of decisions -->", decisions())
    if page.file.src_uri == "reference/outbox.md":
        markdown = with_operations_linked(markdown)
    markdown = _DIAGRAM.sub(lambda found: state_table(found[1]), markdown)
    return _LINK.sub(moved, markdown)
