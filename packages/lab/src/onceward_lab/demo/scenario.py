"""The demo: starts a server and a device, cuts the network, and kills the device twice.

All files are in one temporary directory, all processes belong to one fork server.
"""

import asyncio
import json
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from onceward.sign_in.jwt_auth import mint_token
from onceward_lab.demo.device import PASSPHRASE, TOKEN, USER
from onceward_lab.demo.result import DemoResult, compare
from onceward_lab.effects import read_effects
from onceward_lab.fork_client import AsyncForkServer, Child, ChildError
from onceward_lab.proxy import Exchange, FaultyProxy, NetworkFaults
from onceward_services.dev_secrets import development_secret

__all__ = ["OnStep", "State", "run_demo"]

_NETWORK_FAULTS: Final = NetworkFaults(response_lost=1 / 3, max_delay_seconds=0.12)
_KILL_AT: Final = (15, 40)
"""The device is killed after the server has responded to these requests, before it knows."""
_POLL_SECONDS: Final = 0.05
_MAX_SECONDS: Final = 55.0
_OK: Final = 300
_DEVICE: Final = "onceward_lab.demo.device"


@dataclass
class State:
    """The current counts."""

    queue: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    responses_lost: int = 0
    replays: int = 0
    kills: int = 0
    effects: int = 0
    errors: list[str] = field(default_factory=list)


OnStep = Callable[[State, str | None], None]
"""Called when the state may have changed, with a description if a new step begins."""


async def run_demo(on_step: OnStep, *, seed: int = 1) -> DemoResult:
    """Run the demo. Raises ``ChildError`` if a process fails, ``TimeoutError`` after 55 s."""
    with tempfile.TemporaryDirectory(prefix="onceward-demo-", ignore_cleanup_errors=True) as name:
        async with asyncio.timeout(_MAX_SECONDS), AsyncForkServer(Path(name)) as processes:
            return await _Demo(Path(name), processes, on_step, seed).run()


class _Demo:
    def __init__(
        self, directory: Path, processes: AsyncForkServer, on_step: OnStep, seed: int
    ) -> None:
        self._directory = directory
        self._processes = processes
        self._on_step = on_step
        self._seed = seed
        self._state = State()
        self._began = time.monotonic()
        self._database = f"sqlite:///{directory / 'server.db'}"
        self._device: Child | None = None
        self._environment: dict[str, str] = {}

    async def run(self) -> DemoResult:
        self._step("starting the server (onceward serve, SQLite)")
        port = await self._start_server()
        proxy = FaultyProxy(
            port, faults=_NETWORK_FAULTS, seed=self._seed, on_exchange=self._after_exchange
        )
        home = self._directory / "home"
        token = mint_token(
            development_secret(home),
            sub=USER,
            org=None,
            roles=[],
            lifetime=timedelta(hours=1),
            now=datetime.now(UTC),
        )
        self._environment = {TOKEN: token, PASSPHRASE: secrets.token_urlsafe(16)}
        self._step("no network: 40 user actions are stored in an encrypted outbox file")
        await self._start_device(proxy.url, "first")
        await self._wait_until_enqueued()
        self._step("the network is back, but loses a third of the responses")
        async with proxy:
            await self._wait_until_drained(proxy)
        return compare(
            await read_effects(self._database),
            requests=self._state.requests,
            responses_lost=self._state.responses_lost,
            kills=self._state.kills,
            replays=self._state.replays,
            errors=tuple(self._state.errors),
            seconds=round(time.monotonic() - self._began, 1),
        )

    async def _start_server(self) -> int:
        server = await self._processes.start(
            "server",
            ["serve", "--port", "0", "--database", self._database, "--no-jobs"],
            environment={
                "ONCEWARD_HOME": str(self._directory / "home"),
                "ONCEWARD_LOG_LEVEL": "ERROR",
            },
        )
        line = await server.wait_for_line("Onceward is ready on ")
        port = urlsplit(line.split()[4]).port
        if port is None:
            raise ChildError(f"the ready line of the server has no port: {line}")
        return port

    async def _start_device(self, url: str, run: str) -> None:
        self._device = await self._processes.start(
            "device",
            [str(self._directory / "device.db"), url, run],
            target=f"{_DEVICE}:main",
            environment=self._environment,
        )

    async def _wait_until_enqueued(self) -> None:
        while not self._read_device():  # noqa: ASYNC110 - a file of another process has no event
            await asyncio.sleep(_POLL_SECONDS)

    async def _wait_until_drained(self, proxy: FaultyProxy) -> None:
        while True:
            device = self._device
            if device is None or not device.is_alive:
                self._read_device()
                if device is not None and device.code == 0:
                    return
                await self._start_device(proxy.url, "again")
                self._step("the device is restarted: its outbox file is intact")
            self._read_device()
            self._state.effects = (await read_effects(self._database)).count
            self._on_step(self._state, None)
            await asyncio.sleep(_POLL_SECONDS)

    async def _after_exchange(self, exchange: Exchange) -> None:
        state = self._state
        state.requests += 1
        state.responses_lost += exchange.outcome == "response_lost"
        state.replays += exchange.replayed
        happened = exchange.status is not None and exchange.status < _OK
        due = len(_KILL_AT) > state.kills and state.requests >= _KILL_AT[state.kills]
        if self._device is not None and self._device.is_alive and happened and due:
            state.kills += 1
            await self._processes.kill(self._device)
            self._step(
                f"kill -9 of the device before it gets the response to request {state.requests}"
            )

    def _read_device(self) -> bool:
        """Read the device's output; returns whether it has enqueued all actions."""
        device, enqueued = self._device, False
        if device is None:
            return False
        for line in device.new_lines():
            message = _decoded(line)
            if message is None:
                raise ChildError(f"unexpected output of the device: {device.tail()}")
            self._state.queue = message.get("queue", self._state.queue)
            if "error" in message:
                self._state.errors.append(message["error"])
            enqueued = enqueued or "enqueued" in message
        if not device.is_alive and device.code is not None and device.code > 0:
            raise ChildError(f"the device ended with {device.code}: {device.tail()}")
        self._on_step(self._state, None)
        return enqueued

    def _step(self, description: str) -> None:
        self._on_step(self._state, description)


def _decoded(line: str) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
