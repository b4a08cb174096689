"""What people and scripts get to see: one-line complaints, tables, plain columns, JSON."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Failure", "complain", "print_json", "print_table", "shown", "warn", "without_password"]


# Ids and keys are there to be copied, and times to be compared: they stay in one piece.
_NAMES: Final = frozenset({"id", "key"})
_WHOLE: Final = _NAMES | {"enqueued", "due", "died", "failed"}
_FOLDED: Final = 8
_PADDING: Final = 3


class Failure(Exception):  # noqa: N818 - what the person is told, not a fault of the program
    """Ends a command with one line on stderr and an exit code: 2 for bad input, 1 for the rest."""

    def __init__(self, line: str, code: int = 1) -> None:
        """Keep the line and the code."""
        super().__init__(line)
        self.code = code


def complain(line: str) -> None:
    """Tell a person on stderr, in one line."""
    print(f"holdfast: {' '.join(shown(line).split())}", file=sys.stderr, flush=True)


def warn(line: str) -> None:
    """Tell a person about something that does not stop the command."""
    complain(f"warning: {line}")


def print_json(value: Any) -> None:
    """Write JSON for a script."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table in colour on a terminal, columns with tabs into a pipe."""
    if not sys.stdout.isatty():
        for row in (headings, *rows):
            print("\t".join(shown(cell) for cell in row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    cells = [[shown(cell) for cell in row] for row in rows]
    if _least_width(headings, cells) > console.width:
        _print_blocks(console, headings, cells)
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="bold cyan")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in _WHOLE)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _least_width(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return what the columns need if nothing is broken in two that should stay whole."""
    width = 0
    for at, heading in enumerate(headings):
        longest = max((len(cell) for row in rows for cell in row[at].split("\n")), default=0)
        width += max(len(heading), longest if heading in _WHOLE else min(longest, _FOLDED))
        width += _PADDING
    return width


def _print_blocks(
    console: "Console", headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Write each row over several lines, for a narrow terminal: what it is, then the rest."""
    from rich.padding import Padding
    from rich.text import Text

    names = [at for at, heading in enumerate(headings) if heading in _NAMES]
    name = names[0] if names else 0
    for row in rows:
        console.print(Text(row[name], style="bold"), soft_wrap=True)
        facts = [
            Text.assemble((f"{heading} ", "cyan"), cell)
            for at, (heading, cell) in enumerate(zip(headings, row, strict=True))
            if at != name
        ]
        console.print(Padding(Text("  ").join(facts), (0, 0, 0, 2)))


def shown(text: str) -> str:
    """Make a stored text safe to show: no tabs or escape sequences reach the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def without_password(url: str) -> str:
    """Write a database URL so that it can be shown."""
    scheme, mark, rest = url.partition("://")
    sign_in, at, place = rest.rpartition("@")
    if not at or ":" not in sign_in:
        return url
    return f"{scheme}{mark}{sign_in.partition(':')[0]}:***@{place}"
