"""What a siege reads is enough to convict: every broken promise in the database is found."""

import json
import sqlite3
from pathlib import Path

import pytest

from holdfast.outbox import OutboxQueue
from holdfast.stores.factory import open_store
from holdfast_lab.chaos.device_process import Phone
from holdfast_lab.chaos.plan import day_of, tap_of
from holdfast_lab.chaos.record import answer_of, read_history
from holdfast_lab.checker import Rule, check
from holdfast_lab.fork_client import AsyncForkServer
from holdfast_lab.history import AnswerSeen, History
from holdfast_lab.proxy import Exchange
from holdfast_lab.user_actions import LONG_DAY, marks_of
from holdfast_services.registry import migration_packages

USER = "ada"
NOW = "2026-01-31T09:30:00Z"


@pytest.fixture
def phone(tmp_path: Path) -> Phone:
    phone = Phone("phone", AsyncForkServer(tmp_path), "http://127.0.0.1:1", lambda _user: "token")
    with OutboxQueue.open(phone.path) as queue:
        queue.add_user(USER)
        entries = queue.enqueue_many(day_of(USER))
    phone.users.append(USER)
    phone.acknowledged[USER] = {
        tap_of(USER, one.endpoint, one.decoded()): one.idempotency_key for one in entries
    }
    return phone


@pytest.fixture
async def database(tmp_path: Path) -> str:
    """Return a database in which everything has happened once."""
    url = f"sqlite:///{tmp_path / 'server.db'}"
    store = open_store(url, migration_packages=migration_packages())
    await store.open()
    await store.close()
    with sqlite3.connect(tmp_path / "server.db") as rows:
        for seq, (kind, what, step) in enumerate(LONG_DAY):
            data = {"nodeIds": [what]} if "tree" in kind else {"questId": what, "step": step}
            rows.execute(
                "INSERT INTO walker_events VALUES (?, ?, ?, ?, ?)",
                (USER, seq, kind, json.dumps(data), NOW),
            )
        for seq, entry in enumerate(day_of(USER)):
            if entry.profile == "routes":
                add_route(rows, f"request-{seq}", entry.payload)
            elif entry.profile == "field" and entry.operation == "create":
                marks = dict.fromkeys(marks_of(entry.payload), True)
                if entry.entity_type == "activities":
                    marks |= {mark.replace("visit", "title"): True for mark in list(marks)}
                rows.execute(
                    "INSERT INTO field_items VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)",
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
        "INSERT INTO job_completions VALUES"
        " (?, ?, 'key', 'routes', 'route.generate', ?, 'hash', NULL, 1, 'w', 'r', 'c', 0, 0)",
        (USER, f"job-of-{request_id}", request_id),
    )


async def history(url: str, phone: Phone, *answers: AnswerSeen) -> History:
    return await read_history(url, [phone], answers=list(answers), undrained=[], mishaps=[])


async def test_a_day_that_happened_once_breaks_no_promise(phone: Phone, database: str) -> None:
    found = await history(database, phone)
    assert len(found.effects) == len(found.taps) == len(found.fates) == 82
    assert check(found) == []


BROKEN = {
    "a change made twice": (
        Rule.EXACTLY_ONCE,
        "UPDATE field_items SET version = 3 WHERE version = 2",
    ),
    "a document made twice": (
        Rule.EXACTLY_ONCE,
        """INSERT INTO field_items
           SELECT tenant, kind, 'twin', version, document, 999, created_at, updated_at, NULL
             FROM field_items WHERE version = 1 LIMIT 1""",
    ),
    "a step that never happened": (
        Rule.EXACTLY_ONCE,
        "DELETE FROM walker_events WHERE seq = 5",
    ),
    "a step out of its order": (
        Rule.ORDER,
        "UPDATE walker_events SET seq = 1000 WHERE seq = 3",
    ),
    "a route asked for twice": (
        Rule.EXACTLY_ONCE,
        """INSERT INTO route_requests
           SELECT tenant, 'twin', status, payload, result, created_at, updated_at
             FROM route_requests LIMIT 1""",
    ),
    "somebody else's document": (
        Rule.NO_INVENTION,
        "UPDATE field_items SET tenant = 'bo'",
    ),
    "a job that got lost": (
        Rule.JOB_WITH_EFFECT,
        "DELETE FROM job_completions WHERE rowid = 1",
    ),
    "a job that is done and dead": (
        Rule.JOB_ENDS_ONCE,
        """INSERT INTO dead_letters
           SELECT tenant, job_id, key, queue, type, resource_id, '{}', payload_hash, NULL,
                  'attempts', 'error', 5, 5, 1, 'a', 'r', 'c', 0, 0, NULL
             FROM job_completions LIMIT 1""",
    ),
}


@pytest.mark.parametrize(("rule", "sql"), BROKEN.values(), ids=BROKEN.keys())
async def test_what_is_wrong_in_the_database_is_found(
    phone: Phone, database: str, rule: Rule, sql: str
) -> None:
    with sqlite3.connect(database.removeprefix("sqlite:///")) as rows:
        assert rows.execute(sql).rowcount >= 1
    rows.close()
    assert rule in {violation.rule for violation in check(await history(database, phone))}


async def test_an_acknowledged_tap_that_is_not_on_the_device_is_found(
    phone: Phone, database: str
) -> None:
    phone.users.append("bo")
    with OutboxQueue.open(phone.path) as queue:
        queue.add_user("bo")
    phone.acknowledged["bo"] = {tap_of("bo", e.endpoint, e.payload): "key" for e in day_of("bo")}
    rules = {violation.rule for violation in check(await history(database, phone))}
    assert rules == {Rule.EXACTLY_ONCE, Rule.NEVER_LOST}


def exchange(body: str, answer: str) -> AnswerSeen | None:
    head = b"POST /tree/allocate HTTP/1.1\r\nIdempotency-Key: k\r\n\r\n"
    said = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n{answer}"
    return answer_of(Exchange(head, body.encode(), said.encode(), "passed"), USER)


async def test_two_answers_to_one_key_are_found(phone: Phone, database: str) -> None:
    first = exchange('{"clientSubmittedAt": "1"}', '{"walkerId": "ada"}')
    second = exchange('{"clientSubmittedAt": "2"}', '{"walkerId": "bo"}')
    assert first is not None
    assert second is not None
    rules = {v.rule for v in check(await history(database, phone, first, second))}
    assert rules == {Rule.SAME_ANSWER, Rule.OWN_ANSWERS}
