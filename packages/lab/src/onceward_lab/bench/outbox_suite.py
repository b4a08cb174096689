"""The suite of the outbox: enqueue, claim, drain and memory."""

from pathlib import Path
from typing import Any

from onceward_lab.bench import batch_drain, outbox, outbox_drain
from onceward_lab.bench.curves import Curve
from onceward_lab.bench.environment import Environment
from onceward_lab.bench.measurements import Measurement, at_least, at_most, measurement

__all__ = ["measure", "measure_batches"]


def measure(environment: Environment) -> list[Measurement | Curve]:
    """Measure single and bulk enqueues, claims from a million entries, and drains."""
    directory = environment.new_directory("outbox")
    environment.on_step("single enqueues")
    found = outbox.enqueue(directory, rounds=environment.rounds, seconds=environment.seconds)
    environment.on_step("bulk enqueues")
    found |= outbox.bulk(directory, rounds=environment.rounds)
    measurements: list[Measurement | Curve] = []
    for key, group, target in (
        ("outbox_enqueue_plain", "outbox, one enqueue ÷ raw commit", at_least(0.8)),
        ("outbox_enqueue_encrypted", "outbox, encrypted enqueue ÷ raw commit", at_least(0.8)),
        ("outbox_bulk_plain", "outbox, bulk enqueue ÷ raw bulk insert", at_least(0.5)),
        ("outbox_bulk_encrypted", "outbox, encrypted bulk ÷ raw bulk insert", at_least(0.5)),
    ):
        for name, row in found[key].items():
            measurements.append(
                measurement(group, name, row, target if name == "Onceward" else None)
            )
    measurements.append(_against_peers(found["outbox_enqueue_plain"]))
    environment.on_step("claims from a million entries")
    large = min(environment.rows, 1_000_000)
    claims, points = outbox.claims(directory, small=min(1_000, large), large=large)
    for operation in ("next_eligible", "claim"):
        row: dict[str, Any] = {"ratio": claims[f"{operation}_ratio"], **claims}
        name = f"{operation} with {large:,} queued ÷ with {claims['small']:,.0f}"
        measurements.append(measurement("outbox", name, row, at_most(1.5)))
    measurements.append(Curve("claim of the next entry, outbox", "queued entries", points))
    environment.on_step("drains")
    return [*measurements, *_drains(environment, directory)]


def measure_batches(environment: Environment) -> list[Measurement]:
    """Measure drains in batches over a slow link."""
    directory = environment.new_directory("batch-drain")
    found = batch_drain.batch_drain(directory, rounds=environment.rounds)
    group = "outbox, drain over 50 ms in batches ÷ one request per entry"
    return [
        measurement(group, f"500 entries in batches of {size}", row, at_least(target))
        for size, target in ((50, 20.0), (200, 35.0))
        for row in (found[f"batch_drain_{size}"],)
    ]


def _against_peers(rows: dict[str, Any]) -> Measurement:
    peers = [row["per_second"] for name, row in rows.items() if "queue at FULL" in name]
    row = {"ratio": round(rows["Onceward"]["per_second"] / max(peers), 3)}
    return measurement("outbox", "one enqueue ÷ the better peer at FULL", row, at_least(1.0))


def _drains(environment: Environment, directory: Path) -> list[Measurement]:
    group = "outbox, drain on loopback ÷ bare httpx loop"
    names = {
        "outbox_drain_lanes": "in lanes",
        "outbox_drain_lanes_encrypted": "in lanes, encrypted",
        "outbox_drain_in_order": "strictly in order",
        "outbox_drain_field_service": "to the field service on SQLite",
    }
    found = outbox_drain.drain(directory, rounds=environment.rounds)
    measurements = [
        measurement(group, name, found[key], at_least(0.8)) for key, name in names.items()
    ]
    memory = outbox_drain.memory(directory, entries=min(environment.rows, 100_000))
    row = {"ratio": memory["growth"], **memory}
    name = f"memory at the end of {memory['entries']:,} entries ÷ at the beginning"
    return [*measurements, measurement("outbox", name, row, at_most(1.1))]
