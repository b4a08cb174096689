"""Failovers of a chaos run: what an HA manager does when it loses the primary, over and over.

The primary is killed, frozen or cut off; a second later the standby is promoted, and then the old
primary is rewound and follows. Only a standby that has all that was acknowledged is promoted, which
an HA manager guarantees too. An old primary that continues after the promotion is left running for
a while: it must not be able to acknowledge anything.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

from onceward_testing.postgres_pair import RealPostgresPair

__all__ = ["FailoverInjector", "RecoveryTimes"]

_PROMOTE_SECONDS: Final = 1.0
_MAX_PAUSE_SECONDS: Final = 2.0
"""Between two faults; a failover takes two to five seconds more."""

_MAX_FAULT_SECONDS: Final = 1.5

Fault = Callable[[], Coroutine[Any, Any, None]]


class RecoveryTimes:
    """The seconds from the loss of the primary to the first success of a request sent after it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._lost_at: float | None = None

    def primary_lost(self) -> None:
        """Start to measure."""
        self._lost_at = time.monotonic()

    def succeeded(self, sent_at: float) -> None:
        """Stop, if a request that was sent at this monotonic time can be the first success."""
        if self._lost_at is not None and sent_at > self._lost_at:
            self.seconds.append(time.monotonic() - self._lost_at)
            self._lost_at = None

    @property
    def median(self) -> float | None:
        """None if there was no failover."""
        return round(statistics.median(self.seconds), 2) if self.seconds else None

    @property
    def worst(self) -> float | None:
        """None if there was no failover."""
        return round(max(self.seconds), 2) if self.seconds else None


class FailoverInjector:
    """Injects faults into a pair, one at a time, and counts them."""

    def __init__(self, pair: RealPostgresPair, rng: random.Random) -> None:
        """Injects nothing until :meth:`run` is called."""
        self._pair = pair
        self._random = rng
        self.times = RecoveryTimes()
        # By what happened to the primary.
        self.failovers: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        # Why a whole copy was made in place of a rewind.
        self.copies: list[str] = []

    async def run(self, seconds: float) -> None:
        """Inject faults for ``seconds``; afterwards the pair is whole."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        faults: dict[Fault, int] = {
            self._lose_behind_primary: 2,
            self._kill_primary: 4,
            self._freeze_primary: 3,
            self._isolate_primary: 2,
            self._restart_primary: 1,
            self._kill_standby: 1,
            self._cut_network: 1,
        }
        # Each fault once before the weighted choice. The first is one that loses acknowledged
        # writes if replication is asynchronous, so that the shortest control run shows a loss.
        first = list(faults)
        later = first[1:]
        self._random.shuffle(later)
        queue = [first[0], *later]
        while (left := deadline - loop.time()) > 0:
            await asyncio.sleep(min(self._random.uniform(0.5, _MAX_PAUSE_SECONDS), left))
            if queue:
                fault = queue.pop(0)
            else:
                (fault,) = self._random.choices(list(faults), list(faults.values()))
            await fault()

    # -------------------------------------------------------------- with a failover

    async def _kill_primary(self) -> None:
        self._lose_primary()
        await self._do(self._pair.kill_primary)
        self.kills["primary"] += 1
        await asyncio.sleep(_PROMOTE_SECONDS)
        await self._fail_over("killed")
        await self._rewind()

    async def _lose_behind_primary(self) -> None:
        """Kill a primary whose last commits have not reached the standby."""
        await self._do(self._pair.cut_network)
        self.stops["network"] += 1
        await self._wait(0.3)
        self._lose_primary()
        await self._do(self._pair.kill_primary)
        self.kills["primary"] += 1
        await asyncio.sleep(_PROMOTE_SECONDS)
        await self._fail_over("cut off and killed")
        await self._do(self._pair.heal_network)
        await self._rewind()

    async def _freeze_primary(self) -> None:
        """Stop the primary, promote the standby, and let the old primary continue."""
        self._lose_primary()
        await self._do(self._pair.freeze_primary)
        self.stops["primary"] += 1
        await asyncio.sleep(_PROMOTE_SECONDS)
        await self._fail_over("frozen")
        await self._wait(0.0)
        await self._do(self._pair.thaw)
        await self._wait(0.0)
        await self._rewind()

    async def _isolate_primary(self) -> None:
        """Promote the standby while clients still reach the primary, which is cut off from it."""
        self._lose_primary()
        await self._do(self._pair.cut_network)
        self.stops["network"] += 1
        await asyncio.sleep(_PROMOTE_SECONDS)
        await self._fail_over("cut off")
        await self._wait(0.0)
        await self._do(self._pair.heal_network)
        await self._rewind()

    # ----------------------------------------------------------- without a failover

    async def _restart_primary(self) -> None:
        """Kill the primary and start it again before the standby is promoted."""
        self.kills["primary"] += 1
        await self._do(self._pair.kill_primary)
        await self._do(self._pair.start_primary)

    async def _kill_standby(self) -> None:
        self.kills["standby"] += 1
        await self._do(self._pair.kill_standby)
        await self._wait(0.1)
        await self._do(self._pair.start_standby)

    async def _cut_network(self) -> None:
        self.stops["network"] += 1
        await self._do(self._pair.cut_network)
        await self._wait(0.1)
        await self._do(self._pair.heal_network)

    # ------------------------------------------------------------------------ steps

    def _lose_primary(self) -> None:
        if self._pair.synchronous and not self._pair.is_in_sync:
            raise RuntimeError("the standby does not have all that was acknowledged")
        self.times.primary_lost()

    async def _fail_over(self, kind: str) -> None:
        await self._do(self._pair.fail_over)
        self.failovers[kind] += 1

    async def _rewind(self) -> None:
        reason = await asyncio.to_thread(self._pair.rewind)
        if reason is not None:
            self.copies.append(reason)

    async def _wait(self, at_least: float) -> None:
        await asyncio.sleep(self._random.uniform(at_least, _MAX_FAULT_SECONDS))

    @staticmethod
    async def _do(action: Callable[[], None]) -> None:
        await asyncio.to_thread(action)
