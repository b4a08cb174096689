"""A device of a chaos run: one outbox file that some processes fill and others drain.

Draining is the real ``onceward outbox drain``, restarted each time the fault injector kills it.
While one drain is stopped with SIGSTOP, a second one is started on the same file: the two must not
send an entry twice.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from onceward_lab.fork_client import AsyncForkServer, Child

__all__ = ["Device"]

_PASSPHRASE: Final = "CHAOS_PASSPHRASE"  # noqa: S105 - the name of a variable
_USER: Final = "onceward_lab.chaos.user_process:main"
_DRAIN_SECONDS: Final = 10
_LEASE_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = 0.05
_OFFLINE: Final = 1
_NOT_READY: Final = ("does not exist", "there is no outbox in", "has no user")


@dataclass
class Device:
    """One device, its users so far, and the actions it acknowledged."""

    name: str
    processes: AsyncForkServer
    server: str
    token_of: Callable[[str], str]
    passphrase: str | None = None
    seed: int = 0
    users: list[str] = field(default_factory=list)
    # By user: action id to idempotency key.
    acknowledged: dict[str, dict[str, str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    # Running processes, for the fault injector.
    user_process: Child | None = None
    drains: dict[str, Child] = field(default_factory=dict)
    starts: int = 0

    @property
    def path(self) -> Path:
        """The outbox file."""
        return self.processes.directory / f"{self.name}.db"

    async def run_user(self, user: str) -> None:
        """Enqueue all actions of a user, and drain until the outbox is empty."""
        self.users.append(user)
        self.acknowledged[user] = {}
        enqueueing = asyncio.create_task(self._enqueue(user))
        try:
            while not (await self._drain(user) and enqueueing.done()):
                if enqueueing.done():
                    enqueueing.result()
        finally:
            enqueueing.cancel()
            with suppress(asyncio.CancelledError):
                await enqueueing

    async def drain_again(self) -> None:
        """Start one more drain for the current user, even if another one runs."""
        await self._drain(self.users[-1])

    async def _enqueue(self, user: str) -> None:
        while True:
            self.starts += 1
            arguments = [str(self.path), user, str(self.seed + self.starts), _PASSPHRASE]
            child = await self.processes.start(
                f"{self.name}-user-{self.starts}",
                arguments,
                target=_USER,
                environment=self._environment(),
            )
            self.user_process = child
            await child.ended.wait()
            self.user_process = None
            for line in child.new_lines():
                if line.startswith("{"):
                    self.acknowledged[user] |= json.loads(line)
                else:
                    self.errors.append(f"{child.name} wrote: {child.tail()}")
                    break
            child.out.unlink()
            if child.code == 0:
                return

    async def _drain(self, user: str) -> bool:
        """Run one drain; returns whether it reports an empty outbox."""
        self.starts += 1
        arguments = ["outbox", "--db", str(self.path)]
        if self.passphrase is not None:
            arguments += ["--passphrase-env", _PASSPHRASE]
        arguments += ["drain", "--json", "--user", user, "--server", self.server]
        arguments += ["--max-seconds", str(_DRAIN_SECONDS)]
        child = await self.processes.start(
            f"{self.name}-drain-{self.starts}",
            arguments,
            environment=self._environment() | {"ONCEWARD_OUTBOX_TOKEN": self.token_of(user)},
        )
        self.drains[child.name] = child
        await child.ended.wait()
        del self.drains[child.name]
        output = child.out.read_text(errors="replace")
        child.out.unlink()
        if child.code is not None and child.code < 0:
            return False
        report = _parse_report(output)
        if report is None:
            # The user process has not created the file or the user yet.
            if child.code == _OFFLINE and any(text in output for text in _NOT_READY):
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self.errors.append(f"{child.name} ended with {child.code}: {output[-2000:]}")
            return False
        if report["ended"] in ("blocked", "waiting"):
            await asyncio.sleep(_RETRY_SECONDS)
        return bool(report["ended"] == "empty")

    def _environment(self) -> dict[str, str]:
        settings = {
            "ONCEWARD_OUTBOX_LEASE_SECONDS": str(_LEASE_SECONDS),
            "ONCEWARD_OUTBOX_RETRY_SECONDS": str(_RETRY_SECONDS),
        }
        return settings if self.passphrase is None else settings | {_PASSPHRASE: self.passphrase}


def _parse_report(output: str) -> dict[str, Any] | None:
    """Find the JSON report in the output of a drain; an error message may follow it."""
    begin = output.find("{")
    try:
        report, _ = json.JSONDecoder().raw_decode(output[begin:]) if begin >= 0 else (None, 0)
    except ValueError:
        return None
    return report if isinstance(report, dict) and "ended" in report else None
