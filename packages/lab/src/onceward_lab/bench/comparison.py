"""The chart ``compare.svg``: Onceward compared with bare code and with other libraries.

A logarithmic axis around 1, and lines for the spread.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from onceward_lab.bench.svg import conditions, element, page, text

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
        body.append(text(20, y + 20, title, "section"))
        y += _SECTION_TITLE
        body += _grid(y, y + _ROW * len(rows))
        for label, result in rows:
            body += _bar(y, label, result)
            y += _ROW
        y += 6
    return _page(body, y, conditions(found.get("runs", {})))


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
        text(_PLOT_LEFT - 12, middle + 4.5, label, "label", anchor="end"),
        element("rect", kind, x=left, y=top, width=width, height=_BAR),
    ]
    if ratio < _MIN:  # the bar is longer than the axis
        arrow = f"M{left - 7:.1f} {middle:.1f} l7 -7 v14 z"
        parts.append(element("path", kind, d=arrow))
    elif least is not None and most is not None:
        parts.append(element("line", "spread", x1=_x(least), y1=middle, x2=_x(most), y2=middle))
    spread = "" if least is None or most is None else f" ({least:.2f} to {most:.2f})"
    value = f"{ratio:.2f}x{spread}"
    return [*parts, text(_WIDTH - 20, middle + 4.5, value, "value", anchor="end")]


def _grid(top: float, bottom: float) -> list[str]:
    return [
        element(
            "line", "one" if ratio == 1 else "grid", x1=_x(ratio), y1=top, x2=_x(ratio), y2=bottom
        )
        for ratio, _ in _TICKS
    ]


def _page(body: Sequence[str], bottom: float, measured: str) -> str:
    legend = (
        "Right of 1x is faster, left is slower (logarithmic). Bar: median of the rounds; "
        "line: slowest to fastest round."
    )
    axis = [
        text(_x(ratio), bottom + 12, label, "faint", anchor="middle") for ratio, label in _TICKS
    ]
    return page(
        "Throughput compared with bare code and other libraries",
        [legend],
        [*body, *axis, text(20, bottom + 40, measured, "faint")],
        size=(_WIDTH, bottom + 52),
    )
