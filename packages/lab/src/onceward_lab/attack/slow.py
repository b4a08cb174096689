"""Attacks that hold connections: heads and bodies that stall, connections that say nothing."""

import asyncio
from contextlib import suppress
from typing import Final

from onceward_lab.attack.json_bodies import expect_health
from onceward_lab.attack.latencies import Latencies, measure
from onceward_lab.attack.slow_bodies import SlowBodies
from onceward_lab.attack.target import Attack, Target
from onceward_lab.conformance.harness import CheckFailedError, CheckSkippedError

__all__ = ["ATTACKS"]

_GROUP: Final = "slow"
_MEASURE_SECONDS: Final = 0.5
_OK: Final = 200
_SUCCESS: Final = range(200, 300)
_LATER: Final = (429, 503)


async def _served_meanwhile(target: Target) -> str:
    """Measure health checks and a signed-in write while connections are held."""
    health: Latencies = await measure(target.health, seconds=_MEASURE_SECONDS)
    status = await target.write()
    if status not in _SUCCESS:
        raise CheckFailedError(f"a signed-in write got {status} meanwhile")
    if _OK not in target.quiet.statuses:
        return "a signed-in write succeeds meanwhile"
    return expect_health(target, health)


async def _held(target: Target, sent: bytes, what: str) -> str:
    """Open connections, send the same start on all, and wait until the server closes them."""
    connections = await asyncio.gather(
        *(target.connect() for _ in range(target.limits.connections))
    )
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        for _, writer in connections:
            writer.write(sent)
        served = await _served_meanwhile(target)

        async def until_closed(reader: asyncio.StreamReader) -> None:
            with suppress(OSError):
                while await reader.read(65536):
                    pass

        waits = [asyncio.create_task(until_closed(reader)) for reader, _ in connections]
        _, pending = await asyncio.wait(waits, timeout=target.limits.patience_seconds)
        for task in pending:
            task.cancel()
        if pending:
            raise CheckFailedError(
                f"{len(pending)} of {len(waits)} {what} are still open after "
                f"{target.limits.patience_seconds:g} seconds"
            )
        return f"closed after {loop.time() - started:.1f} s; {served}"
    finally:
        for _, writer in connections:
            writer.transport.abort()


async def _silent(target: Target) -> str:
    return await _held(target, b"", "silent connections")


async def _slow_heads(target: Target) -> str:
    start = f"POST {target.path} HTTP/1.1\r\nHost: {target.netloc}\r\nX-Attack: ".encode()
    return await _held(target, start, "unfinished heads")


async def _stalled(target: Target, headers: dict[str, str], seconds: float) -> SlowBodies:
    """Stall uploads for so long, or until all have got a response."""
    attack = SlowBodies(
        target.url + target.harness.profile.request.path,
        count=target.limits.connections,
        headers=headers,
        # Below the limit of most servers, so that the size is no reason to refuse it.
        declared_bytes=200_000,
        sent_bytes=20_000,
    )
    task = asyncio.create_task(attack.run())
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    try:
        while loop.time() < end and attack.report.statuses.total() < target.limits.connections:
            await asyncio.sleep(0.05)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return attack


async def _anonymous_bodies(target: Target) -> str:
    if not target.harness.credentials.headers:
        raise CheckSkippedError("this server has no sign-in")
    if target.url.startswith("https"):
        raise CheckSkippedError("needs http")
    stall = asyncio.create_task(_stalled(target, {}, target.limits.patience_seconds))
    await asyncio.sleep(0.3)
    try:
        served = await _served_meanwhile(target)
    finally:
        report = (await stall).report
    if report.statuses.total() < target.limits.connections:
        raise CheckFailedError(
            f"{report.statuses.total()} of {target.limits.connections} uploads were refused after "
            f"{target.limits.patience_seconds:g} seconds"
        )
    return f"{_statuses(report.statuses)}; {served}"


async def _signed_in_bodies(target: Target) -> str:
    if target.url.startswith("https"):
        raise CheckSkippedError("needs http")
    headers = dict(target.harness.credentials.headers)
    stall = asyncio.create_task(_stalled(target, headers, target.limits.patience_seconds))
    await asyncio.sleep(0.3)
    try:
        health = await measure(target.health, seconds=_MEASURE_SECONDS)
        # The attacker's own tenant may get 503 or 429 meanwhile.
        status = await target.write()
    finally:
        report = (await stall).report
    if status not in _SUCCESS and status not in _LATER:
        raise CheckFailedError(f"a signed-in write got {status} meanwhile")
    if report.statuses.total() < target.limits.connections:
        raise CheckFailedError(
            f"{report.statuses.total()} of {target.limits.connections} uploads were ended after "
            f"{target.limits.patience_seconds:g} seconds"
        )
    served = expect_health(target, health) if _OK in target.quiet.statuses else "others are served"
    return f"{_statuses(report.statuses)}; {served}"


def _statuses(found: "dict[int, int]") -> str:
    return ", ".join(f"{count} x {status}" for status, count in sorted(found.items()))


ATTACKS: Final = (
    Attack(
        "connections that send nothing",
        _GROUP,
        "closed in time, others are served",
        _silent,
        why="Each takes a file descriptor; when all are in use, no one can connect.",
        change="Close connections without a request after some seconds, and limit their number.",
    ),
    Attack(
        "heads that stall",
        _GROUP,
        "closed in time, others are served",
        _slow_heads,
        why="A client that sends one header a minute holds a connection for hours.",
        change="Set a deadline for the whole head (ONCEWARD_HEAD_SECONDS).",
    ),
    Attack(
        "anonymous bodies that stall",
        _GROUP,
        "refused in time, others are served",
        _anonymous_bodies,
        why="A body that is read before sign-in takes memory for callers who may not send any.",
        change="Sign the caller in from the head, before the body is read (identify=…).",
    ),
    Attack(
        "signed-in bodies that stall",
        _GROUP,
        "ended in time, others are served",
        _signed_in_bodies,
        why="One account could hold memory and connections for as long as it likes.",
        change="Set a deadline for the whole body (body_deadline) and a limit on bodies in memory.",
    ),
)
