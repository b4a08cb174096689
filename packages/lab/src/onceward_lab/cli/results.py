"""Shows the results of checks: a table and a progress bar on a terminal, lines over a pipe."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from onceward_lab.conformance import Result, Verdict
from onceward_protocol.cli.output import printable

__all__ = ["print_line", "print_table", "showing_progress"]

_STYLES: Final = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.SKIP: "yellow"}
_LABELS: Final = {"why": "why it matters", "change": "what to change"}

_OnResult = Callable[[Result], None]
_OnCheck = Callable[[str], None]


@contextmanager
def showing_progress(
    total: int, *, as_json: bool, on_line: _OnResult
) -> Iterator[tuple[_OnCheck, _OnResult]]:
    """Show a bar on a terminal, call ``on_line`` over a pipe; show nothing with ``--json``.

    Yields what to call when a check begins, and with its result.
    """
    if as_json:
        yield lambda _check: None, lambda _result: None
    elif not sys.stdout.isatty():
        yield lambda _check: None, on_line
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("", total=total)
            yield (
                lambda check: progress.update(task, description=check),
                lambda _result: progress.advance(task),
            )


def print_line(result: Result, word: str, cells: Sequence[str]) -> None:
    """Print one result, and the explanations of a failed one, separated by tabs."""
    text = f"expected {result.expected}; actual {result.actual}"
    print("\t".join([word, *cells, printable(text)]), flush=True)
    for name, explanation in _explanations(result):
        print("\t".join([name, *cells, explanation]), flush=True)


def print_table(
    results: Sequence[Result],
    *,
    words: Mapping[Verdict, str],
    columns: Mapping[str, Callable[[Result], str]],
    title: Callable[[Result], str],
) -> None:
    """Print all results, then the explanations of those that failed, each below its title."""
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold cyan")
    for heading in ("", *columns, "expected", "actual"):
        table.add_column(heading, overflow="fold")
    for result in results:
        style = _STYLES[result.verdict]
        table.add_row(
            Text(words[result.verdict], style=style),
            *(Text(cell(result)) for cell in columns.values()),
            Text(result.expected, style="dim"),
            Text(printable(result.actual), style=style if result.verdict is Verdict.FAIL else ""),
        )
    console = Console()
    console.print(table)
    for result in results:
        if result.verdict is Verdict.FAIL:
            console.print(Text(title(result), style="bold red"))
            for name, text in _explanations(result):
                line = Text.assemble((f"{_LABELS[name]}: ", "cyan"), text)
                console.print(Padding(line, (0, 0, 0, 2)))
            console.print()


def _explanations(result: Result) -> list[tuple[str, str]]:
    found = (("why", result.why), ("change", result.change))
    return [(name, text) for name, text in found if text is not None]
