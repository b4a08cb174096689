"""The table of layers in the architecture page follows pyproject.toml."""

import runpy

from tests.docs.pages import DOCS

SCRIPT = runpy.run_path(str(DOCS / "layers_table.py"))
PAGE = DOCS / "concepts" / "architecture.md"


def test_layers_table_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == SCRIPT["rewritten"](text), "run: python docs/layers_table.py"


def test_every_layer_is_described_and_no_other() -> None:
    (rule,) = [rule for rule in SCRIPT["contracts"]() if rule.get("containers") == ["onceward"]]
    modules = {name.strip() for layer in rule["layers"] for name in layer.split("|")}
    assert modules == set(SCRIPT["MEANINGS"])
