"""Pages of the documentation: their blocks, links and anchors."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("packages/*/docs/**/*.md")])
# Pages whose Python blocks run as tests.
RUNNABLE = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    DOCS / "quickstart.md",
    *sorted((DOCS / "how-to").glob("*.md")),
    REFERENCE / "errors.md",
    *sorted((REFERENCE / "api").glob("*.md")),
]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- no-run[^>]*-->\s*\Z")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, its first line, and whether it is run."""

    language: str
    text: str
    line: int
    runs: bool


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=match[1],
            text=match[2],
            line=text.count("\n", 0, match.start()) + 2,
            runs=_NOT_RUN.search(text[: match.start()]) is None,
        )
        for match in _FENCE.finditer(text)
    ]


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def prose(page: Path) -> str:
    """Return a page without its blocks, where brackets are not links."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, in GitHub's form."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in _HEADING.findall(prose(page))
    }
