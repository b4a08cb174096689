"""Sessions of the console: kept in the database, so that signing out ends them everywhere.

The cookie has a random id. The table has its hash only: someone who reads the table cannot use it.
"""

import hmac
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

import msgspec

from onceward.ports import Clock, Store
from onceward.stores.parts import Part
from onceward.stores.sql_loader import load_queries
from onceward.tenants import ALL_TENANTS
from onceward_operator.console.access import Operator, Role

__all__ = ["CONSOLE", "PARTS", "Session", "Sessions"]

# The part of the schema with the table of sessions.
CONSOLE: Final = Part("console", "onceward_operator")
# Found by ``onceward migrate``, through an entry point.
PARTS: Final = (CONSOLE,)

_ID_BYTES: Final = 32
# How often the time of the last use is written.
_USE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Session:
    """The session of one browser."""

    operator: Operator
    # Sent with every form, so that a page of another site cannot send one.
    form_token: str
    # The value of the cookie, right after the sign-in only.
    secret: str | None = None

    def accepts(self, form_token: str) -> bool:
        """Compare the token of a form in constant time."""
        return hmac.compare_digest(self.form_token.encode(), form_token.encode())


class Sessions:
    """Begins, finds and ends sessions."""

    def __init__(
        self, store: Store, clock: Clock, *, idle_seconds: float, max_seconds: float
    ) -> None:
        """End sessions after ``idle_seconds`` without a request, or ``max_seconds``."""
        self._store = store
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._max_seconds = max_seconds

    async def begin(self, operator: Operator) -> Session:
        """Begin a session with a new id; an id that the browser has sent is never taken over."""
        secret = secrets.token_urlsafe(_ID_BYTES)
        form_token = secrets.token_urlsafe(_ID_BYTES)
        now = self._now()
        await self._store.write(self._sql("sweep_sessions"), self._times(now))
        ends_at = now + self._max_seconds
        if operator.expires_at is not None:
            ends_at = min(ends_at, operator.expires_at.timestamp())
        values = {
            "id_hash": _hash(secret),
            "subject": operator.subject,
            "role": operator.role.label,
            "tenants": _encode_tenants(operator),
            "sees_payloads": int(operator.sees_payloads),
            "form_token": form_token,
            "now": now,
            "ends_at": ends_at,
        }
        await self._store.write(self._sql("add_session"), values)
        return Session(operator, form_token, secret)

    async def find(self, secret: str) -> Session | None:
        """Return the session of a cookie, unless it has ended."""
        now = self._now()
        about = {"id_hash": _hash(secret)}
        rows = await self._store.read(self._sql("find_session"), about | self._times(now))
        if not rows:
            return None
        row = rows[0]
        if now - row["used_at"] > _USE_SECONDS:
            await self._store.write(self._sql("use_session"), about | {"now": now})
        return Session(
            Operator(
                subject=row["subject"],
                role=Role[row["role"].upper()],
                tenants=_decode_tenants(row["tenants"]),
                sees_payloads=bool(row["sees_payloads"]),
                expires_at=datetime.fromtimestamp(row["ends_at"], UTC),
            ),
            row["form_token"],
        )

    async def end(self, secret: str) -> None:
        """End the session of a cookie, if there is one."""
        await self._store.write(self._sql("end_session"), {"id_hash": _hash(secret)})

    def _now(self) -> float:
        return self._clock.now().timestamp()

    def _times(self, now: float) -> dict[str, Any]:
        return {"now": now, "idle_since": now - self._idle_seconds}

    def _sql(self, name: str) -> str:
        names = self._store.table_names
        return load_queries("onceward_operator.console", "sessions.sql", names=names)[name]


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def _encode_tenants(operator: Operator) -> str:
    tenants = None if operator.tenants is ALL_TENANTS else operator.tenants
    return msgspec.json.encode(tenants).decode()


def _decode_tenants(text: str) -> Any:
    found = msgspec.json.decode(text, type=tuple[str, ...] | None)
    return ALL_TENANTS if found is None else found
