"""Outages: which responses mean that the server is down, and how long nothing is sent to it.

An outage is held against the server, not against the entry that met it. 503 and gateway errors hold
everything, 429 holds one endpoint. When a hold has passed, one request is sent as a probe; the rest
follows if it gets any other response, otherwise the hold begins anew and is longer.
"""

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from threading import Lock
from typing import Final

import msgspec

from onceward_outbox.transaction import Transaction
from onceward_outbox.transport import Response

__all__ = [
    "OUTAGE_STATUSES",
    "SERVER",
    "TOO_MANY",
    "Outages",
    "StoredHold",
    "holds_row",
    "is_outage",
    "path_template",
    "read_holds",
    "write_holds",
]

SERVER: Final = ""
"""The key of a hold on the whole server. Those on endpoints have the template of the path."""

TOO_MANY: Final = 429
"""Holds its endpoint, all others hold the server."""

OUTAGE_STATUSES: Final = frozenset({429, 502, 503, 504})
"""Other server errors are outages if the response is a gateway's page."""

_SERVER_ERROR: Final = 500
_VERSION: Final = re.compile(r"v\d+", re.IGNORECASE)
_MAX_BLAME: Final = 6
_MAX_BLAMED: Final = 1000
_LATER: Final = 1.1
"""The entry that met an outage waits a little longer than the others, so that one of those is the
next probe: if only this entry makes the server fail, they go on."""


def is_outage(response: Response) -> bool:
    """Return whether a response says that the server is overloaded or not there.

    Also an HTML page with a server error that has no sign of the service: a gateway's.
    """
    status, headers = response.status, response.headers
    if status in OUTAGE_STATUSES:
        return True
    is_page = status >= _SERVER_ERROR and "html" in headers.get("content-type", "")
    return is_page and "x-request-id" not in headers and "idempotency-replayed" not in headers


@lru_cache(maxsize=1024)
def path_template(endpoint: str) -> str:
    """Return a path with ``*`` for the segments that look like ids, as a pattern for GLOB.

    A segment with a digit counts as an id, except for versions such as ``v1``.
    """
    path = endpoint.partition("?")[0]
    return "/".join(_segment(part) for part in path.split("/"))


def _segment(part: str) -> str:
    is_id = part.startswith("{") or any(character.isdigit() for character in part)
    if is_id and _VERSION.fullmatch(part) is None:
        return "*"
    return re.sub(r"([\[*?])", r"[\1]", part)


class StoredHold(msgspec.Struct, frozen=True):
    """A hold that the server has set by ``Retry-After``, as it is stored in the file."""

    seconds: float
    why: str


class _Hold:
    """One hold: until when, and the probes that have failed."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.until = 0.0
        self.failures = 0
        # Set by Retry-After: kept when the app calls `online` or `wake`, and stored.
        self.is_fixed = False


class Outages:
    """The holds on one server. Thread-safe: drains of one outbox share them."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._holds: dict[str, _Hold] = {}
        # By entry: how often it has met an outage while others did not.
        self._blame: dict[str, int] = {}
        # Holds that the server has set were changed and not stored since.
        self.is_unsaved = False

    # ------------------------------------------------------------------ what is held

    def server_seconds(self) -> float:
        """Return for how long nothing may be sent; 0 if something may."""
        hold = self._holds.get(SERVER)
        return 0.0 if hold is None else max(0.0, hold.until - self._monotonic())

    @property
    def server_why(self) -> str | None:
        """What the server responded, for a person."""
        hold = self._holds.get(SERVER)
        return None if hold is None else hold.why

    def paths(self) -> Mapping[str, float]:
        """Return the templates of the endpoints that are held, each with the seconds left."""
        if not self._holds:
            return {}
        now = self._monotonic()
        with self._lock:
            return {
                key: hold.until - now
                for key, hold in self._holds.items()
                if key != SERVER and hold.until > now
            }

    def is_held(self, endpoint: str) -> bool:
        """Return whether nothing may be sent to an endpoint now."""
        if not self._holds:
            return False
        hold = self._holds.get(path_template(endpoint))
        is_held = hold is not None and hold.until > self._monotonic()
        return is_held or self.server_seconds() > 0

    def probed_by(self, endpoint: str) -> str | None:
        """Return the key of the hold that a request to this endpoint probes; None if there is none.

        Until its response there should be no other request with the same key.
        """
        if not self._holds:
            return None
        if SERVER in self._holds:
            return SERVER
        template = path_template(endpoint)
        return template if template in self._holds else None

    # ------------------------------------------------------------------ changes

    def begin(
        self,
        entry_id: str,
        endpoint: str,
        response: Response,
        *,
        delay: Callable[[int], float],
        retry_after_seconds: float | None,
    ) -> tuple[float, bool]:
        """Hold the server or the endpoint after an outage's response to an entry.

        ``delay`` returns how long to wait after so many failed probes. Returns how long this entry
        should wait, and whether the hold is a new one.
        """
        is_endpoint = response.status == TOO_MANY
        key = path_template(endpoint) if is_endpoint else SERVER
        with self._lock:
            hold = self._holds.get(key)
            is_new = hold is None
            if hold is None:
                hold = self._holds[key] = _Hold("")
                self._blame_for(entry_id)
            hold.failures += 1
            seconds = max(delay(hold.failures), retry_after_seconds or 0.0)
            until = self._monotonic() + seconds
            # A response to an earlier request does not shorten what a later one has set.
            hold.until = max(hold.until, until) if hold.is_fixed else until
            hold.is_fixed = bool(retry_after_seconds) or hold.until > until
            self.is_unsaved |= hold.is_fixed
            hold.why = f"the server responded {response.status}"
            if is_endpoint:
                return seconds, is_new
            blame = self._blame.get(entry_id, 1) - 1
            return seconds * _LATER * 2 ** min(blame, _MAX_BLAME), is_new

    def end(self, entry_id: str, endpoint: str) -> list[str]:
        """End the holds that a response of the service disproves; returns their keys."""
        if not self._holds and not self._blame:
            return []
        with self._lock:
            self._blame.pop(entry_id, None)
            keys = [key for key in (SERVER, path_template(endpoint)) if key in self._holds]
            for key in keys:
                self.is_unsaved |= self._holds.pop(key).is_fixed
            return keys

    def probe_now(self) -> None:
        """Let a probe be sent at once, unless the server has named a time."""
        with self._lock:
            for hold in self._holds.values():
                if not hold.is_fixed:
                    hold.until = 0.0

    def _blame_for(self, entry_id: str) -> None:
        if len(self._blame) >= _MAX_BLAMED:
            self._blame.clear()
        self._blame[entry_id] = self._blame.get(entry_id, 0) + 1

    # ------------------------------------------------------------------ across processes

    def to_store(self) -> dict[str, StoredHold]:
        """Return the holds that the server has set, by key, to be stored now."""
        now = self._monotonic()
        with self._lock:
            self.is_unsaved = False
            return {
                key: StoredHold(hold.until - now, hold.why)
                for key, hold in self._holds.items()
                if hold.is_fixed and hold.until > now
            }

    def restore(self, stored: Mapping[str, StoredHold]) -> None:
        """Add the holds of an earlier process, or of another one."""
        now = self._monotonic()
        with self._lock:
            for key, found in stored.items():
                hold = self._holds.get(key)
                if found.seconds > 0 and (hold is None or hold.until < now + found.seconds):
                    hold = self._holds.setdefault(key, _Hold(found.why))
                    hold.until, hold.is_fixed, hold.why = now + found.seconds, True, found.why


# -- in the file -----------------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True):
    """A hold in the file: its end by the file's clock and by the device's."""

    until_ms: int
    until_at: datetime
    why: str


def read_holds(tx: Transaction, stored: str | None) -> dict[str, StoredHold]:
    """Return the holds in the row of a server that have not passed, by key."""
    if stored is None:
        return {}
    rows = msgspec.json.decode(stored, type=dict[str, _Row])
    left = {
        # The file's clock stops while the device is off, the other one can be set. At worst a
        # request is sent too early.
        key: min((row.until_ms - tx.ms) / 1000, (row.until_at - tx.now).total_seconds())
        for key, row in rows.items()
    }
    return {key: StoredHold(left[key], row.why) for key, row in rows.items() if left[key] > 0}


def write_holds(tx: Transaction, server: str, holds: Mapping[str, StoredHold]) -> None:
    """Store these holds on a server, and no others."""
    if not holds:
        tx.rows("forget_holds", row=holds_row(server))
        return
    rows = {
        key: _Row(
            tx.ms + int(hold.seconds * 1000), tx.now + timedelta(seconds=hold.seconds), hold.why
        )
        for key, hold in holds.items()
    }
    tx.rows("save_holds", row=holds_row(server), value=msgspec.json.encode(rows).decode())


def holds_row(server: str) -> str:
    """Return the name of the row with the holds on a server."""
    return f"holds {server}"
