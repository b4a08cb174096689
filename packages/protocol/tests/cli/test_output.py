"""Tables on wide and narrow terminals."""

import re
import sys
from datetime import UTC, datetime, timedelta

import pytest

from onceward_protocol.cli.output import print_table, shown_instant

ID = "0192f1d2-7f6b-4f5e-8f10-9f1c2d3e4f50"
TIME = "2026-11-16T13:10:48.123Z"
HEADINGS = ("id", "tenant", "queue", "type", "state", "attempts", "enqueued", "due")
ROW = (ID, "an-organisation", "default", "routes.generate", "waiting", "0/5", TIME, TIME)


def on_a_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(HEADINGS, [ROW, ROW])
    return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()


@pytest.mark.parametrize("columns", [40, 80, 100, 140, 200])
def test_ids_and_times_are_not_wrapped(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = on_a_terminal(columns, monkeypatch, capsys)
    assert sum(ID in line for line in lines) == 2
    assert sum(line.count(TIME) for line in lines) == 4
    assert max(len(line) for line in lines) <= columns


def test_narrow_terminal_gets_several_lines_per_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = on_a_terminal(80, monkeypatch, capsys)
    assert len(lines) == 6
    assert lines[0] == ID
    assert lines[1].startswith("  tenant an-organisation  queue default")


def test_wide_terminal_gets_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in on_a_terminal(200, monkeypatch, capsys) if line.strip()]
    assert lines[0].split() == list(HEADINGS)
    assert lines[2].split() == list(ROW)


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        (0.2, "0 s ago"),
        (59, "59 s ago"),
        (90, "1 min ago"),
        (7_300, "2 h ago"),
        (100_000, "27 h ago"),
        (200_000, "2 d ago"),
        (-61, "in 1 min"),
    ],
)
def test_instants_are_ages_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, seconds: float, age: str
) -> None:
    at = datetime.now(UTC) - timedelta(seconds=seconds - (0.5 if seconds < 0 else 0))
    assert shown_instant(at) == at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shown_instant(at) == age
    assert shown_instant(None) == "-"
