"""Which holds a device has to keep, by what it got from the server. Read by ``checker``.

After 503 or a gateway's error nothing is sent to the server for a while, after 429 nothing to that
endpoint. What the server has named (``Retry-After``) also holds for the other processes of the
device, from the drain on that begins after it was stored.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from onceward_lab.history import Contact

__all__ = ["DeviceHolds"]

_SERVER: Final = ""
_LEAST_SECONDS: Final = 1.0
"""How long a hold lasts at least if the server has named no time."""

_EARLY_SECONDS: Final = 0.5
"""How much too early is not counted."""


class _Hold(msgspec.Struct):
    until: float
    # When the device got the response that named or renewed it.
    at: float
    # The server has named the time.
    is_named: bool


class _Stored(msgspec.Struct, frozen=True):
    until: float
    at: float
    process: str
    # What the device's clock was then: seconds ahead, and corrections.
    clock: tuple[float, int]


class _Process:
    def __init__(self) -> None:
        self.holds: dict[str, _Hold] = {}
        # What it has to store: holds that the server has named, or that have ended.
        self.is_changed = False
        # Requests without a result, by number.
        self.in_flight: dict[int, Contact] = {}


class DeviceHolds:
    """The holds of one device while its contacts are followed in order."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self._stored: dict[str, _Stored] = {}

    def early(self, sent: Contact) -> Iterator[str]:
        """Describe the holds that a request does not wait for."""
        own = self._process(sent)
        for key in (_SERVER, *_endpoints(sent)):
            hold, stored = own.holds.get(key), self._stored.get(key)
            if hold is not None and sent.at < hold.until - _EARLY_SECONDS:
                yield _describe(sent, key, hold.until)
            elif (
                stored is not None
                and stored.process != sent.process
                and stored.at < sent.drain_began_at
                # A clock that was set or corrected decides, at worst too early.
                and stored.clock == _clock(sent)
                and sent.at < stored.until - _EARLY_SECONDS
            ):
                yield f"{_describe(sent, key, stored.until)}, which another process has stored"

    def probes(self, sent: Contact) -> Iterator[str]:
        """Describe the other requests while one request should show whether a hold is over."""
        own = self._process(sent)
        for key in (_SERVER, *_endpoints(sent)):
            hold = own.holds.get(key)
            if hold is None:
                continue
            for other in own.in_flight.values():
                # A repeat of the same action is the same probe; what was sent before is none.
                is_probe = other.action != sent.action and other.at > hold.at
                if is_probe and key in (_SERVER, *_endpoints(other)):
                    yield (
                        f"{sent.action} was sent at {sent.at:.1f} while {other.action} was in "
                        f"flight, after a hold on {key or 'the server'}"
                    )

    def follow(self, contact: Contact) -> None:
        """Take a contact into account."""
        own = self._process(contact)
        if contact.what == "sent":
            own.in_flight[contact.number] = contact
            return
        own.in_flight.pop(contact.number, None)
        if contact.what == "held":
            self._begin(own, contact)
        elif contact.what == "responded":
            for key in (_SERVER, contact.endpoint):
                own.is_changed |= own.holds.pop(key, None) is not None
                self._stored.pop(key, None)
        elif contact.what == "online":
            for hold in own.holds.values():
                hold.until = hold.until if hold.is_named else 0.0
        elif contact.what == "stored" and own.is_changed:
            self._store(own, contact)

    def _process(self, contact: Contact) -> _Process:
        return self._processes.setdefault(contact.process, _Process())

    @staticmethod
    def _begin(own: _Process, held: Contact) -> None:
        key = held.endpoint if held.is_endpoint else _SERVER
        named = held.retry_after_seconds
        hold = _Hold(held.at + max(named or 0.0, _LEAST_SECONDS), held.at, bool(named))
        before = own.holds.get(key)
        if before is not None and before.is_named and before.until > hold.until:
            hold = msgspec.structs.replace(before, at=held.at)
        own.holds[key] = hold
        own.is_changed |= hold.is_named

    def _store(self, own: _Process, stored: Contact) -> None:
        """Replace what is stored: a process stores the holds it knows, and no others."""
        own.is_changed = False
        self._stored = {
            key: _Stored(hold.until, stored.at, stored.process, _clock(stored))
            for key, hold in own.holds.items()
            if hold.is_named
        }


def _endpoints(sent: Contact) -> tuple[str, ...]:
    return sent.endpoints or (sent.endpoint,)


def _clock(contact: Contact) -> tuple[float, int]:
    return contact.clock_seconds, contact.clock_corrections


def _describe(sent: Contact, key: str, until: float) -> str:
    return (
        f"{sent.action} was sent at {sent.at:.1f}, {until - sent.at:.1f} s before the end of the "
        f"hold on {key or 'the server'}"
    )
