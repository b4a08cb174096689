"""A chaos run: start the cluster and the devices, inject faults, drain, check the history."""

import asyncio
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec

from onceward.sign_in.jwt_auth import mint_token
from onceward_lab.chaos.cluster import Cluster, DatabaseKind, Replication
from onceward_lab.chaos.collector import jobs_left, read_history, response_of
from onceward_lab.chaos.device import Device
from onceward_lab.chaos.failovers import FailoverInjector, RecoveryTimes
from onceward_lab.chaos.fault_injector import FaultInjector
from onceward_lab.chaos.writer import Writer
from onceward_lab.checker import check
from onceward_lab.fork_client import AsyncForkServer
from onceward_lab.history import History, ResponseSeen
from onceward_lab.proxy import NO_FAULTS, Exchange, FaultyProxy, NetworkFaults

__all__ = ["Progress", "Report", "run_chaos"]

_NETWORK_FAULTS: Final = NetworkFaults(
    response_lost=0.12,
    response_truncated=0.03,
    request_lost=0.05,
    disconnected=0.05,
    max_delay_seconds=0.01,
)
_DEVICES: Final = 6
_WRITERS: Final = 4
"""Clients that notice the end of an outage at once; only in runs with failovers."""

_PROGRESS_SECONDS: Final = 0.5
_MAX_DRAIN_SECONDS: Final = 120.0
# Where writes were lost, actions that need them can wait for ever.
_MAX_DRAIN_SECONDS_AFTER_LOSS: Final = 15.0
_PRELOADED: Final = ("onceward_services.cli.worker", "onceward_lab.chaos.user_process")


class Progress(msgspec.Struct, kw_only=True):
    """Counts of a run in progress."""

    phase: str
    seconds: float
    kills: int
    stops: int
    failovers: int
    acknowledged: int
    requests: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run."""

    database: str
    # None without a standby.
    replication: str | None
    nats: bool
    seed: int
    # The time with faults, and the time of the whole run.
    fault_seconds: float
    seconds: float
    # By kind of process.
    kills: dict[str, int]
    stops: dict[str, int]
    # Promotions of the standby, in all and by what happened to the primary.
    failovers: int
    failover_causes: dict[str, int]
    # From the loss of the primary to the first success; None without a failover.
    recovery_median_seconds: float | None
    recovery_worst_seconds: float | None
    # Requests by what the proxy did with them.
    outcomes: dict[str, int]
    users: int
    actions: int
    acknowledged: int
    requests: int
    effects: int
    jobs: int
    dead_letters: int
    # Effects that happened more than once, and acknowledged actions without an effect.
    doubled: int
    lost: int
    violations: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether there is no violation."""
        return not self.violations


async def run_chaos(
    seconds: float,
    *,
    kind: DatabaseKind = "sqlite",
    replication: Replication = "sync",
    nats: bool = False,
    seed: int = 1,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
) -> Report:
    """Inject faults for ``seconds``, wait until everything has drained, and check the result.

    ``replication`` is for ``postgres-ha`` only. With ``async``, acknowledged writes are lost.

    Raises ``ChildError`` or ``TimeoutError`` if the cluster does not start.
    """
    with tempfile.TemporaryDirectory(prefix="onceward-chaos-", ignore_cleanup_errors=True) as name:
        async with AsyncForkServer(Path(name), preload=_preloaded(kind, nats=nats)) as processes:
            run = _ChaosRun(
                processes,
                kind=kind,
                replication=replication,
                nats=nats,
                seed=seed,
                on_progress=on_progress,
            )
            try:
                return await run.run(seconds)
            finally:
                run.cluster.remove()


def _preloaded(kind: DatabaseKind, *, nats: bool) -> tuple[str, ...]:
    stores = ("onceward.stores.postgres",) if kind != "sqlite" else ()
    return (*_PRELOADED, *stores, *(("onceward_nats.jetstream",) if nats else ()))


class _ChaosRun:
    def __init__(
        self,
        processes: AsyncForkServer,
        *,
        kind: DatabaseKind,
        replication: Replication,
        nats: bool,
        seed: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._kind, self._nats, self._seed = kind, nats, seed
        self._replication = replication if kind == "postgres-ha" else None
        self._max_drain_seconds = (
            _MAX_DRAIN_SECONDS_AFTER_LOSS if self._replication == "async" else _MAX_DRAIN_SECONDS
        )
        self._on_progress = on_progress
        self._phase = "starting"
        self._began = time.monotonic()
        self._secret = secrets.token_urlsafe(32)
        self._users_of_tokens: dict[str, str] = {}
        self._responses: list[ResponseSeen] = []
        self.cluster = Cluster(
            processes,
            kind=kind,
            replication=replication,
            nats=nats,
            secret=self._secret,
            first_port=15_000 + secrets.randbelow(14_000),
        )
        self._proxy = FaultyProxy(
            *self.cluster.ports, faults=_NETWORK_FAULTS, seed=seed, on_exchange=self._record
        )
        self._devices = [
            Device(
                f"device-{number}",
                processes,
                self._proxy.url,
                self._token_of,
                # One file is encrypted; it opens more slowly, which changes the timing.
                passphrase=secrets.token_urlsafe(16) if number == 0 else None,
                seed=seed * 1000 + number,
            )
            for number in range(_DEVICES)
        ]
        rng = random.Random(seed)  # noqa: S311 - chooses faults, not a secret
        self._injector = FaultInjector(processes, self.cluster, self._devices, rng)
        self._writers: list[Writer] = []
        self._failovers: FailoverInjector | None = None
        if self.cluster.pair is not None:
            self._failovers = FailoverInjector(self.cluster.pair, random.Random(seed))  # noqa: S311
            self._writers = [
                Writer(name, self._proxy.url, self._token_of(name), self._failovers.times.succeeded)
                for name in (f"writer-{number}" for number in range(_WRITERS))
            ]

    async def run(self, seconds: float) -> Report:
        reporting = asyncio.create_task(self._report_progress())
        unfinished: list[str] = []
        try:
            await self.cluster.start()
            async with self._proxy:
                fault_seconds = await self._inject_faults(seconds, unfinished)
                await self._wait_for_jobs(unfinished)
            self._phase = "stopping"
            await self.cluster.stop()
            self._phase = "checking"
            history = await read_history(
                self.cluster.database_url,
                self._devices,
                self._writers,
                responses=self._responses,
                unfinished=unfinished,
                errors=self.cluster.errors,
            )
            return self._report(history, fault_seconds)
        finally:
            await self._injector.cancel()
            await self.cluster.stop_restarting()
            reporting.cancel()
            with suppress(asyncio.CancelledError):
                await reporting

    async def _inject_faults(self, seconds: float, unfinished: list[str]) -> float:
        """Run the devices with faults, then without until they have drained."""
        self._phase = "injecting faults"
        began = time.monotonic()
        running = [
            asyncio.create_task(self._run_device(device, began + seconds), name=device.name)
            for device in self._devices
        ]
        running += [
            asyncio.create_task(writer.run(began + seconds), name=writer.name)
            for writer in self._writers
        ]
        try:
            async with asyncio.TaskGroup() as faults:
                faults.create_task(self._injector.run(seconds))
                if self._failovers is not None:
                    faults.create_task(self._failovers.run(seconds))
            fault_seconds = time.monotonic() - began
            self._phase = "draining"
            self._proxy.faults = NO_FAULTS
            done, left = await asyncio.wait(running, timeout=self._max_drain_seconds)
            unfinished += [f"{task.get_name()} has not drained" for task in left]
            for task in done:
                task.result()
            await self._injector.wait_for_extra_drains()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return fault_seconds

    async def _run_device(self, device: Device, deadline: float) -> None:
        number = 0
        while time.monotonic() < deadline:
            await device.run_user(f"{device.name}-user-{number}")
            number += 1

    async def _wait_for_jobs(self, unfinished: list[str]) -> None:
        deadline = time.monotonic() + self._max_drain_seconds
        while left := await jobs_left(self.cluster.database_url):
            if time.monotonic() > deadline:
                unfinished.append(f"{left} jobs have not ended")
                return
            await asyncio.sleep(_PROGRESS_SECONDS / 5)

    async def _record(self, exchange: Exchange) -> None:
        token = (exchange.header("authorization") or "").removeprefix("Bearer ")
        response = response_of(exchange, self._users_of_tokens.get(token, "unknown"))
        if response is not None:
            self._responses.append(response)

    def _token_of(self, user: str) -> str:
        token = mint_token(
            self._secret,
            sub=user,
            org=None,
            roles=[],
            lifetime=timedelta(hours=1),
            now=datetime.now(UTC),
        )
        self._users_of_tokens[token] = user
        return token

    async def _report_progress(self) -> None:
        while True:
            self._on_progress(
                Progress(
                    phase=self._phase,
                    seconds=time.monotonic() - self._began,
                    kills=self._kills().total(),
                    stops=self._stops().total(),
                    failovers=self._failovers.failovers.total() if self._failovers else 0,
                    acknowledged=self._acknowledged(),
                    requests=self._proxy.requests,
                )
            )
            await asyncio.sleep(_PROGRESS_SECONDS)

    def _acknowledged(self) -> int:
        queued = sum(len(keys) for device in self._devices for keys in device.acknowledged.values())
        return queued + sum(writer.acknowledged for writer in self._writers)

    def _kills(self) -> Counter[str]:
        failovers = self._failovers
        return self._injector.kills + (Counter() if failovers is None else failovers.kills)

    def _stops(self) -> Counter[str]:
        failovers = self._failovers
        return self._injector.stops + (Counter() if failovers is None else failovers.stops)

    def _report(self, history: History, fault_seconds: float) -> Report:
        counts = Counter((effect.tenant, effect.action) for effect in history.effects)
        acknowledged = [action for action in history.actions if action.acknowledged]
        causes: Counter[str] = Counter() if self._failovers is None else self._failovers.failovers
        times = RecoveryTimes() if self._failovers is None else self._failovers.times
        return Report(
            database=self._kind,
            replication=self._replication,
            nats=self._nats,
            seed=self._seed,
            fault_seconds=round(fault_seconds, 1),
            seconds=round(time.monotonic() - self._began, 1),
            kills=dict(self._kills()),
            stops=dict(self._stops()),
            failovers=causes.total(),
            failover_causes=dict(causes),
            recovery_median_seconds=times.median,
            recovery_worst_seconds=times.worst,
            outcomes=dict(self._proxy.outcomes),
            users=sum(len(device.users) for device in self._devices) + len(self._writers),
            actions=len(history.actions),
            acknowledged=len(acknowledged),
            requests=self._proxy.requests,
            effects=counts.total(),
            jobs=len(history.jobs),
            dead_letters=sum(job.is_dead for job in history.jobs),
            doubled=sum(count - 1 for count in counts.values()),
            lost=sum(not counts[action.tenant, action.id] for action in acknowledged),
            violations=tuple(str(violation) for violation in check(history)),
        )
