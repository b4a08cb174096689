"""The outbox page shows the transition table of the code and every event."""

import runpy

from onceward_outbox import EventKind
from onceward_outbox.entry import TRANSITIONS, Transition
from tests.docs.pages import DOCS

SCRIPT = runpy.run_path(str(DOCS / "outbox_states.py"))
PAGE = DOCS / "reference" / "outbox.md"


def test_diagram_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == SCRIPT["rewritten"](text), "run: python docs/outbox_states.py"
    assert "pending --> in_flight: claim" in text


def test_diagram_has_every_transition() -> None:
    drawn = SCRIPT["diagram"]()
    for action, ways in TRANSITIONS.items():
        for before, after in ways.items():
            (line,) = [
                line
                for line in drawn.splitlines()
                if line.strip().startswith(f"{before} --> {after}:")
            ]
            assert action in line.partition(": ")[2].split(", ")
    assert set(SCRIPT["MEANINGS"]) == set(Transition)


def test_page_has_every_event() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{kind}`" in text for kind in EventKind)
