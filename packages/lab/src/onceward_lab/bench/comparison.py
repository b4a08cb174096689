"""The chart ``compare.svg``: Onceward compared with bare code and with other libraries.

Plain SVG instead of pygal: it needs a logarithmic axis around 1, lines for the spread, and colours
for light and dark pages.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

__all__ = ["draw_comparison"]


class Row(NamedTuple):
    """One bar: a measurement by group and name, and its label in the chart."""

    group: str
    name: str
    label: str


class Section(NamedTuple):
    """Bars with the same baseline."""

    title: str
    rows: Sequence[Row]


_POSTGRES = "idempotency on PostgreSQL ÷ bare handler"
_SQLITE = "idempotency on SQLite ÷ bare handler"
_ENQUEUE_1 = "enqueue in a transaction, 1 connection ÷ best peer"
_ENQUEUE_8 = "enqueue in a transaction, 8 connections ÷ best peer"
_NO_OP = "no-op jobs ÷ best peer"
_WRITE = "jobs that write a row ÷ best peer"
_JOBS_SQLITE = "jobs on SQLite ÷ raw claim and completion"
_OUTBOX = "outbox, one enqueue ÷ raw commit"
_DRAIN = "outbox, drain on loopback ÷ bare httpx loop"

SECTIONS: Sequence[Section] = (
    Section(
        "HTTP requests on PostgreSQL; 1x is the same handler without Onceward",
        (
            Row(_POSTGRES, "guarded", "Onceward, new request"),
            Row(_POSTGRES, "replays from the store", "Onceward, replay from the database"),
            Row(_POSTGRES, "replays from memory", "Onceward, replay from memory"),
            Row(
                "planning and field on PostgreSQL",
                "versioned PATCH, guarded ÷ bare",
                "Onceward, PATCH with version check",
            ),
            Row(_POSTGRES, "idemkit", "idemkit, new request"),
            Row(_POSTGRES, "idemkit, replays", "idemkit, replay"),
            Row(_POSTGRES, "bare, pool tuned", "no library, tuned connection pool"),
        ),
    ),
    Section(
        "HTTP requests on SQLite; 1x is the same handler without Onceward (aiosqlite)",
        (
            Row(_SQLITE, "guarded", "Onceward, new request"),
            Row(_SQLITE, "replays from the store", "Onceward, replay from the database"),
            Row(_SQLITE, "replays from memory", "Onceward, replay from memory"),
            Row(_SQLITE, "bare, one hop to a thread", "no library, tuned (one thread hop)"),
        ),
    ),
    Section(
        "Jobs on PostgreSQL; 1x is pgqueuer",
        (
            Row(_ENQUEUE_1, "Onceward", "Onceward, enqueue, 1 connection"),
            Row(_ENQUEUE_1, "procrastinate", "procrastinate, enqueue, 1 connection"),
            Row(_ENQUEUE_8, "Onceward", "Onceward, enqueue, 8 connections"),
            Row(_ENQUEUE_8, "procrastinate", "procrastinate, enqueue, 8 connections"),
            Row(_NO_OP, "Onceward, concurrency 512", "Onceward, no-op jobs"),
            Row(_NO_OP, "procrastinate, concurrency 64", "procrastinate, no-op jobs"),
            Row(_WRITE, "Onceward, in the job's transaction", "Onceward, jobs that write a row"),
            Row(
                _WRITE,
                "procrastinate, in a separate transaction",
                "procrastinate, jobs that write a row",
            ),
        ),
    ),
    Section(
        "Jobs on SQLite; 1x is a loop that commits each claim and completion",
        (
            Row(_JOBS_SQLITE, "Onceward, concurrency 64", "Onceward, no-op jobs"),
            Row(_JOBS_SQLITE, "Onceward, each writes a row", "Onceward, jobs that write a row"),
        ),
    ),
    Section(
        "Outbox, one durable enqueue; 1x is a raw SQLite commit of the same row",
        (
            Row(_OUTBOX, "Onceward", "Onceward"),
            Row(
                "outbox, encrypted enqueue ÷ raw commit",
                "Onceward",
                "Onceward, encrypted (1x encrypted too)",
            ),
            Row(_OUTBOX, "persist-queue at FULL", "persist-queue"),
            Row(_OUTBOX, "litequeue at FULL", "litequeue"),
        ),
    ),
    Section(
        "Outbox, drain over HTTP; 1x is a bare httpx loop with the same requests",
        (
            Row(_DRAIN, "in lanes", "Onceward, independent entries"),
            Row(_DRAIN, "strictly in order", "Onceward, strictly in order"),
            Row(_DRAIN, "in lanes, encrypted", "Onceward, encrypted"),
            Row(_DRAIN, "to the field service on SQLite", "Onceward, to a real service"),
        ),
    ),
)

_WIDTH = 860
_PLOT_LEFT, _PLOT_RIGHT = 292, 684
_MIN, _MAX = 1 / 8, 8
_TICKS = (
    (1 / 8, "1/8x"),
    (1 / 4, "1/4x"),
    (1 / 2, "1/2x"),
    (1, "1x"),
    (2, "2x"),
    (4, "4x"),
    (8, "8x"),
)
_ROW, _BAR = 22, 12
_HEAD = 68
_SECTION_TITLE = 30
_CSS = """
  text { font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 17px; font-weight: 600; }
  .section { font-weight: 600; }
  .faint { fill: #59636e; font-size: 12px; }
  .paper { fill: #ffffff; stroke: #d8dee4; }
  .grid { stroke: #d8dee4; }
  .one { stroke: #59636e; stroke-width: 1.5; }
  .ours { fill: #1b7f5c; }
  .other { fill: #9aa4af; }
  .spread { stroke: #1f2328; stroke-width: 1.2; opacity: 0.75; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .faint { fill: #9198a1; }
    .paper { fill: #0d1117; stroke: #30363d; }
    .grid { stroke: #30363d; }
    .one { stroke: #9198a1; }
    .ours { fill: #2f9e77; }
    .other { fill: #6e7781; }
    .spread { stroke: #e6edf3; }
  }
"""


def draw_comparison(found: Mapping[str, Any]) -> str | None:
    """Return the chart as SVG; None if there are no results for it.

    Rows without a result are left out. So is a section whose baseline, the fastest peer of the
    run, is not the one in its title.
    """
    results = {(row["group"], row["name"]): row for row in found.get("measurements", [])}
    sections = [
        (
            section.title,
            [(row.label, results[row[:2]]) for row in section.rows if row[:2] in results],
        )
        for section in SECTIONS
        if not ("pgqueuer" in section.title and _other_baseline(section, results))
    ]
    sections = [(title, rows) for title, rows in sections if rows]
    if not sections:
        return None
    body: list[str] = []
    y = _HEAD
    for title, rows in sections:
        body.append(_text(20, y + 20, title, "section"))
        y += _SECTION_TITLE
        body += _grid(y, y + _ROW * len(rows))
        for label, result in rows:
            body += _bar(y, label, result)
            y += _ROW
        y += 6
    return _page(body, y, _conditions(found.get("runs", {})))


def _other_baseline(section: Section, results: Mapping[tuple[str, str], Any]) -> bool:
    """Return whether another peer than pgqueuer was the fastest in one of the groups."""
    groups = {row.group for row in section.rows}
    baselines = [
        name
        for (group, name), row in results.items()
        if group in groups and (row["ratio"], row["least"], row["most"]) == (1, 1, 1)
    ]
    return any(not name.startswith("pgqueuer") for name in baselines)


def _x(ratio: float) -> float:
    share = math.log(min(max(ratio, _MIN), _MAX) / _MIN) / math.log(_MAX / _MIN)
    return _PLOT_LEFT + share * (_PLOT_RIGHT - _PLOT_LEFT)


def _bar(y: float, label: str, result: Mapping[str, Any]) -> list[str]:
    ratio, least, most = result["ratio"], result["least"], result["most"]
    left, right = sorted((_x(1), _x(ratio)))
    kind = "ours" if label.startswith("Onceward") else "other"
    middle = y + _ROW / 2
    top, width = middle - _BAR / 2, max(right - left, 1)
    parts = [
        _text(_PLOT_LEFT - 12, middle + 4.5, label, "label", anchor="end"),
        _element("rect", kind, x=left, y=top, width=width, height=_BAR),
    ]
    if ratio < _MIN:  # the bar is longer than the axis
        arrow = f"M{left - 7:.1f} {middle:.1f} l7 -7 v14 z"
        parts.append(_element("path", kind, d=arrow))
    elif least is not None and most is not None:
        parts.append(_element("line", "spread", x1=_x(least), y1=middle, x2=_x(most), y2=middle))
    spread = "" if least is None or most is None else f" ({least:.2f} to {most:.2f})"
    value = f"{ratio:.2f}x{spread}"
    return [*parts, _text(_WIDTH - 20, middle + 4.5, value, "value", anchor="end")]


def _grid(top: float, bottom: float) -> list[str]:
    return [
        _element(
            "line", "one" if ratio == 1 else "grid", x1=_x(ratio), y1=top, x2=_x(ratio), y2=bottom
        )
        for ratio, _ in _TICKS
    ]


def _page(body: Sequence[str], bottom: float, conditions: str) -> str:
    height = bottom + 52
    size = f'viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" height="{height:.0f}"'
    title = "Throughput compared with bare code and other libraries"
    legend = (
        "Right of 1x is faster, left is slower (logarithmic). Bar: median of the rounds; "
        "line: slowest to fastest round."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{title}</title>",
            f"<style>{_CSS}</style>",
            _element("rect", "paper", x=0.5, y=0.5, width=_WIDTH - 1, height=height - 1, rx=8),
            _text(20, 32, title, "title"),
            _text(20, 54, legend, "faint"),
            *body,
            *(
                _text(_x(ratio), bottom + 12, label, "faint", anchor="middle")
                for ratio, label in _TICKS
            ),
            _text(20, bottom + 40, conditions, "faint"),
            "</svg>\n",
        ]
    )


def _conditions(runs: Mapping[str, Any]) -> str:
    """Return when and where the results were measured."""
    if not runs:
        return "Measured by onceward bench."
    dates = sorted(str(run["at"])[:10] for run in runs.values() if "at" in run)
    last = max(runs.values(), key=lambda run: str(run.get("at", "")))
    where = ", ".join(
        text
        for text in (
            f"{last['cores']} cores" if "cores" in last else "",
            f"Python {last['python']}" if "python" in last else "",
            "fsync on",
            dates[-1] if dates else "",
        )
        if text
    )
    return f"Measured by onceward bench: contenders in turns; {where}."


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _element(name: str, kind: str, **attributes: float | str) -> str:
    written = " ".join(
        f'{key}="{value}"' if isinstance(value, str) else f'{key}="{value:.1f}"'
        for key, value in attributes.items()
    )
    return f'<{name} class="{kind}" {written}/>'
