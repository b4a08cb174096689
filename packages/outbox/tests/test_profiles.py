"""Profiles: where they are found, what they change, and what happens without one."""

import logging
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onceward.errors import ConfigurationError
from onceward_outbox import ChainAction, ConflictResolution, Drop, OutboxQueue, Park, Profile, Send
from onceward_outbox import profile as profiles_module
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import DEFAULT_PRIORITY, Entry, NewEntry, Reason, Status
from onceward_outbox.errors import EntryInvalidError
from onceward_outbox.profile import DEFAULT_PROFILE, ProfileRegistry
from onceward_protocol.keys import KeyFormat
from onceward_protocol.response_classification import Done, OutOfOrder
from onceward_protocol.retry import QUEUE
from packages.onceward.tests.support.outbox_harness import (
    SOON,
    Scripted,
    drain,
    response,
)


def order(**fields: Any) -> NewEntry:
    return NewEntry(
        **{
            "user_id": "ada",
            "operation": "create",
            "entity_type": "order",
            "endpoint": "/orders",
            "payload": {"n": 1},
            **fields,
        }
    )


def open_queue(path: Path, *profiles: Profile) -> OutboxQueue:
    queue = OutboxQueue.open(path / "outbox.db", profiles=profiles, chance=lambda: 0.5)
    queue.add_user("ada")
    return queue


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles_module, "_installed", dict)


def test_entries_have_the_default_profile_unless_they_name_one(tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        entry = queue.enqueue(order())
    assert entry.profile == "default"
    assert entry.priority == DEFAULT_PRIORITY
    assert not DEFAULT_PROFILE.strict_order
    assert DEFAULT_PROFILE.conflict_resolution is ConflictResolution.MANUAL
    assert DEFAULT_PROFILE.key_lifetime == timedelta(hours=24)
    assert DEFAULT_PROFILE.key_format is KeyFormat.UUID4
    assert DEFAULT_PROFILE.retry is QUEUE


def test_an_unknown_profile_is_refused_with_the_line_that_registers_it(tmp_path: Path) -> None:
    with open_queue(tmp_path) as queue:
        with pytest.raises(EntryInvalidError, match=r"profiles=\[Profile\(name='shop'") as refused:
            queue.enqueue(order(profile="shop"))
        assert refused.value.rule == "profile_must_be_known"
        assert queue.entries() == []


def test_profiles_that_are_passed_go_before_installed_ones() -> None:
    mine = Profile(name="walk", priorities={"order": 7})
    assert ProfileRegistry([mine]).get("walk") is mine
    assert ProfileRegistry([Profile(name="default", strict_order=True)]).get("default").strict_order


def test_two_profiles_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="same name"):
        ProfileRegistry([Profile(name="shop"), Profile(name="shop")])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no.such.module:PROFILE", "cannot be loaded"),
        ("onceward.errors:UsageError", "should be an"),
    ],
)
def test_an_entry_point_that_is_no_profile_is_named(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("shop", value, "onceward.outbox_profiles")
    monkeypatch.setattr(profiles_module, "_installed", lambda: {"shop": point})
    with pytest.raises(ConfigurationError, match=message):
        ProfileRegistry().find("shop")


def test_a_profile_cannot_be_changed() -> None:
    codes = {"DONE": Done()}
    profile = Profile(name="shop", codes=codes)
    codes.clear()
    assert profile.codes == {"DONE": Done()}
    with pytest.raises(FrozenInstanceError):
        profile.name = "other"  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match="name"):
        Profile(name="")


def test_a_profile_decides_about_priority_keys_and_codes(tmp_path: Path) -> None:
    shop = Profile(
        name="shop",
        priorities={"order": 9},
        key_format=KeyFormat.OPAQUE,
        key_header="X-Shop-Key",
        codes={"ALREADY_ORDERED": Done()},
    )
    with open_queue(tmp_path, shop) as queue:
        entry = queue.enqueue(order(profile="shop", key="my-key"))
        assert (entry.priority, entry.idempotency_key) == (9, "my-key")
        server = Scripted([response(409, {"error": "ALREADY_ORDERED"})])
        report = drain(queue, "ada", server)
        assert server.requests[0].headers["X-Shop-Key"] == "my-key"
        assert "Idempotency-Key" not in server.requests[0].headers
        assert (report.ended, report.succeeded) == (Ended.EMPTY, 1)


def test_the_conflict_strategy_of_the_profile_holds_for_entries_without_one(
    tmp_path: Path,
) -> None:
    shop = Profile(name="shop", conflict_resolution=ConflictResolution.SERVER_WINS)
    with open_queue(tmp_path, shop) as queue:
        entry = queue.enqueue(order(profile="shop"))
        drain(queue, "ada", Scripted([response(409)]))
        assert queue.get(entry.id).status is Status.DISCARDED


# -- without the profile --------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_installed")
def test_entries_of_an_unknown_profile_are_not_sent_and_hold_up_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_queue(tmp_path, Profile(name="shop", priorities={"order": 9})) as queue:
        left = queue.enqueue(order(profile="shop"))
        sent = [queue.enqueue(order()) for _ in range(3)]
    with open_queue(tmp_path) as queue, caplog.at_level(logging.ERROR):
        server = Scripted(lambda _: response(201, {"id": 1}))
        report = drain(queue, "ada", server)
        assert (report.ended, report.succeeded, report.unsent) == (Ended.BLOCKED, 3, 1)
        assert "no outbox profile 'shop' is registered" in (report.detail or "")
        assert "no outbox profile 'shop' is registered" in caplog.text
        assert {queue.get(entry.id).status for entry in sent} == {Status.SUCCEEDED}
        kept = queue.get(left.id)
        assert (kept.status, kept.attempt_count, kept.profile) == (Status.PENDING, 0, "shop")
        assert kept.idempotency_key == left.idempotency_key
        assert queue.attempts(left.id) == []
        # A person can still give it up.
        assert queue.cancel(left.id).status is Status.DISCARDED


def test_drain_says_that_no_entry_creates_a_local_id(tmp_path: Path) -> None:
    absent = f"/orders/{{local:{uuid4()}}}"
    with open_queue(tmp_path) as queue:
        queue.enqueue(order(operation="patch", endpoint=absent))
        report = drain(queue, "ada", Scripted(lambda _: response(201, {"id": 1})))
        assert (report.ended, report.unsent) == (Ended.BLOCKED, 1)
        assert report.detail == "no entry creates a local id that is referred to"


# -- recovery -------------------------------------------------------------------------------------


class NextOrder:
    """A recovery: the server says which order it expects; earlier ones are done."""

    path = "/orders/next"

    def plan(self, entry: Entry, pending: Sequence[Entry], state: Any) -> Sequence[ChainAction]:
        def decide(one: Entry) -> ChainAction:
            number = one.decoded()["n"]
            if number < state["next"]:
                return Drop(one)
            return Send(one) if number == state["next"] else Park(one, "an order is missing")

        return [decide(one) for one in (entry, *pending)]


IN_ORDER = Profile(
    name="shop", strict_order=True, codes={"NOT_NEXT": OutOfOrder()}, recovery=NextOrder()
)


def test_a_recovery_drops_sends_and_parks(tmp_path: Path) -> None:
    with open_queue(tmp_path, IN_ORDER) as queue:
        entries = queue.enqueue_many([order(profile="shop", payload={"n": n}) for n in (1, 2, 4)])
        server = Scripted(
            [response(422, {"error": "NOT_NEXT"}), response(200, {"next": 2}), response(200)]
        )
        report = drain(queue, "ada", server)
        assert (report.ended, report.rebuilt, report.succeeded) == (Ended.BLOCKED, 1, 1)
        assert [request.target for request in server.requests] == [
            "/orders",
            "/orders/next",
            "/orders",
        ]
        found = [queue.get(entry.id) for entry in entries]
        assert [(entry.status, entry.reason) for entry in found] == [
            (Status.DISCARDED, Reason.REBUILD),
            (Status.SUCCEEDED, None),
            (Status.FAILED, Reason.REBUILD),
        ]
        assert found[2].last_error == "an order is missing"


def test_without_a_recovery_what_is_out_of_order_fails(tmp_path: Path) -> None:
    plain = Profile(name="shop", codes={"NOT_NEXT": OutOfOrder()})
    with open_queue(tmp_path, plain) as queue:
        entry = queue.enqueue(order(profile="shop"))
        report = drain(queue, "ada", Scripted([response(422, {"error": "NOT_NEXT"})]), retry=SOON)
        assert (report.ended, queue.get(entry.id).status) == (Ended.BLOCKED, Status.FAILED)
