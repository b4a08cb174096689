"""A client without an outbox: it sends one write after another, and each until it is acknowledged.

It retries at once, so it notices the end of an outage before the devices do, which obey
``Retry-After``. What it counts as acknowledged is what the server has confirmed.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Final
from uuid import uuid4

import httpx
import msgspec

from onceward_lab.chaos.actions import mark_id
from onceward_lab.history import UserAction

__all__ = ["Writer"]

_RETRY_SECONDS: Final = 0.1
_RESPONSE_SECONDS: Final = 10.0
_ERROR: Final = 400
_TEMPORARY: Final = frozenset({408, 409, 425, 429})
_SERVER_ERROR: Final = 500


@dataclass
class Writer:
    """One client and all its writes so far."""

    name: str
    server: str
    token: str
    # Called after a success that is no replay, with the time at which the request was sent.
    on_success: Callable[[float], None]
    actions: list[UserAction] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def acknowledged(self) -> int:
        """The number of writes that the server has confirmed."""
        return sum(action.acknowledged for action in self.actions)

    async def run(self, deadline: float) -> None:
        """Write until ``deadline``; the last write is sent until it is acknowledged."""
        authorization = {"Authorization": f"Bearer {self.token}"}
        async with httpx.AsyncClient(
            base_url=self.server, headers=authorization, timeout=_RESPONSE_SECONDS
        ) as client:
            while time.monotonic() < deadline:
                await self._write(client)

    async def _write(self, client: httpx.AsyncClient) -> None:
        number, key = len(self.actions), str(uuid4())
        mark = f"write {number}"
        action = UserAction(
            id=mark_id(self.name, mark),
            device=self.name,
            user=self.name,
            tenant=self.name,
            key=key,
            position=number,
            acknowledged=False,
            has_entry=False,
        )
        self.actions.append(action)
        document = {"title": mark, "marks": {mark: True}}
        for pause in chain((0.0,), repeat(_RETRY_SECONDS)):
            await asyncio.sleep(pause)
            if await self._send(client, key, document):
                break
        self.actions[number] = msgspec.structs.replace(action, acknowledged=True)

    async def _send(self, client: httpx.AsyncClient, key: str, document: object) -> bool:
        """Send once; returns whether the write was acknowledged."""
        began = time.monotonic()
        try:
            response = await client.post(
                "/api/v1/activities", json=document, headers={"Idempotency-Key": key}
            )
        except httpx.HTTPError:
            return False
        status = response.status_code
        if status < _ERROR:
            if "Idempotency-Replayed" not in response.headers:
                self.on_success(began)
            return True
        if status < _SERVER_ERROR and status not in _TEMPORARY:
            self.errors.append(f"{self.name} got {status}: {response.text[:500]}")
            await asyncio.sleep(_RESPONSE_SECONDS)  # a bug; do not repeat it without end
        return False
