"""The demo as people see it: a live picture on a terminal, plain lines over a pipe, JSON."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.cli.output import CommandError, print_json
from holdfast_lab.demo import Verdict, Watcher, run_demo
from holdfast_lab.demo.scenario import Scene
from holdfast_lab.fork_client import ChildrenError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["show_demo"]

_WIDTH: Final = 40
_LINES: Final = 8


def show_demo(*, as_json: bool, seed: int) -> int:
    """Run the demo and tell the verdict; returns the exit code."""
    began = time.monotonic()
    try:
        with _watching(as_json=as_json, began=began) as watch:
            verdict = asyncio.run(run_demo(watch, seed=seed))
    except (ChildrenError, TimeoutError) as error:
        raise CommandError(
            f"the demo did not get to its end: {error or 'it took too long'}"
        ) from error
    if as_json:
        print_json(msgspec.to_builtins(verdict) | {"holds": verdict.holds})
    else:
        _tell(verdict)
    return 0 if verdict.holds else 1


@contextmanager
def _watching(*, as_json: bool, began: float) -> Iterator[Watcher]:
    """Give what shows the scene: a picture, lines, or nothing."""
    if as_json:
        yield lambda _scene, _news: None
    elif not sys.stdout.isatty():
        yield lambda scene, news: _line(scene, news, began)
    else:
        from rich.live import Live

        news_so_far: list[str] = []
        with Live(refresh_per_second=12) as live:

            def watch(scene: Scene, news: str | None) -> None:
                if news is not None:
                    news_so_far.append(f"{time.monotonic() - began:4.1f} s  {news}")
                live.update(_picture(scene, news_so_far[-_LINES:]))

            yield watch


def _line(scene: Scene, news: str | None, began: float) -> None:
    if news is None:
        return
    counts = ", ".join(f"{count} {name}" for name, count in scene.queue.items()) or "empty"
    print(f"{time.monotonic() - began:5.1f} s  {news}", flush=True)
    print(
        f"         queue: {counts}; requests: {scene.requests}; answers lost: "
        f"{scene.answers_lost}; effects: {scene.effects}",
        flush=True,
    )


def _picture(scene: Scene, news: list[str]) -> "RenderableType":
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    queue = scene.queue
    total = max(sum(queue.values()), 1)
    table = Table.grid(padding=(0, 2))
    rows: tuple[tuple[str, int, str], ...] = (
        ("waiting on the device", queue.get("pending", 0), "yellow"),
        ("on its way", queue.get("in_flight", 0), "cyan"),
        ("done, and the device knows", queue.get("succeeded", 0), "green"),
        ("effects in the server's database", scene.effects, "bold green"),
    )
    for name, count, style in rows:
        bar = "█" * round(_WIDTH * min(count, total) / total)
        table.add_row(name, f"{count:>3}", Text(f"{bar:<{_WIDTH}}", style=style))
    counts = Text(
        f"\nrequests {scene.requests}   answers lost {scene.answers_lost}   "
        f"answered from memory {scene.replays}   kill -9 {scene.kills}\n"
    )
    return Panel(Group(table, counts, Text("\n".join(news), style="dim")), title="holdfast demo")


def _tell(verdict: Verdict) -> None:
    rows: list[tuple[str, Any]] = [
        ("taps", verdict.taps),
        ("requests sent", verdict.requests),
        ("answers lost", verdict.answers_lost),
        ("kill -9 of the device", verdict.kills),
        ("answered from memory", verdict.replays),
        ("effects", verdict.effects),
        ("duplicates", verdict.duplicates),
        ("lost", verdict.lost),
    ]
    print()
    for name, count in rows:
        print(f"  {name:<22}{count:>5}")
    for trouble in verdict.troubles:
        print(f"  the device gave up: {trouble}")
    if not verdict.in_order:
        print("  walk did not happen in the order of the taps")
    said = "every tap happened exactly once" if verdict.holds else "THE PROMISE DOES NOT HOLD"
    print(f"\n  {said}, by the server's own database ({verdict.seconds} s)")
