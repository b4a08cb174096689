"""A siege: real processes work, others kill and stop them, and a checker decides at the end."""

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

from holdfast.server.jwt_auth import mint_token
from holdfast_lab.chaos.cluster import DatabaseKind, Fort
from holdfast_lab.chaos.device_process import Phone
from holdfast_lab.chaos.fault_injector import Besiegers
from holdfast_lab.chaos.record import answer_of, jobs_left, read_history
from holdfast_lab.checker import check
from holdfast_lab.fork_client import AsyncForkServer
from holdfast_lab.history import AnswerSeen, History
from holdfast_lab.proxy import CALM, CuttingProxy, Exchange, Weather

__all__ = ["Report", "Standing", "run_chaos"]

_WEATHER: Final = Weather(
    lose_answer=0.12,
    cut_answer=0.03,
    cut_request=0.05,
    drop_midway=0.05,
    longest_delay_seconds=0.01,
)
_PHONES: Final = 6
_LOOK_SECONDS: Final = 0.5
_DRAINS_WITHIN_SECONDS: Final = 120.0
_PRELOADED: Final = ("holdfast_services.cli.worker", "holdfast_lab.chaos.person")


class Standing(msgspec.Struct, kw_only=True):
    """How it stands at this moment."""

    phase: str
    seconds: float
    kills: int
    stops: int
    acknowledged: int
    requests: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, what came of it, and which promises were broken."""

    database: str
    nats: bool
    seed: int
    # Under fire, and with start and end.
    siege_seconds: float
    seconds: float
    kills: dict[str, int]
    stops: dict[str, int]
    fates: dict[str, int]
    users: int
    taps: int
    acknowledged: int
    requests: int
    effects: int
    jobs: int
    dead_letters: int
    duplicates: int
    lost: int
    violations: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations


async def run_chaos(
    seconds: float,
    *,
    kind: DatabaseKind = "sqlite",
    nats: bool = False,
    seed: int = 1,
    watch: Callable[[Standing], None] = lambda _standing: None,
) -> Report:
    """Lay siege for so many seconds, let everything drain, and report."""
    with tempfile.TemporaryDirectory(prefix="holdfast-siege-", ignore_cleanup_errors=True) as name:
        async with AsyncForkServer(Path(name), preload=_preloaded(kind, nats=nats)) as processes:
            siege = _Siege(processes, kind=kind, nats=nats, seed=seed, watch=watch)
            try:
                return await siege.run(seconds)
            finally:
                siege.fort.remove()


def _preloaded(kind: DatabaseKind, *, nats: bool) -> tuple[str, ...]:
    stores = ("holdfast.stores.postgres",) if kind == "postgres" else ()
    return (*_PRELOADED, *stores, *(("holdfast.jobs.engines.jetstream",) if nats else ()))


class _Siege:
    def __init__(
        self,
        processes: AsyncForkServer,
        *,
        kind: DatabaseKind,
        nats: bool,
        seed: int,
        watch: Callable[[Standing], None],
    ) -> None:
        self._kind, self._nats, self._seed = kind, nats, seed
        self._watch = watch
        self._phase = "starting"
        self._began = time.monotonic()
        self._secret = secrets.token_urlsafe(32)
        self._users_of_tokens: dict[str, str] = {}
        self._answers: list[AnswerSeen] = []
        self.fort = Fort(
            processes,
            kind=kind,
            nats=nats,
            secret=self._secret,
            first_port=15_000 + secrets.randbelow(14_000),
        )
        self._proxy = CuttingProxy(
            *self.fort.ports, weather=_WEATHER, seed=seed, on_exchange=self._note
        )
        self._phones = [
            Phone(
                f"phone-{number}",
                processes,
                self._proxy.url,
                self._token_of,
                # One of them encrypted: opening it takes its time, which is another race.
                passphrase=secrets.token_urlsafe(16) if number == 0 else None,
                seed=seed * 1000 + number,
            )
            for number in range(_PHONES)
        ]
        chance = random.Random(seed)  # noqa: S311 - whom to kill, not a secret
        self._besiegers = Besiegers(processes, self.fort, self._phones, chance)

    async def run(self, seconds: float) -> Report:
        watching = asyncio.create_task(self._watch_it())
        undrained: list[str] = []
        try:
            await self.fort.open()
            async with self._proxy:
                siege_seconds = await self._under_fire(seconds, undrained)
                await self._until_jobs_are_done(undrained)
            self._phase = "stopping"
            await self.fort.close()
            self._phase = "checking"
            history = await read_history(
                self.fort.database_url,
                self._phones,
                answers=self._answers,
                undrained=undrained,
                mishaps=self.fort.mishaps,
            )
            return self._report(history, siege_seconds)
        finally:
            await self._besiegers.leave()
            await self.fort.leave()
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _under_fire(self, seconds: float, undrained: list[str]) -> float:
        """Let the phones work under fire, then in peace until they are done."""
        self._phase = "under fire"
        began = time.monotonic()
        using = [
            asyncio.create_task(self._use(phone, began + seconds), name=phone.name)
            for phone in self._phones
        ]
        try:
            await self._besiegers.attack(seconds)
            siege_seconds = time.monotonic() - began
            self._phase = "draining"
            self._proxy.weather = CALM
            done, left = await asyncio.wait(using, timeout=_DRAINS_WITHIN_SECONDS)
            undrained += [f"{task.get_name()} is not done" for task in left]
            for task in done:
                task.result()
            await self._besiegers.settle()
        finally:
            for task in using:
                task.cancel()
            await asyncio.gather(*using, return_exceptions=True)
        return siege_seconds

    async def _use(self, phone: Phone, deadline: float) -> None:
        number = 0
        while time.monotonic() < deadline:
            await phone.live(f"{phone.name}-user-{number}")
            number += 1

    async def _until_jobs_are_done(self, undrained: list[str]) -> None:
        deadline = time.monotonic() + _DRAINS_WITHIN_SECONDS
        while left := await jobs_left(self.fort.database_url):
            if time.monotonic() > deadline:
                undrained.append(f"{left} jobs are not done")
                return
            await asyncio.sleep(_LOOK_SECONDS / 5)

    async def _note(self, exchange: Exchange) -> None:
        token = (exchange.header("authorization") or "").removeprefix("Bearer ")
        answer = answer_of(exchange, self._users_of_tokens.get(token, "nobody"))
        if answer is not None:
            self._answers.append(answer)

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

    async def _watch_it(self) -> None:
        while True:
            self._watch(
                Standing(
                    phase=self._phase,
                    seconds=time.monotonic() - self._began,
                    kills=self._besiegers.kills.total(),
                    stops=self._besiegers.stops.total(),
                    acknowledged=self._acknowledged(),
                    requests=self._proxy.requests,
                )
            )
            await asyncio.sleep(_LOOK_SECONDS)

    def _acknowledged(self) -> int:
        return sum(len(keys) for phone in self._phones for keys in phone.acknowledged.values())

    def _report(self, history: History, siege_seconds: float) -> Report:
        counts = Counter((effect.tenant, effect.tap) for effect in history.effects)
        acknowledged = [tap for tap in history.taps if tap.acknowledged]
        return Report(
            database=self._kind,
            nats=self._nats,
            seed=self._seed,
            siege_seconds=round(siege_seconds, 1),
            seconds=round(time.monotonic() - self._began, 1),
            kills=dict(self._besiegers.kills),
            stops=dict(self._besiegers.stops),
            fates=dict(self._proxy.fates),
            users=sum(len(phone.users) for phone in self._phones),
            taps=len(history.taps),
            acknowledged=len(acknowledged),
            requests=self._proxy.requests,
            effects=counts.total(),
            jobs=len(history.jobs),
            dead_letters=sum(job.is_dead for job in history.jobs),
            duplicates=sum(count - 1 for count in counts.values()),
            lost=sum(not counts[tap.tenant, tap.id] for tap in acknowledged),
            violations=tuple(str(violation) for violation in check(history)),
        )
