"""Output of commands: errors and warnings in one line, tables, tab-separated columns, JSON."""

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "CommandError",
    "instant_text",
    "print_error",
    "print_json",
    "print_json_line",
    "print_table",
    "print_warning",
    "printable",
    "redact_password",
    "shown_instant",
]


# Columns that are never wrapped: ids and keys are copied, times are compared.
_ID_COLUMNS: Final = frozenset({"id", "key"})
_UNWRAPPED: Final = _ID_COLUMNS | {
    *("began", "created", "died", "due", "ended", "enqueued", "expires", "failed", "next try"),
    *("paused", "time"),
}
_MIN_WRAPPED_WIDTH: Final = 8
_PADDING: Final = 2
_UNITS: Final = (("d", 86_400, 2), ("h", 3600, 1), ("min", 60, 1))


class CommandError(Exception):
    """Ends a command with one line on stderr and an exit code: 2 for bad usage, 1 otherwise."""

    def __init__(self, line: str, code: int = 1) -> None:
        super().__init__(line)
        self.code = code


def print_error(line: str) -> None:
    """Print ``onceward: line`` to stderr; line breaks and control characters are removed."""
    print(f"onceward: {' '.join(printable(line).split())}", file=sys.stderr, flush=True)


def print_warning(line: str) -> None:
    """Print a warning to stderr, for a condition that does not end the command."""
    print_error(f"warning: {line}")


def print_json(value: Any) -> None:
    """Print indented JSON to stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """Print JSON on one line, for commands whose last line a script reads."""
    print(json.dumps(value, ensure_ascii=False))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows to stdout: as a table on a terminal, as tab-separated columns otherwise."""
    if not sys.stdout.isatty():
        for row in (headings, *rows):
            print("\t".join(printable(cell) for cell in row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    cells = [[printable(cell) for cell in row] for row in rows]
    if _min_width(headings, cells) > console.width:
        _print_blocks(console, headings, cells)
        return
    table = Table(
        box=box.SIMPLE_HEAD, header_style="bold cyan", padding=(0, 1, 0, 0), pad_edge=False
    )
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in _UNWRAPPED)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _min_width(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of the table with every column wrapped that may be."""
    width = 0
    for index, heading in enumerate(headings):
        longest = max((len(cell) for row in rows for cell in row[index].split("\n")), default=0)
        needed = longest if heading in _UNWRAPPED else min(longest, _MIN_WRAPPED_WIDTH)
        width += max(len(heading), needed) + _PADDING
    return width


def _print_blocks(
    console: "Console", headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print each row over several lines, for a narrow terminal: its id, then the other columns."""
    from rich.text import Text

    id_columns = [index for index, heading in enumerate(headings) if heading in _ID_COLUMNS]
    title = id_columns[0] if id_columns else 0
    for row in rows:
        console.print(Text(row[title], style="bold"), soft_wrap=True)
        lines = [Text()]
        for index, (heading, cell) in enumerate(zip(headings, row, strict=True)):
            if index == title or cell == "-":
                continue
            pair = Text.assemble((f"{heading} ", "cyan"), cell)
            if lines[-1] and lines[-1].cell_len + pair.cell_len + 2 > console.width:
                lines.append(Text())
            lines[-1].append_text(Text("  ") + pair)
        for line in lines:
            console.print(line)


def instant_text(instant: datetime) -> str:
    """Return an instant in UTC with milliseconds, such as ``2026-01-31T09:30:00.000Z``."""
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown_instant(instant: datetime | None) -> str:
    """Return an instant for a table: its age on a terminal, such as ``3 min ago`` or ``in 5 s``."""
    if instant is None:
        return "-"
    if not sys.stdout.isatty():
        return instant_text(instant)
    past = (datetime.now(UTC) - instant).total_seconds()
    seconds = abs(past)
    found = (
        (f"{seconds // size:.0f} {unit}") for unit, size, least in _UNITS if seconds >= size * least
    )
    age = next(found, f"{seconds:.0f} s")
    return f"{age} ago" if past >= 0 else f"in {age}"


def printable(text: str) -> str:
    """Escape control characters other than line breaks, so that none reach the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def redact_password(url: str) -> str:
    """Return a URL with its password replaced by ``***``."""
    scheme, separator, rest = url.partition("://")
    credentials, at, location = rest.rpartition("@")
    if not at or ":" not in credentials:
        return url
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user}:***@{location}"
