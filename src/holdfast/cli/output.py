"""What people and scripts get to see: one-line complaints, tables, plain columns, JSON."""

import json
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["Failure", "complain", "print_json", "print_table", "shown", "warn", "without_password"]


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

    table = Table(box=box.SIMPLE_HEAD, header_style="bold cyan")
    for heading in headings:
        # A key is there to be copied: it is the last to be broken over two lines.
        table.add_column(heading, overflow="fold", no_wrap=heading == "key")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    Console().print(table)


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
