"""Simulated users: they act, retry or discard what failed, edit entries, and set clocks."""

from contextlib import suppress
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final, Protocol

import msgspec

from onceward.errors import OncewardError
from onceward_lab.history import Expect
from onceward_lab.simulation.device import AppProcess, Device
from onceward_lab.simulation.faults import Faults
from onceward_lab.simulation.loop import NO_PROCESS, ProcessKilled, VirtualLoop
from onceward_lab.simulation.network import Network
from onceward_lab.simulation.user_actions import PlannedAction, make_uuid
from onceward_outbox.conflicts import resolve_conflict
from onceward_outbox.entry import Entry, Reason, Resolution, Status
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.transport import Request

__all__ = ["Users", "UsersWorld"]

_RETRY_SECONDS: Final = 7.0
_MAX_TRIES: Final = 4
_MAX_RETRIES: Final = 2
_MAX_VAIN_RETRIES: Final = 3
_KEY_LIFETIME_DAYS: Final = 7
_CREATED: Final = 201
_GUEST: Final = "guest"
_OPERATIONS: Final = {
    "cancel": ("cancel", "renumber"),
    "edit": ("edit_payload",),
    "park": ("park", "retry"),
    "prune": ("prune",),
    "guest": ("purge_user",),
    "map": ("map_local_id",),
    "idle": ("warn_of_expiry",),
}
_CHANGES: Final = ("cancel", "edit", "park", *_OPERATIONS)


class UsersWorld(Protocol):
    """The parts of the world that users use."""

    loop: VirtualLoop
    faults: Faults
    network: Network
    actions: dict[str, PlannedAction]

    def now(self) -> datetime:
        """Return the true time."""

    def has_happened(self, action: PlannedAction) -> bool:
        """Return whether an action has had its effect."""

    def note(self, source: str, event: str) -> None:
        """Append an event to the timeline."""


class Users:
    """All users of the devices of one world, and some requests from elsewhere."""

    def __init__(self, world: UsersWorld, devices: list[Device], rng: Random) -> None:
        self._world = world
        self._devices = {device.name: device for device in devices}
        self._rng = rng
        self._remaining = 0
        self._enqueued = 0
        self._foreign = 0
        # Keys that the server may have forgotten.
        self._forgotten_keys: set[str | None] = set()
        # The database has lost versions that the devices have seen.
        self.are_versions_lost = False

    @property
    def are_done(self) -> bool:
        """True once all planned actions were tried."""
        return self._remaining == 0

    def schedule(self, actions: list[PlannedAction]) -> None:
        """Schedule all actions at their planned times."""
        self._remaining = len(actions)
        for action in actions:
            self._world.loop.call_at(action.at, self._act, action, 1, context=NO_PROCESS.copy())

    # -- actions ----------------------------------------------------------------------------------

    def _act(self, action: PlannedAction, tries: int) -> None:
        app = self._devices[action.device].app
        if app is None or app.queue is None:  # the app is not running
            self._act_later(action, tries)
            return
        world = self._world
        # If the app died after the commit, it was made then, and this try finds its entry.
        is_there = tries > 1 and _has_key(app.queue, action)
        action.enqueued_at = action.enqueued_at if is_there else world.loop.time()
        if self._devices[action.device].clock_was_set and action.kind == "step":
            # With a wrong clock, the action may seem older or newer than it is.
            action.expect = Expect.EITHER if action.expect is Expect.EFFECT else action.expect
        if action.note is not None and not self._has_note(app.queue, action):
            self._remaining -= 1
            del world.actions[action.id]
            return
        try:
            entry = self._enqueue(app.queue, action)
        except ProcessKilled:
            world.note(action.device, f"action {action.id}: the app died")
        except OncewardError as error:
            world.note(action.device, f"action {action.id}: {type(error).__name__}")
        else:
            action.acknowledged = True
            self._enqueued += 1
            action.position, action.first_try = self._enqueued, tries == 1
            action.key = entry.idempotency_key
            world.note(action.device, f"action {action.id} is enqueued as {action.key[:8]}")
            app.notify()
            self._remaining -= 1
            return
        # Not acknowledged. With its own key the action can be repeated, unless a conflict may have
        # changed the key: the queue would treat it as new.
        if action.key is not None and not action.rekeyed and tries < _MAX_TRIES:
            self._act_later(action, tries + 1)
        else:
            self._remaining -= 1

    def _enqueue(self, queue: OutboxQueue, action: PlannedAction) -> Entry:
        if self._rng.random() < 0.2:  # noqa: PLR2004
            return queue.enqueue_many([action.new_entry()])[0]
        return queue.enqueue(action.new_entry())

    def _has_note(self, queue: OutboxQueue, action: PlannedAction) -> bool:
        """Return whether the device has the note to change; enqueueing it may have failed."""
        return bool(queue.by_local_id(action.note or ""))

    def _act_later(self, action: PlannedAction, tries: int) -> None:
        self._world.loop.call_later(
            _RETRY_SECONDS, self._act, action, tries, context=NO_PROCESS.copy()
        )

    def skip_days(self, days: float) -> bool:
        """Expect that pending actions may be stale; returns whether keys are forgotten."""
        if days < _KEY_LIFETIME_DAYS:
            return False
        for action in self._world.actions.values():
            self._forgotten_keys.add(action.key)
            # Also if it was enqueued but not acknowledged: the entry is as old.
            if action.at <= self._world.loop.time() and action.expect is Expect.EFFECT:
                action.expect = Expect.EITHER
        return True

    def lose(self, lost: set[str]) -> list[PlannedAction]:
        """Expect that these actions, and changes of notes, may have no effect; return the lost."""
        self.forget_keys()
        self.are_versions_lost = True
        for action in self._world.actions.values():
            action.lost = action.lost or action.id in lost or action.kind == "change"
            # The server has other versions than the device has seen: there may be conflicts.
            action.rekeyed = action.rekeyed or action.kind == "change"
            if action.kind == "change" and action.expect is Expect.EFFECT:
                action.expect = Expect.EITHER  # the note may be lost
        return [self._world.actions[name] for name in sorted(lost) if name in self._world.actions]

    def forget_keys(self) -> None:
        """Do not reuse a key of before: whether the server knows it is uncertain."""
        self._forgotten_keys.update(action.key for action in self._world.actions.values())

    # -- failed entries ---------------------------------------------------------------------------

    def review_failures(self) -> None:
        """Retry, resolve or discard failed entries on every device."""
        for device in self._devices.values():
            app = device.app
            if app is not None and app.queue is not None:
                try:
                    self._review(app, app.queue, device)
                except ProcessKilled:
                    continue
                except OncewardError as error:
                    self._world.note(device.name, f"review: {type(error).__name__}")

    def _review(self, app: AppProcess, queue: OutboxQueue, device: Device) -> None:
        acted = False
        for user in device.users:
            acted = self._decide_about_all(app, queue, user) or acted
            for entry in queue.entries(user, status=(Status.FAILED, Status.CONFLICT)):
                acted = self._resolve(app, queue, entry) or acted
        if acted:
            app.notify()

    def _decide_about_all(self, app: AppProcess, queue: OutboxQueue, user: str) -> bool:
        """Retry all entries that failed after their last attempt, or discard all refused ones."""
        focuses_on = self._world.faults.focuses_on
        draw = self._rng.random()
        if draw < (0.9 if focuses_on("retry_all") else 0.1):
            retried = queue.retry_all(user, reason=Reason.ATTEMPTS)
            for entry in retried:
                app.clear_retry_after(entry.idempotency_key)
            return bool(retried)
        if draw < (0.9 if focuses_on("discard_all") else 0.2):
            refused = queue.discard_all(user, code="INSUFFICIENT_POINTS", dry_run=True)
            actions = [self._action_of(entry) for entry in refused]
            if actions and all(action.expect is Expect.REFUSAL for action in actions):
                return bool(queue.discard_all(user, code="INSUFFICIENT_POINTS"))
        return False

    def _action_of(self, entry: Entry) -> PlannedAction:
        return self._world.actions[entry.decoded()["action_id"]]

    def _resolve(self, app: AppProcess, queue: OutboxQueue, entry: Entry) -> bool:
        action = self._action_of(entry)
        made = queue.by_local_id(action.note) if action.note is not None else []
        # One that the user has parked needs its note, too.
        needs_note = entry.reason in (Reason.DEPENDENCY, Reason.REBUILD)
        if needs_note and any(one.status in (Status.EXPIRED, Status.DISCARDED) for one in made):
            action.expect = Expect.EITHER  # the note does not exist, or has another id
            queue.discard(entry.id)
            return True
        if entry.reason is Reason.DEPENDENCY:
            return self._leave_chain(queue, entry, action)
        if entry.status is Status.CONFLICT:
            how = self._rng.choice((Resolution.CLIENT_WINS, Resolution.SERVER_WINS))
            observer = self._devices[action.device].observer
            observer.on_decision(action.user, action.id, self._world.loop.time())
            resolve_conflict(queue, entry, how)
        elif entry.reason is Reason.UNKNOWN and self._world.has_happened(action):
            queue.discard(entry.id)  # the user has checked on the server
        elif not self._tries_in_vain(action) and (
            action.expect is Expect.REFUSAL
            # With a wrong clock, an action can be rejected permanently.
            or (action.expect is Expect.EITHER and action.retries >= _MAX_RETRIES)
        ):
            queue.discard(entry.id)
        else:
            action.retries += 1
            if entry.left_lane is not None:
                action.first_try = False  # later actions did not wait for it
            action.is_overtaken = action.is_overtaken or _is_overtaken(queue, entry)
            action.returned_at = min(action.returned_at, self._world.loop.time())
            action.rekeyed = action.rekeyed or not entry.outcome_unknown
            queue.retry(entry.id)
        app.clear_retry_after(entry.idempotency_key)
        self._world.note(app.name, f"review: {action.id}, which was {entry.status}")
        return True

    def _tries_in_vain(self, action: PlannedAction) -> bool:
        """Return whether the user retries what will be refused again, for the fault points."""
        return action.retries < _MAX_VAIN_RETRIES and self._world.faults.focuses_on("retry")

    def _leave_chain(self, queue: OutboxQueue, entry: Entry, action: PlannedAction) -> bool:
        """Discard an entry whose chain was refused, once what was refused is discarded."""
        if entry.chain is None:
            return False
        chain = [one for one in queue.entries(entry.user_id) if one.chain == entry.chain]
        if any(
            one.status is Status.FAILED and one.reason is not Reason.DEPENDENCY for one in chain
        ):
            return False
        action.expect = Expect.EITHER
        queue.discard(entry.id)
        return True

    # -- rare operations --------------------------------------------------------------------------

    def change_queue(self) -> None:
        """Perform a rare operation on one queue."""
        device = self._rng.choice(list(self._devices.values()))
        app = device.app
        if app is None or app.queue is None:
            return
        what = self._rng.choice(self._focused_changes() or _CHANGES)
        try:
            self._change(what, app, app.queue, device)
        except ProcessKilled:
            return
        except OncewardError as error:
            self._world.note(device.name, f"{what}: {type(error).__name__}")

    def _focused_changes(self) -> list[str]:
        if self._rng.random() < 0.3:  # noqa: PLR2004
            return []
        focuses_on = self._world.faults.focuses_on
        return [what for what, operations in _OPERATIONS.items() if focuses_on(*operations)]

    def _change(self, what: str, app: AppProcess, queue: OutboxQueue, device: Device) -> None:
        if what == "prune":
            if (
                not self._forgotten_keys
            ):  # after skipped days it would remove entries that the checker reads
                queue.prune()
        elif what == "idle":
            self._maintain(queue)
        elif what == "guest":
            queue.add_user(_GUEST)
            queue.purge_user(_GUEST)
        elif what == "map":
            queue.add_user(_GUEST)
            queue.map_local_id(
                _GUEST, "00000000-0000-4000-8000-000000000000", 1, entity_type="note"
            )
        else:
            self._change_entry(what, app, queue, device)

    def maintain_all(self) -> None:
        """Let every device do what it does when it is idle."""
        for device in self._devices.values():
            app = device.app
            if app is not None and app.queue is not None:
                with suppress(ProcessKilled, OncewardError):
                    self._maintain(app.queue)

    def _maintain(self, queue: OutboxQueue) -> None:
        if not self._forgotten_keys:
            queue._prune_at = 0.0  # noqa: SLF001 - its clock is real, and an hour has passed here
            queue.prune_if_due()

    def _change_entry(self, what: str, app: AppProcess, queue: OutboxQueue, device: Device) -> None:
        user = self._rng.choice(device.users)
        pending = queue.entries(user, status=Status.PENDING)
        if not pending:
            return
        entry = self._rng.choice(pending)
        action = self._action_of(entry)
        if (
            action.expect is not Expect.EFFECT
            or not action.acknowledged
            or self._has_children(action)
        ):
            return
        if what == "cancel":
            action.expect = Expect.EITHER  # until the cancellation is committed
            queue.cancel(entry.id)
            action.expect = Expect.REFUSAL
        elif what == "edit":
            was, action.rekeyed = action.rekeyed, True
            changed: dict[str, Any] = entry.decoded() | {"edited": True}
            try:
                queue.edit_payload(entry.id, changed)
            except OncewardError:
                action.rekeyed = was
                raise
        elif what == "park" and not entry.outcome_unknown:
            queue.park(entry.id, reason=Reason.REBUILD, error="parked by the user")
        self._world.note(device.name, f"{what} {action.id}")
        app.notify()

    def set_edits_aside(self) -> None:
        """Park an edit of each user that has later ones of the same note behind it."""
        for device in self._devices.values():
            app = device.app
            if app is not None and app.queue is not None:
                with suppress(ProcessKilled, OncewardError):
                    for user in device.users:
                        self._set_edit_aside(device, app.queue, user)

    def _set_edit_aside(self, device: Device, queue: OutboxQueue, user: str) -> None:
        pending = queue.entries(user, status=Status.PENDING)
        for number, entry in enumerate(pending):
            action = self._action_of(entry)
            is_plain = action.expect is Expect.EFFECT and action.acknowledged
            has_later = any(other.entity == entry.entity for other in pending[number + 1 :])
            if action.kind == "change" and is_plain and has_later and not entry.outcome_unknown:
                queue.park(entry.id, reason=Reason.REBUILD, error="parked by the user")
                self._world.note(device.name, f"park {action.id}")
                return

    def _has_children(self, action: PlannedAction) -> bool:
        """Return whether another action changes the note of this one."""
        actions = self._world.actions.values()
        return action.local_id is not None and any(
            other.note == action.local_id for other in actions
        )

    def edit_elsewhere(self, tenant: str, note: int) -> None:
        """Change a note from another client of the same user."""
        self._foreign += 1
        name = f"foreign-{self._foreign}"
        payload: dict[str, Any] = {"action_id": name}
        if self._rng.random() < 0.5:  # noqa: PLR2004
            payload["title"] = self._rng.randint(100, 999)
        else:
            payload["what"] = {"deep": {"n": self._rng.randint(100, 999)}}
        key = make_uuid(self._rng)
        self._world.actions[name] = PlannedAction(
            id=name,
            device="elsewhere",
            user=tenant,
            at=0.0,
            kind="change",
            position=0,
            key=key,
            payload=payload,
        )
        headers = {
            "Idempotency-Key": key,
            "Authorization": f"Bearer {tenant}",
            "Content-Type": "application/json",
        }
        request = Request("PATCH", f"/notes/{note}", headers, msgspec.json.encode(payload))
        self._world.network.send("elsewhere", request, lambda _: None)

    def set_clock(self) -> None:
        """Set the clock of a device, by minutes or by weeks."""
        device = self._rng.choice(list(self._devices.values()))
        hours = self._rng.choice((-400.0, -7.0, -0.2, 0.2, 7.0, 400.0))
        device.clock_offset += timedelta(hours=hours)
        device.clock_was_set = True
        self._world.note(device.name, f"clock set by {hours:+} h")

    # -- from elsewhere --------------------------------------------------------------------------

    def reuse_key_for_other_payload(self) -> None:
        """Send a used key with another payload, which differs in a nested field."""
        action = self._completed_action()
        if action is None or action.kind == "change" or action.rekeyed:
            return
        other = action.payload | {"what": {"deep": {"n": -1}}}
        self._send(action, other, action.user)

    def reuse_key_of_other_tenant(self) -> None:
        """Send the key of one tenant as another tenant."""
        action = self._completed_action()
        if action is None or action.kind != "note":
            return
        name = f"borrowed-{action.id}"
        stranger = f"not-{action.user}"
        payload = {"action_id": name, "what": action.payload["what"]}
        if name not in self._world.actions:
            self._world.actions[name] = PlannedAction(
                id=name,
                device="elsewhere",
                user=stranger,
                at=0.0,
                kind="note",
                position=0,
                key=action.key,
                payload=payload,
            )
        self._send(action, payload, stranger)

    def send_stale_action(self) -> None:
        """Send an action that is too old: it must be rejected."""
        at = self._world.now() - timedelta(days=9)
        name = f"late-{len(self._world.actions)}"
        payload = {"action_id": name, "clientGeneratedAt": at.isoformat()}
        action = self._world.actions[name] = PlannedAction(
            id=name,
            device="elsewhere",
            user="late",
            at=0.0,
            kind="step",
            position=0,
            key=make_uuid(self._rng),
            payload=payload,
            expect=Expect.REFUSAL,
        )
        self._send(action, payload, action.user)

    def _completed_action(self) -> PlannedAction | None:
        # Only completed actions: otherwise the wrong request would be the first with the key.
        completed_keys = {
            response.key.partition("~")[0]
            for response in self._world.network.responses
            if response.status == _CREATED and not response.is_unsettled
        }
        actions = [
            action
            for action in self._world.actions.values()
            if action.acknowledged
            and action.key in completed_keys
            and action.key not in self._forgotten_keys
            and action.expect is Expect.EFFECT
            and action.kind != "move"
        ]
        return self._rng.choice(actions) if actions else None

    def _send(self, action: PlannedAction, payload: dict[str, Any], user: str) -> None:
        headers = {
            "Idempotency-Key": action.key or "",
            "Authorization": f"Bearer {user}",
            "Content-Type": "application/json",
        }
        target = "/steps" if action.kind == "step" else "/notes"
        request = Request("POST", target, headers, msgspec.json.encode(payload))
        self._world.network.send("elsewhere", request, lambda _: None)


def _has_key(queue: OutboxQueue, action: PlannedAction) -> bool:
    """Return whether the queue has an entry with the key of an action."""
    entries = queue.entries(action.user, limit=1000)
    return any(entry.idempotency_key == action.key for entry in entries)


def _is_overtaken(queue: OutboxQueue, entry: Entry) -> bool:
    """Return whether later changes of its note were sent, or are being sent."""
    return entry.entity is not None and any(
        other.entity == entry.entity
        and other.sequence_number > entry.sequence_number
        and (other.status in (Status.SUCCEEDED, Status.IN_FLIGHT) or other.outcome_unknown)
        for other in queue.entries(entry.user_id, limit=1000)
    )
