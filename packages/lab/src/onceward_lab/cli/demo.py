"""``onceward demo``: a live panel on a terminal, lines over a pipe, or JSON."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from onceward_lab.demo import DemoResult, OnStep, run_demo
from onceward_lab.demo.scenario import State
from onceward_lab.fork_client import ChildError
from onceward_protocol.cli.output import CommandError, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["show_demo"]

_WIDTH: Final = 40
_LINES: Final = 8


def show_demo(*, as_json: bool, seed: int) -> int:
    """Run the demo and print the result; returns the exit code."""
    began = time.monotonic()
    try:
        with _showing_steps(as_json=as_json, began=began) as on_step:
            result = asyncio.run(run_demo(on_step, seed=seed))
    except (ChildError, TimeoutError) as error:
        raise CommandError(f"the demo did not finish: {error or 'it took too long'}") from error
    if as_json:
        print_json(msgspec.to_builtins(result) | {"holds": result.holds})
    else:
        _print_result(result)
    return 0 if result.holds else 1


@contextmanager
def _showing_steps(*, as_json: bool, began: float) -> Iterator[OnStep]:
    """Show a panel on a terminal, lines over a pipe, nothing with ``--json``."""
    if as_json:
        yield lambda _state, _step: None
    elif not sys.stdout.isatty():
        yield lambda state, step: _print_step(state, step, began)
    else:
        from rich.live import Live

        steps: list[str] = []
        with Live(refresh_per_second=12) as live:

            def on_step(state: State, step: str | None) -> None:
                if step is not None:
                    steps.append(f"{time.monotonic() - began:4.1f} s  {step}")
                live.update(_panel(state, steps[-_LINES:]))

            yield on_step


def _print_step(state: State, step: str | None, began: float) -> None:
    if step is None:
        return
    counts = ", ".join(f"{count} {name}" for name, count in state.queue.items()) or "empty"
    print(f"{time.monotonic() - began:5.1f} s  {step}", flush=True)
    print(
        f"         queue: {counts}; requests: {state.requests}; responses lost: "
        f"{state.responses_lost}; effects: {state.effects}",
        flush=True,
    )


def _panel(state: State, steps: list[str]) -> "RenderableType":
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    queue = state.queue
    total = max(sum(queue.values()), 1)
    table = Table.grid(padding=(0, 2))
    rows: tuple[tuple[str, int, str], ...] = (
        ("pending on the device", queue.get("pending", 0), "yellow"),
        ("being sent", queue.get("in_flight", 0), "cyan"),
        ("succeeded on the device", queue.get("succeeded", 0), "green"),
        ("effects in the server's database", state.effects, "bold green"),
    )
    for name, count, style in rows:
        bar = "█" * round(_WIDTH * min(count, total) / total)
        table.add_row(name, f"{count:>3}", Text(f"{bar:<{_WIDTH}}", style=style))
    counts = Text(
        f"\nrequests {state.requests}   responses lost {state.responses_lost}   "
        f"replays {state.replays}   kill -9 {state.kills}\n"
    )
    return Panel(Group(table, counts, Text("\n".join(steps), style="dim")), title="onceward demo")


def _print_result(result: DemoResult) -> None:
    rows: list[tuple[str, Any]] = [
        ("user actions", result.actions),
        ("requests sent", result.requests),
        ("responses lost", result.responses_lost),
        ("kill -9 of the device", result.kills),
        ("replays", result.replays),
        ("effects", result.effects),
        ("doubled", result.doubled),
        ("lost", result.lost),
    ]
    print()
    for name, count in rows:
        print(f"  {name:<22}{count:>5}")
    for error in result.errors:
        print(f"  failed on the device: {error}")
    if not result.in_order:
        print("  walk actions took effect in the wrong order")
    conclusion = (
        "every action took effect exactly once" if result.holds else "ACTIONS WERE LOST OR DOUBLED"
    )
    print(f"\n  {conclusion}, according to the server's database ({result.seconds} s)")
