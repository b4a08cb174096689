"""Activity of a server and its database in the slowest seconds of a load test."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg

from onceward_lab.bench.server_tree import CpuClock

__all__ = ["Activity", "explain"]

_EVERY_SECONDS = 0.1
# A second is slow if its 99th percentile is so many times the median of all seconds.
_SLOW = 5
_MAX_SECONDS = 10

# What each process of PostgreSQL waits for; one that waits for nothing runs, or waits for a CPU.
# The processes in the background count only while they work.
_WAITS = """
SELECT CASE WHEN backend_type = 'client backend' THEN '' ELSE backend_type || ' ' END
       || coalesce(wait_event_type || ' ' || wait_event, 'running') AS wait,
       count(*) AS count
  FROM pg_stat_activity
 WHERE pid <> pg_backend_pid()
   AND (backend_type = 'client backend' AND state <> 'idle'
        OR backend_type <> 'client backend'
           AND coalesce(wait_event_type, '') NOT IN ('Activity', 'Timeout'))
 GROUP BY 1
"""
# The statements that run, without their values.
_STATEMENTS = """
SELECT left(regexp_replace(query, '''[^'']*''|[0-9]+', '?', 'g'), 60) AS statement,
       count(*) AS count
  FROM pg_stat_activity
 WHERE pid <> pg_backend_pid() AND state = 'active' AND backend_type = 'client backend'
   AND clock_timestamp() - query_start > interval '50 milliseconds'
 GROUP BY 1
"""
_CHECKPOINTS = "SELECT num_timed + num_requested FROM pg_stat_checkpointer"


class Activity:
    """Samples the waits of PostgreSQL, the CPU of the server and of the machine, ten a second."""

    def __init__(self, database: str, cpu: CpuClock) -> None:
        self._database = database
        self._cpu = cpu
        # By the second of ``time.perf_counter``.
        self.waits: dict[int, Counter[str]] = {}
        self.statements: dict[int, Counter[str]] = {}
        self.samples: Counter[int] = Counter()
        # Share of one CPU that the server used; shares of the machine's time: idle, stolen and
        # waiting, and the time in which a process that could run had no CPU or waited for a disk.
        self.server_cpu: dict[int, float] = {}
        self.machine: dict[int, dict[str, float]] = {}
        self.checkpoints: set[int] = set()

    async def sample(self) -> None:
        """Sample until it is cancelled."""
        connection = await asyncpg.connect(self._database)
        try:
            checkpoints = await connection.fetchval(_CHECKPOINTS)
            before, cpu, machine = time.perf_counter(), self._cpu.read(), _machine_ticks()
            stalled = _stalled_micros()
            while True:
                await asyncio.sleep(_EVERY_SECONDS)
                at = int(time.perf_counter())
                self.samples[at] += 1
                for rows, into in ((_WAITS, self.waits), (_STATEMENTS, self.statements)):
                    counts = into.setdefault(at, Counter())
                    for name, count in await connection.fetch(rows):
                        counts[name] += count
                now = time.perf_counter()
                if now - before >= 1:
                    used, ticks, stalls = self._cpu.read(), _machine_ticks(), _stalled_micros()
                    self.server_cpu[at] = (used - cpu) / (now - before)
                    self.machine[at] = _shares(machine, ticks) | {
                        f"{name} pressure": (stalls[name] - stalled[name]) / (now - before) / 1e6
                        for name in stalls
                    }
                    found = await connection.fetchval(_CHECKPOINTS)
                    if found != checkpoints:
                        self.checkpoints.add(at)
                    before, cpu, machine, checkpoints = now, used, ticks, found
                    stalled = stalls
        finally:
            connection.terminate()


def explain(responses: Sequence[tuple[float, float, int]], activity: Activity) -> dict[str, Any]:
    """Compare the slow seconds with the others: waits, CPU, checkpoints."""
    by_second: dict[int, list[float]] = {}
    for due, took, _status in responses:
        by_second.setdefault(int(due), []).append(took)
    # At least a few requests, else a percentile says little.
    tails = {
        second: statistics.quantiles(found, n=100)[98]
        for second, found in by_second.items()
        if len(found) > 10
    }
    usual = statistics.median(tails.values())
    slow = {second for second, tail in tails.items() if tail > _SLOW * usual}
    worst = sorted(tails, key=lambda second: tails[second], reverse=True)[:_MAX_SECONDS]
    first = min(by_second)
    return {
        "usual_p99_ms": round(usual * 1e3, 1),
        "slow_seconds": len(slow),
        "seconds": len(tails),
        "in_slow_seconds": _about(slow, activity),
        "in_other_seconds": _about(set(tails) - slow, activity),
        "worst": [
            {"second": second - first, "p99_ms": round(tails[second] * 1e3, 1)}
            | _about({second}, activity)
            for second in worst
        ],
    }


def _about(seconds: set[int], activity: Activity) -> dict[str, Any]:
    samples = sum(activity.samples[second] for second in seconds) or 1
    waits: Counter[str] = Counter()
    statements: Counter[str] = Counter()
    for second in seconds:
        waits += activity.waits.get(second, Counter())
        statements += activity.statements.get(second, Counter())
    machine = [activity.machine[second] for second in seconds if second in activity.machine]
    cpu = [activity.server_cpu[second] for second in seconds if second in activity.server_cpu]
    return {
        "server_cpu": round(statistics.fmean(cpu), 2) if cpu else None,
        "machine": {
            name: round(statistics.fmean([shares[name] for shares in machine]), 2)
            for name in (machine[0] if machine else ())
        },
        "samples_per_second": round(samples / max(1, len(seconds)), 1),
        "checkpoints": len(seconds & activity.checkpoints),
        # Processes that wait for this, on average.
        "waits": {name: round(n / samples, 2) for name, n in waits.most_common(6)},
        "statements_over_50_ms": {
            name: round(n / samples, 2) for name, n in statements.most_common(4)
        },
    }


def _machine_ticks() -> list[int]:
    """Return the first line of ``/proc/stat``: ticks of all CPUs by kind."""
    return [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def _stalled_micros() -> dict[str, int]:
    """Return for how long some process has waited for a CPU or a disk, where the kernel says it."""
    found: dict[str, int] = {}
    for name in ("cpu", "io"):
        path = Path("/proc/pressure") / name
        if path.exists():
            found[name] = int(path.read_text().splitlines()[0].rpartition("total=")[2])
    return found


def _shares(before: list[int], after: list[int]) -> dict[str, float]:
    spent = [b - a for a, b in zip(before, after, strict=True)]
    total = sum(spent) or 1
    return {"idle": spent[3] / total, "disk": spent[4] / total, "stolen": spent[7] / total}
