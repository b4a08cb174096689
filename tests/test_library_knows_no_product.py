"""The library names no product: services bring their policies, profiles and commands themselves."""

import re
from pathlib import Path

PACKAGES = Path(__file__).parents[1] / "packages"
LIBRARY = ("protocol", "onceward", "outbox", "operator", "testing", "nats")
WORDS = re.compile(
    r"(?<![a-z])(quests?|walkers?|expenses?|step/ingest|missions?|activity|activities)(?![a-z])",
    re.IGNORECASE,
)
# PostgreSQL's view of its connections.
ALLOWED = re.compile(r"pg_stat_activity")


def test_the_source_of_the_library_has_no_word_of_a_product() -> None:
    hits = [
        f"{path.relative_to(PACKAGES)}:{number}: {line.strip()}"
        for package in LIBRARY
        for path in sorted((PACKAGES / package / "src").rglob("*"))
        if path.is_file() and path.suffix in {".py", ".sql", ".html", ".toml", ".json", ".md"}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if WORDS.search(ALLOWED.sub("", line))
    ]
    assert hits == []
