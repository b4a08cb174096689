"""A phone: one outbox file, and person after person who taps on it while others send from it.

Sending is the real ``holdfast outbox drain``, again and again, because besiegers kill it. When one
is stopped rather than killed, another is started beside it: that is what a phone does that thinks
an app is dead, and the two must not send twice what was tapped once.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast_lab.fork_client import AsyncForkServer, Child

__all__ = ["Phone"]

_PASSPHRASE: Final = "SIEGE_PASSPHRASE"  # noqa: S105 - the name of a variable
_PERSON: Final = "holdfast_lab.chaos.person:main"
_DRAIN_SECONDS: Final = 10
_LEASE_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = 0.05
_OFFLINE: Final = 1
_TOO_EARLY: Final = ("does not exist", "there is no outbox in", "knows no user")


@dataclass
class Phone:
    """One device, its users so far, and what it has acknowledged."""

    name: str
    processes: AsyncForkServer
    server: str
    token_of: Callable[[str], str]
    passphrase: str | None = None
    seed: int = 0
    users: list[str] = field(default_factory=list)
    # By user: tap id to key.
    acknowledged: dict[str, dict[str, str]] = field(default_factory=dict)
    mishaps: list[str] = field(default_factory=list)
    # Those that can be killed or stopped just now.
    person: Child | None = None
    drains: dict[str, Child] = field(default_factory=dict)
    starts: int = 0

    @property
    def path(self) -> Path:
        """The outbox's file."""
        return self.processes.directory / f"{self.name}.db"

    async def live(self, user: str) -> None:
        """Let a person tap through a day, and send until all of it is done."""
        self.users.append(user)
        self.acknowledged[user] = {}
        tapping = asyncio.create_task(self._tap(user))
        try:
            while not (await self._drain(user) and tapping.done()):
                if tapping.done():
                    tapping.result()
        finally:
            tapping.cancel()
            with suppress(asyncio.CancelledError):
                await tapping

    async def drain_beside(self) -> None:
        """Start one more drain of the current user, whatever the others are doing."""
        await self._drain(self.users[-1])

    async def _tap(self, user: str) -> None:
        while True:
            self.starts += 1
            arguments = [str(self.path), user, str(self.seed + self.starts), _PASSPHRASE]
            child = await self.processes.start(
                f"{self.name}-person-{self.starts}",
                arguments,
                target=_PERSON,
                environment=self._environment(),
            )
            self.person = child
            await child.ended.wait()
            self.person = None
            for line in child.new_lines():
                if line.startswith("{"):
                    self.acknowledged[user] |= json.loads(line)
                else:
                    self.mishaps.append(f"{child.name} wrote: {child.tail()}")
                    break
            child.out.unlink()
            if child.code == 0:
                return

    async def _drain(self, user: str) -> bool:
        """Run one drain; returns whether it says that nothing is left."""
        self.starts += 1
        arguments = ["outbox", "--db", str(self.path)]
        if self.passphrase is not None:
            arguments += ["--passphrase-env", _PASSPHRASE]
        arguments += ["drain", "--json", "--user", user, "--server", self.server]
        arguments += ["--max-seconds", str(_DRAIN_SECONDS)]
        child = await self.processes.start(
            f"{self.name}-drain-{self.starts}",
            arguments,
            environment=self._environment() | {"HOLDFAST_OUTBOX_TOKEN": self.token_of(user)},
        )
        self.drains[child.name] = child
        await child.ended.wait()
        del self.drains[child.name]
        said = child.out.read_text(errors="replace")
        child.out.unlink()
        if child.code is not None and child.code < 0:
            return False
        report = _report(said)
        if report is None:
            # No file yet, nothing in it, or it knows nobody: the person was not that quick.
            if child.code == _OFFLINE and any(words in said for words in _TOO_EARLY):
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self.mishaps.append(f"{child.name} ended with {child.code}: {said[-2000:]}")
            return False
        if report["ended"] == "blocked":
            await asyncio.sleep(_RETRY_SECONDS)
        return bool(report["ended"] == "empty")

    def _environment(self) -> dict[str, str]:
        settings = {
            "HOLDFAST_OUTBOX_LEASE_SECONDS": str(_LEASE_SECONDS),
            "HOLDFAST_OUTBOX_RETRY_SECONDS": str(_RETRY_SECONDS),
        }
        return settings if self.passphrase is None else settings | {_PASSPHRASE: self.passphrase}


def _report(said: str) -> dict[str, Any] | None:
    """Find the report in what a drain wrote; a line of complaint may follow it."""
    begin = said.find("{")
    try:
        report, _ = json.JSONDecoder().raw_decode(said[begin:]) if begin >= 0 else (None, 0)
    except ValueError:
        return None
    return report if isinstance(report, dict) and "ended" in report else None
