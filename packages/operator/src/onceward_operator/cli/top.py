"""``onceward top``: a live view of requests and queues, for operators."""

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward.cli.database import opened
from onceward.cli.options import Json, Target, command, new_app
from onceward.errors import StoreError
from onceward.jobs.admin import JobAdmin, PausedQueue, PausedQueues, QueueDepth
from onceward.jobs.depth_reporter import MAX_COUNTED
from onceward.ports import Store
from onceward.stores.parts import JOBS, REQUEST_LOG
from onceward_operator.request_counts import OUTCOMES, read_request_counts
from onceward_protocol.cli.output import print_json, print_table, printable
from onceward_protocol.clock import SystemClock

if TYPE_CHECKING:
    from rich.console import Group

app = new_app()

_BARS = " ▁▂▃▄▅▆▇█"
_QUEUE_COLUMNS = ("queue", "waiting", "running", "dead", "oldest due", "state")


@dataclass(frozen=True, slots=True)
class _Reading:
    # By name, one number for each minute of the last hour.
    minutes: dict[str, list[float]]
    depths: dict[str, QueueDepth]
    # By queue.
    paused: dict[str, PausedQueue]


@command(app, "top")
def top(
    target: Target,
    *,
    every: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two readings.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and end.")] = False,
    as_json: Json = False,
) -> None:
    """Show what the servers and workers do now: outcomes of requests, queues, what is late.

    On a terminal the view is live until Ctrl-C. Elsewhere, and with `--json`, one reading is
    printed.

    Example:
        onceward top --database postgresql://me@db/shop

    """
    if as_json or once or not sys.stdout.isatty():
        reading = asyncio.run(_read_once(target))
        if as_json:
            print_json(_fields(reading))
        else:
            _print(reading)
        return
    with suppress(KeyboardInterrupt):
        asyncio.run(_show_live(target, every))


async def _read_once(target: Target) -> _Reading:
    async with opened(target, JOBS, REQUEST_LOG) as store:
        return await _read(store)


async def _read(store: Store) -> _Reading:
    minutes = await read_request_counts(store, SystemClock().now())
    depths, _ = await JobAdmin(store).capped_depths(most=MAX_COUNTED)
    paused = {each.queue: each for each in await PausedQueues(store, lambda: None).all()}
    return _Reading(dict(minutes), dict.fromkeys(paused, QueueDepth()) | depths, paused)


async def _show_live(target: Target, every_seconds: float) -> None:
    from rich.live import Live

    async with opened(target, JOBS, REQUEST_LOG) as store:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                try:
                    live.update(_rendered(await _read(store)), refresh=True)
                except StoreError as error:
                    live.update(f"The database does not respond: {error}", refresh=True)
                await asyncio.sleep(every_seconds)


def _rendered(reading: _Reading) -> "Group":
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    requests = Table("requests", "last minute", "last hour", "", box=box.SIMPLE)
    for row in _request_rows(reading):
        requests.add_row(*row)
    queues = Table(*_QUEUE_COLUMNS, box=box.SIMPLE)
    for cells in _queue_rows(reading):  # an operator wrote the reason of a pause
        queues.add_row(*(Text(printable(cell)) for cell in cells))
    return Group(requests, queues, "Ctrl-C ends")


def _print(reading: _Reading) -> None:
    print_table(("requests", "last minute", "last hour", ""), _request_rows(reading))
    print_table(_QUEUE_COLUMNS, _queue_rows(reading))


def _request_rows(reading: _Reading) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, title in OUTCOMES.items():
        numbers = reading.minutes.get(name)
        if numbers is not None:
            # The current minute is not over: the one before it is whole.
            rows.append((title, f"{numbers[-2]:,.0f}", f"{sum(numbers):,.0f}", _bars(numbers)))
    return rows


def _queue_rows(reading: _Reading) -> list[tuple[str, ...]]:
    return [
        (
            queue,
            _count(depth.waiting),
            _count(depth.running),
            _count(depth.dead),
            f"{depth.oldest_seconds:,.0f} s" if depth.oldest_seconds else "-",
            _state(reading.paused.get(queue)),
        )
        for queue, depth in sorted(reading.depths.items())
    ]


def _state(paused: PausedQueue | None) -> str:
    return "open" if paused is None else f"paused by {paused.actor}: {paused.reason}"


def _count(number: int) -> str:
    return f"{number:,}+" if number >= MAX_COUNTED else f"{number:,}"


def _bars(numbers: list[float]) -> str:
    top = max(numbers) or 1.0
    return "".join(_BARS[round(number / top * (len(_BARS) - 1))] for number in numbers)


def _fields(reading: _Reading) -> dict[str, Any]:
    return {
        "minutes": reading.minutes,
        "queues": {
            queue: {
                "waiting": depth.waiting,
                "running": depth.running,
                "dead": depth.dead,
                "oldest_seconds": depth.oldest_seconds,
                "is_paused": queue in reading.paused,
            }
            for queue, depth in reading.depths.items()
        },
    }
