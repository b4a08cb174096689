"""The collected history shows every violation that the database contains."""

import json
import sqlite3
from pathlib import Path

import pytest

from onceward.stores.factory import open_store
from onceward.stores.parts import JOBS
from onceward_lab.chaos.actions import action_id, actions_of
from onceward_lab.chaos.collector import read_history, response_of
from onceward_lab.chaos.device import Device
from onceward_lab.checker import Rule, check
from onceward_lab.fork_client import AsyncForkServer
from onceward_lab.history import History, ResponseSeen
from onceward_lab.proxy import Exchange
from onceward_lab.user_actions import LONG_DAY, marks_of
from onceward_outbox import OutboxQueue
from onceward_services.registry import migration_packages

USER = "ada"
NOW = "2026-01-31T09:30:00Z"


@pytest.fixture
def device(tmp_path: Path) -> Device:
    device = Device(
        "device", AsyncForkServer(tmp_path), "http://127.0.0.1:1", lambda _user: "token"
    )
    with OutboxQueue.open(device.path) as queue:
        queue.add_user(USER)
        entries = queue.enqueue_many(actions_of(USER))
    device.users.append(USER)
    device.acknowledged[USER] = {
        action_id(USER, e.endpoint, e.decoded()): e.idempotency_key for e in entries
    }
    return device


@pytest.fixture
async def database(tmp_path: Path) -> str:
    """Return a database in which every action took effect once."""
    url = f"sqlite:///{tmp_path / 'server.db'}"
    store = open_store(url, migration_packages=migration_packages())
    store.schema.want(JOBS)
    await store.open()
    await store.close()
    with sqlite3.connect(tmp_path / "server.db") as rows:
        for seq, (kind, what, step) in enumerate(LONG_DAY):
            data = {"nodeIds": [what]} if "tree" in kind else {"questId": what, "step": step}
            rows.execute(
                "INSERT INTO walker_events VALUES (?, ?, ?, ?, ?)",
                (USER, seq, kind, json.dumps(data), NOW),
            )
        for seq, entry in enumerate(actions_of(USER)):
            if entry.profile == "routes":
                add_route(rows, f"request-{seq}", entry.payload)
            elif entry.profile == "field" and entry.operation == "create":
                marks = dict.fromkeys(marks_of(entry.payload), True)
                if entry.entity_type == "activities":
                    marks |= {mark.replace("visit", "title"): True for mark in list(marks)}
                rows.execute(
                    "INSERT INTO field_items VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL)",
                    (
                        USER,
                        entry.entity_type,
                        f"item-{seq}",
                        len(marks),
                        json.dumps({"marks": marks}),
                        seq,
                        NOW,
                        NOW,
                    ),
                )
    rows.close()
    return url


def add_route(rows: sqlite3.Connection, request_id: str, payload: object) -> None:
    rows.execute(
        "INSERT INTO route_requests VALUES (?, ?, 'done', ?, '{}', ?, ?)",
        (USER, request_id, json.dumps(payload), NOW, NOW),
    )
    rows.execute(
        "INSERT INTO onceward_job_completions VALUES"
        " (?, ?, 'key', 'routes', 'route.generate', ?, 'hash', NULL, 1, 'w', 'r', 'c', 0, 0)",
        (USER, f"job-of-{request_id}", request_id),
    )


async def history(url: str, device: Device, *responses: ResponseSeen) -> History:
    return await read_history(url, [device], responses=list(responses), unfinished=[], errors=[])


async def test_actions_that_took_effect_once_violate_nothing(device: Device, database: str) -> None:
    found = await history(database, device)
    assert len(found.effects) == len(found.actions) == len(found.entries) == 82
    assert check(found) == []


BROKEN = {
    "a change made twice": (
        Rule.EXACTLY_ONCE,
        "UPDATE field_items SET version = 3 WHERE version = 2",
    ),
    "a document made twice": (
        Rule.EXACTLY_ONCE,
        """INSERT INTO field_items
           SELECT tenant, kind, 'twin', version, document, 999, created_at, updated_at, NULL, NULL
             FROM field_items WHERE version = 1 LIMIT 1""",
    ),
    "a step without effect": (
        Rule.EXACTLY_ONCE,
        "DELETE FROM walker_events WHERE seq = 5",
    ),
    "a step out of order": (
        Rule.ORDER,
        "UPDATE walker_events SET seq = 1000 WHERE seq = 3",
    ),
    "a route requested twice": (
        Rule.EXACTLY_ONCE,
        """INSERT INTO route_requests
           SELECT tenant, 'twin', status, payload, result, created_at, updated_at
             FROM route_requests LIMIT 1""",
    ),
    "a document of another tenant": (
        Rule.NO_INVENTION,
        "UPDATE field_items SET tenant = 'bo'",
    ),
    "a lost job": (
        Rule.JOB_WITH_EFFECT,
        "DELETE FROM onceward_job_completions WHERE rowid = 1",
    ),
    "a job that is completed and dead-lettered": (
        Rule.JOB_ENDS_ONCE,
        """INSERT INTO onceward_dead_letters
           SELECT tenant, job_id, key, queue, type, resource_id, '{}', payload_hash, NULL,
                  'attempts', 'error', 5, 5, 1, 'a', 'r', 'c', 0, 0, NULL, NULL
             FROM onceward_job_completions LIMIT 1""",
    ),
}


@pytest.mark.parametrize(("rule", "sql"), BROKEN.values(), ids=BROKEN.keys())
async def test_violation_in_the_database_is_reported(
    device: Device, database: str, rule: Rule, sql: str
) -> None:
    with sqlite3.connect(database.removeprefix("sqlite:///")) as rows:
        assert rows.execute(sql).rowcount >= 1
    rows.close()
    assert rule in {violation.rule for violation in check(await history(database, device))}


async def test_acknowledged_action_missing_on_the_device_is_reported(
    device: Device, database: str
) -> None:
    device.users.append("bo")
    with OutboxQueue.open(device.path) as queue:
        queue.add_user("bo")
    device.acknowledged["bo"] = {
        action_id("bo", e.endpoint, e.payload): "key" for e in actions_of("bo")
    }
    rules = {violation.rule for violation in check(await history(database, device))}
    assert rules == {Rule.EXACTLY_ONCE, Rule.NEVER_LOST}


def exchange(body: str, response: str) -> ResponseSeen | None:
    head = b"POST /tree/allocate HTTP/1.1\r\nIdempotency-Key: k\r\n\r\n"
    raw = f"HTTP/1.1 200 OK\r\nContent-Length: {len(response)}\r\n\r\n{response}"
    return response_of(Exchange(head, body.encode(), raw.encode(), "passed"), USER)


async def test_two_responses_for_one_key_are_reported(device: Device, database: str) -> None:
    first = exchange('{"clientSubmittedAt": "1"}', '{"walkerId": "ada"}')
    second = exchange('{"clientSubmittedAt": "2"}', '{"walkerId": "bo"}')
    assert first is not None
    assert second is not None
    rules = {v.rule for v in check(await history(database, device, first, second))}
    assert rules == {Rule.SAME_RESPONSE, Rule.OWN_RESPONSES}
