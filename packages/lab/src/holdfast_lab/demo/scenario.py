"""The demo itself: starts the server and the device, takes the network away and kills the device.

Everything lives in one temporary directory and below one processes, which outlives nobody.
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

from holdfast.server.jwt_auth import mint_token
from holdfast_lab.demo.device import PASSPHRASE, TOKEN, USER
from holdfast_lab.demo.verdict import Verdict, judge
from holdfast_lab.effects import read_effects
from holdfast_lab.fork_client import AsyncForkServer, Child, ChildError
from holdfast_lab.proxy import CuttingProxy, Exchange, Weather
from holdfast_services.dev_secrets import development_secret

__all__ = ["Scene", "Watcher", "run_demo"]

_WEATHER: Final = Weather(lose_answer=1 / 3, longest_delay_seconds=0.12)
_KILL_AT: Final = (15, 40)
"""The device is killed when the server has answered these requests, and it has not heard it yet."""
_LOOK_SECONDS: Final = 0.05
_LONGEST_SECONDS: Final = 55.0
_OK: Final = 300
_DEVICE: Final = "holdfast_lab.demo.device"


@dataclass
class Scene:
    """What can be seen at this moment."""

    headline: str = "starting"
    queue: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    answers_lost: int = 0
    replays: int = 0
    kills: int = 0
    effects: int = 0
    troubles: list[str] = field(default_factory=list)


Watcher = Callable[[Scene, str | None], None]
"""Is shown the scene whenever it may have changed, with a line of news if there is one."""


async def run_demo(watch: Watcher, *, seed: int = 1) -> Verdict:
    """Run it all and return the verdict. Raises ``ChildError`` if a process does not start."""
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-", ignore_cleanup_errors=True) as name:
        async with asyncio.timeout(_LONGEST_SECONDS), AsyncForkServer(Path(name)) as processes:
            return await _Stage(Path(name), processes, watch, seed).play()


class _Stage:
    def __init__(
        self, directory: Path, processes: AsyncForkServer, watch: Watcher, seed: int
    ) -> None:
        self._directory = directory
        self._processes = processes
        self._watch = watch
        self._seed = seed
        self._scene = Scene()
        self._began = time.monotonic()
        self._database = f"sqlite:///{directory / 'server.db'}"
        self._device: Child | None = None
        self._environment: dict[str, str] = {}

    async def play(self) -> Verdict:
        self._news("starting the server (holdfast serve, SQLite)")
        port = await self._start_server()
        proxy = CuttingProxy(
            port, weather=_WEATHER, seed=self._seed, on_exchange=self._after_exchange
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
        self._news("no network: a person taps 40 times, the device keeps it in an encrypted file")
        await self._start_device(proxy.url, "new")
        await self._until_day_is_over()
        self._news("the network is back, and loses every third answer after the server has acted")
        async with proxy:
            await self._until_drained(proxy)
        return judge(
            await read_effects(self._database),
            requests=self._scene.requests,
            answers_lost=self._scene.answers_lost,
            kills=self._scene.kills,
            replays=self._scene.replays,
            troubles=tuple(self._scene.troubles),
            seconds=round(time.monotonic() - self._began, 1),
        )

    async def _start_server(self) -> int:
        server = await self._processes.start(
            "server",
            ["serve", "--port", "0", "--database", self._database, "--no-jobs"],
            environment={
                "HOLDFAST_HOME": str(self._directory / "home"),
                "HOLDFAST_LOG_LEVEL": "ERROR",
            },
        )
        line = await server.wait_for_line("Holdfast is ready on ")
        port = urlsplit(line.split()[4]).port
        if port is None:
            raise ChildError(f"the server does not say where it is: {line}")
        return port

    async def _start_device(self, url: str, life: str) -> None:
        self._device = await self._processes.start(
            "device",
            [str(self._directory / "device.db"), url, life],
            target=f"{_DEVICE}:main",
            environment=self._environment,
        )

    async def _until_day_is_over(self) -> None:
        while not self._listen():  # noqa: ASYNC110 - what another process writes rings no bell
            await asyncio.sleep(_LOOK_SECONDS)

    async def _until_drained(self, proxy: CuttingProxy) -> None:
        while True:
            device = self._device
            if device is None or not device.is_alive:
                self._listen()
                if device is not None and device.code == 0:
                    return
                await self._start_device(proxy.url, "again")
                self._news("the device was started again: what it had queued is still there")
            self._listen()
            self._scene.effects = (await read_effects(self._database)).count
            self._watch(self._scene, None)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _after_exchange(self, exchange: Exchange) -> None:
        scene = self._scene
        scene.requests += 1
        scene.answers_lost += exchange.fate == "lose_answer"
        scene.replays += exchange.replayed
        happened = exchange.status is not None and exchange.status < _OK
        due = len(_KILL_AT) > scene.kills and scene.requests >= _KILL_AT[scene.kills]
        if self._device is not None and self._device.is_alive and happened and due:
            scene.kills += 1
            await self._processes.kill(self._device)
            self._news(f"kill -9 of the device: request {scene.requests} was done, it never heard")

    def _listen(self) -> bool:
        """Take what the device says; returns whether it says that the day is over."""
        device, over = self._device, False
        if device is None:
            return False
        for line in device.new_lines():
            said = _decoded(line)
            if said is None:
                raise ChildError(f"the device says: {device.tail()}")
            self._scene.queue = said.get("queue", self._scene.queue)
            if "trouble" in said:
                self._scene.troubles.append(said["trouble"])
            over = over or "day" in said
        if not device.is_alive and device.code is not None and device.code > 0:
            raise ChildError(f"the device ended with {device.code}: {device.tail()}")
        self._watch(self._scene, None)
        return over

    def _news(self, line: str) -> None:
        self._scene.headline = line
        self._watch(self._scene, line)


def _decoded(line: str) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None
