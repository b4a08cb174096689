"""The outbox's speed lines, drawn from what ``holdfast_lab.bench.outbox`` measures."""

from pathlib import Path
from typing import Any

from holdfast_lab.bench import outbox, outbox_drain
from holdfast_lab.bench.curves import Curve
from holdfast_lab.bench.lines import Line, at_least, at_most, line
from holdfast_lab.bench.world import World

__all__ = ["lines"]


def lines(world: World) -> list[Line | Curve]:
    """Single and many enqueues, and claims beside a million entries."""
    folder = world.new_folder("outbox")
    world.say("one enqueue at a time")
    found = outbox.enqueue(folder, rounds=world.rounds, seconds=world.seconds)
    world.say("many at once")
    found |= outbox.bulk(folder, rounds=world.rounds)
    drawn: list[Line | Curve] = []
    for key, part, target in (
        ("outbox_enqueue_plain", "outbox, one enqueue ÷ raw commit", at_least(0.8)),
        ("outbox_enqueue_encrypted", "outbox, encrypted enqueue ÷ raw commit", at_least(0.8)),
        ("outbox_bulk_plain", "outbox, bulk enqueue ÷ raw bulk insert", at_least(0.5)),
        ("outbox_bulk_encrypted", "outbox, encrypted bulk ÷ raw bulk insert", at_least(0.5)),
    ):
        for name, row in found[key].items():
            drawn.append(line(part, name, row, target if name == "Holdfast" else None))
    drawn.append(_against_peers(found["outbox_enqueue_plain"]))
    world.say("claims beside a million entries")
    large = min(world.rows, 1_000_000)
    claims, points = outbox.claims(folder, small=min(1_000, large), large=large)
    for what in ("next_eligible", "claim"):
        measured: dict[str, Any] = {"ratio": claims[f"{what}_ratio"], **claims}
        name = f"{what} with {large:,} queued ÷ with {claims['small']:,.0f}"
        drawn.append(line("outbox", name, measured, at_most(1.5)))
    drawn.append(Curve("claim of the next entry, outbox", "queued entries", points))
    world.say("draining")
    return [*drawn, *_drains(world, folder)]


def _against_peers(rows: dict[str, Any]) -> Line:
    peers = [row["per_second"] for name, row in rows.items() if "queue at FULL" in name]
    row = {"ratio": round(rows["Holdfast"]["per_second"] / max(peers), 3)}
    return line("outbox", "one enqueue ÷ the better peer at FULL", row, at_least(1.0))


def _drains(world: World, folder: Path) -> list[Line]:
    part = "outbox, drain on loopback ÷ bare httpx loop"
    names = {
        "outbox_drain_lanes": "in lanes",
        "outbox_drain_lanes_encrypted": "in lanes, encrypted",
        "outbox_drain_in_order": "strictly in order",
        "outbox_drain_field_service": "to the field service on SQLite",
    }
    found = outbox_drain.drain(folder, rounds=world.rounds)
    drawn = [line(part, name, found[key], at_least(0.8)) for key, name in names.items()]
    kept = outbox_drain.memory(folder, entries=min(world.rows, 100_000))
    row = {"ratio": kept["growth"], **kept}
    name = f"memory at the end of {kept['entries']:,} entries ÷ at the beginning"
    return [*drawn, line("outbox", name, row, at_most(1.1))]
