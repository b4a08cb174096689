"""The page about the outbox shows the table that decides, and every event by its name."""

import runpy

from holdfast.core.outbox_entry import TRANSITIONS, Action
from holdfast.outbox import EventKind
from tests.docs.pages import DOCS

SCRIPT = runpy.run_path(str(DOCS / "outbox_states.py"))
PAGE = DOCS / "reference" / "outbox.md"


def test_the_diagram_is_drawn_from_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == SCRIPT["rewritten"](text), "run: python docs/outbox_states.py"
    assert "pending --> in_flight: claim" in text


def test_every_transition_is_in_the_diagram() -> None:
    drawn = SCRIPT["diagram"]()
    for action, ways in TRANSITIONS.items():
        for before, after in ways.items():
            (line,) = [
                line
                for line in drawn.splitlines()
                if line.strip().startswith(f"{before} --> {after}:")
            ]
            assert action in line.partition(": ")[2].split(", ")
    assert set(SCRIPT["MEANINGS"]) == set(Action)


def test_every_event_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{kind}`" in text for kind in EventKind)
