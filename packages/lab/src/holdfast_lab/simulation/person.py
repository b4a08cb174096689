"""The people: they tap, look at what failed, change their minds, and set their clocks."""

from datetime import datetime, timedelta
from random import Random
from typing import Any, Final, Protocol

import msgspec

from holdfast.core.outbox_entry import Entry, Reason, Resolution, Status
from holdfast.errors import HoldfastError
from holdfast.outbox.conflicts import resolve_conflict
from holdfast.outbox.queue import OutboxQueue
from holdfast.outbox.transport import Request
from holdfast_lab.history import Expect
from holdfast_lab.simulation.device import Device, Life
from holdfast_lab.simulation.faults import Faults
from holdfast_lab.simulation.loop import OUTSIDE, Killed, VirtualLoop
from holdfast_lab.simulation.network import Network
from holdfast_lab.simulation.user_actions import Planned, make_key

__all__ = ["People", "PeopleWorld"]

_AGAIN_SECONDS: Final = 7.0
_MOST_TRIES: Final = 4
_MOST_RETRIES: Final = 2
_CAP_DAYS: Final = 7
_MADE: Final = 201
_GUEST: Final = "guest"
_OPERATIONS: Final = {
    "cancel": ("cancel",),
    "edit": ("edit_payload",),
    "park": ("park", "retry"),
    "prune": ("prune",),
    "guest": ("purge_user",),
    "map": ("map_local_id",),
}
_MIND_CHANGES: Final = ("cancel", "edit", "park", *_OPERATIONS)


class PeopleWorld(Protocol):
    """What people need to know of the world they are in."""

    loop: VirtualLoop
    faults: Faults
    network: Network
    taps: dict[str, Planned]

    def now(self) -> datetime:
        """Return the true time."""

    def has_happened(self, tap: Planned) -> bool:
        """Say whether a tap has had its effect."""

    def note(self, who: str, what: str) -> None:
        """Write a line of the timeline."""


class People:
    """Everybody who uses the devices of one world."""

    def __init__(self, world: PeopleWorld, devices: list[Device], chance: Random) -> None:
        """Know the devices."""
        self._world = world
        self._devices = {device.name: device for device in devices}
        self._chance = chance
        self._left = 0
        self._kept = 0
        # Keys that the server need not know any more.
        self._forgotten: set[str | None] = set()

    @property
    def have_tapped(self) -> bool:
        """True once nobody wants to tap any more."""
        return self._left == 0

    def begin(self, taps: list[Planned]) -> None:
        """Tap when the plan says so; some taps go together."""
        self._left = len(taps)
        for tap in taps:
            self._world.loop.call_at(tap.at, self._tap, tap, 1, context=OUTSIDE.copy())

    # -- tapping ----------------------------------------------------------------------------------

    def _tap(self, tap: Planned, tries: int) -> None:
        life = self._devices[tap.device].app
        if life is None or life.queue is None:  # the app is not there: later
            self._again(tap, tries)
            return
        world = self._world
        if self._devices[tap.device].was_set and tap.kind == "step":
            # A device whose clock was set may take an action for older or newer than it is.
            tap.expect = Expect.EITHER if tap.expect is Expect.EFFECT else tap.expect
        if tap.note is not None and not self._has_made(life.queue, tap):
            self._left -= 1
            del world.taps[tap.id]
            return
        try:
            entry = self._enqueue(life.queue, tap)
        except Killed:
            world.note(tap.device, f"tap {tap.id}: the app died")
        except HoldfastError as error:
            world.note(tap.device, f"tap {tap.id}: {type(error).__name__}")
        else:
            tap.acknowledged = True
            self._kept += 1
            tap.position, tap.at_once = self._kept, tries == 1
            tap.key = entry.idempotency_key
            world.note(tap.device, f"tap {tap.id} is kept as {tap.key[:8]}")
            life.notify()
            self._left -= 1
            return
        # The app did not say that it is kept. With a key of their own they may tap again; not
        # where a conflict may have changed the key meanwhile: the queue would take it for new.
        if tap.key is not None and not tap.rekeyed and tries < _MOST_TRIES:
            self._again(tap, tries + 1)
        else:
            self._left -= 1

    def _enqueue(self, queue: OutboxQueue, tap: Planned) -> Entry:
        if self._chance.random() < 0.2:  # noqa: PLR2004
            return queue.enqueue_many([tap.entry()])[0]
        return queue.enqueue(tap.entry())

    def _has_made(self, queue: OutboxQueue, tap: Planned) -> bool:
        """Say whether the note of a change is on this device: its tap may not have been kept."""
        return bool(queue.by_local_id(tap.note or ""))

    def _again(self, tap: Planned, tries: int) -> None:
        self._world.loop.call_later(_AGAIN_SECONDS, self._tap, tap, tries, context=OUTSIDE.copy())

    def sleep(self, days: float) -> bool:
        """Oversleep: what waits by then may be too old; returns whether keys are forgotten."""
        if days < _CAP_DAYS:
            return False
        for tap in self._world.taps.values():
            self._forgotten.add(tap.key)
            # Also where it was kept and the app died before it said so: the entry is as old.
            if tap.at <= self._world.loop.time() and tap.expect is Expect.EFFECT:
                tap.expect = Expect.EITHER
        return True

    # -- looking at the queue ---------------------------------------------------------------------

    def tend(self) -> None:
        """Look at what failed, on every device."""
        for device in self._devices.values():
            life = device.app
            if life is not None and life.queue is not None:
                try:
                    self._tend(life, life.queue, device)
                except Killed:
                    continue
                except HoldfastError as error:
                    self._world.note(device.name, f"by hand: {type(error).__name__}")

    def _tend(self, life: Life, queue: OutboxQueue, device: Device) -> None:
        acted = False
        for user in device.users:
            for entry in queue.entries(user, status=(Status.FAILED, Status.CONFLICT)):
                acted = self._decide(life, queue, entry) or acted
        if acted:
            life.notify()

    def _decide(self, life: Life, queue: OutboxQueue, entry: Entry) -> bool:
        tap = self._world.taps[entry.decoded()["tap"]]
        if entry.reason is Reason.DEPENDENCY:
            made = queue.by_local_id(tap.note or "")
            if not any(one.status in (Status.EXPIRED, Status.DISCARDED) for one in made):
                return False
            tap.expect = Expect.EITHER  # what it changes is not there, or under another name
            queue.discard(entry.id)
            return True
        if entry.status is Status.CONFLICT:
            how = self._chance.choice((Resolution.MINE, Resolution.THEIRS))
            resolve_conflict(queue, entry, how)
        elif entry.reason is Reason.UNKNOWN and self._world.has_happened(tap):
            queue.discard(entry.id)  # they have looked
        elif tap.expect is Expect.REFUSAL or (
            # An action of a device whose clock was far off can be refused for good.
            tap.expect is Expect.EITHER and tap.retries >= _MOST_RETRIES
        ):
            queue.discard(entry.id)
        else:
            tap.retries += 1
            queue.retry(entry.id)
        life.let_go(entry.idempotency_key)
        self._world.note(life.name, f"by hand: {tap.id}, which was {entry.status}")
        return True

    # -- changing their minds ---------------------------------------------------------------------

    def change_mind(self) -> None:
        """Do something seldom to one device."""
        device = self._chance.choice(list(self._devices.values()))
        life = device.app
        if life is None or life.queue is None:
            return
        what = self._chance.choice(self._favourites() or _MIND_CHANGES)
        try:
            self._change(what, life, life.queue, device)
        except Killed:
            return
        except HoldfastError as error:
            self._world.note(device.name, f"{what}: {type(error).__name__}")

    def _favourites(self) -> list[str]:
        if self._chance.random() < 0.3:  # noqa: PLR2004
            return []
        favours = self._world.faults.favours
        return [what for what, operations in _OPERATIONS.items() if favours(*operations)]

    def _change(self, what: str, life: Life, queue: OutboxQueue, device: Device) -> None:
        if what == "prune":
            if not self._forgotten:  # after days it would take away what the checker asks for
                queue.prune()
        elif what == "guest":
            queue.add_user(_GUEST)
            queue.purge_user(_GUEST)
        elif what == "map":
            queue.add_user(_GUEST)
            queue.map_local_id(
                _GUEST, "00000000-0000-4000-8000-000000000000", 1, entity_type="note"
            )
        else:
            self._change_entry(what, life, queue, device)

    def _change_entry(self, what: str, life: Life, queue: OutboxQueue, device: Device) -> None:
        user = self._chance.choice(device.users)
        pending = queue.entries(user, status=Status.PENDING)
        if not pending:
            return
        entry = self._chance.choice(pending)
        tap = self._world.taps[entry.decoded()["tap"]]
        if tap.expect is not Expect.EFFECT or not tap.acknowledged or self._has_children(tap):
            return
        if what == "cancel":
            tap.expect = Expect.EITHER  # until it is certain
            queue.cancel(entry.id)
            tap.expect = Expect.REFUSAL
        elif what == "edit":
            was, tap.rekeyed = tap.rekeyed, True
            changed: dict[str, Any] = entry.decoded() | {"edited": True}
            try:
                queue.edit_payload(entry.id, changed)
            except HoldfastError:
                tap.rekeyed = was
                raise
        elif what == "park" and not entry.outcome_unknown:
            queue.park(entry.id, reason=Reason.REBUILD, error="put aside")
        self._world.note(device.name, f"{what} {tap.id}")
        life.notify()

    def _has_children(self, tap: Planned) -> bool:
        """Say whether another tap changes what this one makes."""
        taps = self._world.taps.values()
        return tap.local_id is not None and any(other.note == tap.local_id for other in taps)

    def set_clock(self) -> None:
        """Set the clock of a device, by minutes or by weeks."""
        device = self._chance.choice(list(self._devices.values()))
        hours = self._chance.choice((-400.0, -7.0, -0.2, 0.2, 7.0, 400.0))
        device.clock_off += timedelta(hours=hours)
        device.was_set = True
        self._world.note(device.name, f"clock set by {hours:+} h")

    # -- other people -----------------------------------------------------------------------------

    def forge(self) -> None:
        """Send a key that is in use with another payload, deep inside."""
        tap = self._some_tap()
        if tap is None or tap.kind == "change" or tap.rekeyed:
            return
        other = tap.payload | {"what": {"deep": {"n": -1}}}
        self._send(tap, other, tap.user)

    def borrow(self) -> None:
        """Send a key that another tenant uses, as somebody else."""
        tap = self._some_tap()
        if tap is None or tap.kind != "note":
            return
        name = f"borrowed-{tap.id}"
        stranger = f"not-{tap.user}"
        payload = {"tap": name, "what": tap.payload["what"]}
        if name not in self._world.taps:
            self._world.taps[name] = Planned(
                id=name,
                device="elsewhere",
                user=stranger,
                at=0.0,
                kind="note",
                position=0,
                key=tap.key,
                payload=payload,
            )
        self._send(tap, payload, stranger)

    def act_late(self) -> None:
        """Send an action that is older than any server takes: it must not happen."""
        at = self._world.now() - timedelta(days=9)
        name = f"late-{len(self._world.taps)}"
        payload = {"tap": name, "clientGeneratedAt": at.isoformat()}
        tap = self._world.taps[name] = Planned(
            id=name,
            device="elsewhere",
            user="late",
            at=0.0,
            kind="step",
            position=0,
            key=make_key(self._chance),
            payload=payload,
            expect=Expect.REFUSAL,
        )
        self._send(tap, payload, tap.user)

    def _some_tap(self) -> Planned | None:
        # Not before it has happened: whoever comes first has the key.
        answered = {
            answer.key.partition("~")[0]
            for answer in self._world.network.answers
            if answer.status == _MADE
        }
        taps = [
            tap
            for tap in self._world.taps.values()
            if tap.acknowledged
            and tap.key in answered
            and tap.key not in self._forgotten
            and tap.expect is Expect.EFFECT
        ]
        return self._chance.choice(taps) if taps else None

    def _send(self, tap: Planned, payload: dict[str, Any], user: str) -> None:
        headers = {
            "Idempotency-Key": tap.key or "",
            "Authorization": f"Bearer {user}",
            "Content-Type": "application/json",
        }
        target = "/steps" if tap.kind == "step" else "/notes"
        request = Request("POST", target, headers, msgspec.json.encode(payload))
        self._world.network.send("elsewhere", request, lambda _: None)
