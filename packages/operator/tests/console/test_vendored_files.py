"""The scripts of others that the console serves are those of the decision record, unchanged."""

import re
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[4]
STATIC = ROOT / "packages/operator/src/onceward_operator/console/static"
LAYOUT = ROOT / "packages/operator/src/onceward_operator/console/templates/layout.html"
OWN = {"console.css", "console.js", "icon.svg"}


def test_vendored_files_have_the_hashes_of_the_decision() -> None:
    decision = (ROOT / "docs/decisions/0059-console.md").read_text(encoding="utf-8")
    recorded = dict(re.findall(r"\| `(\S+\.js)` \|.*`([0-9a-f]{64})`", decision))
    found = {
        path.name: sha256(path.read_bytes()).hexdigest()
        for path in STATIC.iterdir()
        if path.name not in OWN
    }
    assert found == recorded
    assert len(found) == 2


def test_pages_load_only_files_that_are_there() -> None:
    loaded = set(re.findall(r"/static/([\w.-]+)", LAYOUT.read_text(encoding="utf-8")))
    assert loaded == {path.name for path in STATIC.iterdir()}
