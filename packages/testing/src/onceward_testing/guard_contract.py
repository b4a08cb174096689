"""The behaviour of every guard, as a pytest suite: for Onceward's integrations and for yours.

Inherit from it and make apps with the routes of a ``Shop``::

    class TestMyFramework(GuardContract):
        @classmethod
        def new_app(cls, shop):
            return MyApp(shop)

``MyApp`` is a ``GuardedApp``: it sends requests to an app in this process, without sockets. An app
is used by many tests, each with its own tenant. Several apps may be open at once, on one database.
Fronts that read chunked bodies inherit ``ChunkedBodyContract`` too, and ASGI fronts
``AsgiContract``. Needs ``pytest``.
"""

# ruff: noqa: PLR2004 - the names of tests say what they check; statuses of HTTP are numbers
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from time import sleep
from typing import Any, Final

import pytest

from onceward import ErrorFormat, ErrorsStored, KeyFormat, Policy, Staleness
from onceward.errors import CommitUnknownError, StoreUnavailableError
from onceward.guard.rate_limits import LimitsRateLimiter
from onceward_testing.guard_harness import (
    Caller,
    GuardHarness,
    LimiterOf,
    NewCaller,
    code_of,
    new_tenant,
)
from onceward_testing.guard_shop import NOT_SIGNED_IN, FaultyStore, SettableClock
from onceward_testing.in_process_client import Response

__all__ = ["AsgiContract", "ChunkedBodyContract", "GuardContract"]

_BRIEF: Final = timedelta(milliseconds=60)
_UUID4: Final = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
_AWAY: Final = StoreUnavailableError("away", retry_after_seconds=2.5)
_STALE: Final = Policy(
    name="with staleness",
    success_ttl=timedelta(days=30),
    errors_stored=ErrorsStored.STALE_ONLY,
    staleness=Staleness(),
    error_format=ErrorFormat.ENVELOPE,
    volatile_fields=frozenset({"clientSubmittedAt"}),
)
_KEY_IN_BODY: Final = Policy(
    key_field="idempotencyKey", key_format=KeyFormat.UUID4, error_format=ErrorFormat.ENVELOPE
)
_MOST: Final = timedelta(days=7, hours=6)
_TICK: Final = timedelta(microseconds=1)

MALFORMED_JSON: Final = (
    b"{",
    b'{"a":1,"a":2}',
    b'{"a":{"b":1,"b":1}}',
    b"\xff",
    b'"\\ud800"',
    b"1e400",
    b"NaN",
    b"-Infinity",
    b"[" * 129 + b"]" * 129,
    b"[" * 100_000,
    b"\xef\xbb\xbf{}",
    b" ",
    b"{} {}",
    b'{"a":1,}',
    b"01",
    b"\x00",
)
JSON_AT_THE_LIMITS: Final = (b"[" * 128 + b"]" * 128, b"9" * 400, b"1e308", b'"\\u0000"')
_DEEP_TIME: Final = b'{"clientGeneratedAt":%s}' % (b"[" * 5000 + b"]" * 5000)
_DEEP: Final = b"[" * 100_000 + b"]" * 100_000
MALFORMED_KEYS_IN_BODIES: Final = (
    (b"{}", "IDEMPOTENCY_KEY_REQUIRED"),
    (b'{"idempotencyKey":null}', "IDEMPOTENCY_KEY_REQUIRED"),
    (b'{"idempotencyKey":""}', "IDEMPOTENCY_KEY_INVALID"),
    (b'{"idempotencyKey":5}', "IDEMPOTENCY_KEY_INVALID"),
    (b'{"idempotencyKey":["a"]}', "IDEMPOTENCY_KEY_INVALID"),
    (b'{"idempotencyKey":"%s"}' % _UUID4.upper().encode(), "IDEMPOTENCY_KEY_INVALID"),
    (b'{"idempotencyKey":"\\ud800"}', "BAD_REQUEST"),
    (b"", "BAD_REQUEST"),
    (b"[]", "BAD_REQUEST"),
    (b'{"idempotencyKey":', "BAD_REQUEST"),
    (b"\xff", "BAD_REQUEST"),
    (b'{"a":%s}' % _DEEP, "BAD_REQUEST"),
    (b'{"idempotencyKey":%s}' % _DEEP, "BAD_REQUEST"),
    (b'{"idempotencyKey":1%s}' % (b"0" * 5000), "BAD_REQUEST"),
)
MALFORMED_TIMES: Final[tuple[Any, ...]] = (
    {},
    [],
    "text",
    {"clientGeneratedAt": None},
    {"clientGeneratedAt": 1700000000},
    {"clientGeneratedAt": "2026-03-01T12:00:00"},
    {"clientGeneratedAt": "yesterday"},
    {"clientGeneratedAt": "2026-02-30T12:00:00Z"},
    {"clientGeneratedAt": "2026-03-01T12:00:00Z", "clientSubmittedAt": "2026-03-01T12:00"},
    {"clientGeneratedAt": "2026-03-01T12:00:00Z", "clientSubmittedAt": 5},
)
OTHER_BODIES: Final = (
    (b"some text", "text/plain; charset=utf-8"),
    (bytes(range(256)), "application/octet-stream"),
    (b"--b\r\n\r\nx\r\n--b--", "multipart/form-data; boundary=b"),
    (b"a=1&b=2", "application/x-www-form-urlencoded"),
    (b"\xff\xfe", None),
    (b"{not json", None),
    (b"", None),
    (b"", "application/json"),
    (b"x", "\xff;;="),
    (b'{"a":1}', "application/problem+json"),
)


def _iso(instant: datetime) -> str:
    return instant.isoformat().replace("+00:00", "Z")


class GuardContract(GuardHarness):
    """Tests that each front of the guard inherits."""

    # -- first time, replay ----------------------------------------------------------------------

    def test_first_request_runs_and_writes_order_record_and_audit_event(
        self, caller: Caller
    ) -> None:
        ids = {"X-Request-ID": "r-1", "X-Correlation-ID": "chain"}
        response = caller.send(headers=ids)
        assert (response.status, response.json()["bytes"]) == (201, len(b'{"item": "boots"}'))
        assert response.header("x-request-id") == "r-1"
        assert response.header("x-correlation-id") == "chain"
        assert response.header("idempotency-replayed") is None
        assert response.header("x-original-request-id") is None
        assert [value for name, value in response.headers if name == "set-cookie"] == ["a=1", "b=2"]
        assert response.header("x-extra") == response.json()["id"]
        assert caller.counts() == (1, 1, 1)
        [record], [audit] = caller.records(), caller.audits()
        assert record["audit_id"] == audit["id"]
        assert (record["endpoint"], record["idempotency_key"]) == ("orders.create", "key-1")
        assert record["response_status"] == audit["status"] == 201
        assert (record["request_id"], record["correlation_id"]) == ("r-1", "chain")
        assert (audit["request_id"], audit["correlation_id"]) == ("r-1", "chain")
        assert (audit["endpoint"], audit["actor"]) == ("orders.create", f"{caller.tenant}'s phone")

    @pytest.mark.parametrize("memory_bytes", [0, 1024 * 1024], ids=["from store", "from memory"])
    def test_replay_repeats_the_response_byte_for_byte(
        self, new_caller: NewCaller, memory_bytes: int
    ) -> None:
        caller = new_caller(memory_bytes=memory_bytes)
        first = caller.send(headers={"X-Request-ID": "r-1"})
        again = caller.send(headers={"X-Request-ID": "r-2", "X-Correlation-ID": "chain"})
        assert (again.status, again.body) == (201, first.body)
        assert again.header("content-length") == str(len(first.body))
        for name in ("content-type", "etag", "location", "x-extra"):
            assert again.header(name) == first.header(name) is not None
        assert again.header("set-cookie") is None
        assert again.is_replay
        assert again.header("x-request-id") == "r-2"
        assert again.header("x-original-request-id") == "r-1"
        assert again.header("x-correlation-id") == "chain"
        assert (caller.runs, caller.counts()) == (1, (1, 1, 1))
        assert len(caller.visits.committed) == 1

    def test_replay_without_own_ids_gets_a_new_request_id(self, caller: Caller) -> None:
        first, again = caller.send(), caller.send()
        assert first.header("x-request-id")
        assert again.header("x-request-id") not in (None, first.header("x-request-id"))
        assert again.header("x-original-request-id") == first.header("x-request-id")

    def test_replay_is_logged_as_an_audit_event_without_the_key(
        self, caller: Caller, caplog: pytest.LogCaptureFixture
    ) -> None:
        caller.send("the-secret-key", headers={"X-Request-ID": "r-1"})
        with caplog.at_level(logging.DEBUG):
            ids = {"X-Request-ID": "r-2", "X-Correlation-ID": "chain"}
            caller.send("the-secret-key", headers=ids)
        [event] = [r.__dict__ for r in caplog.records if r.getMessage() == "audit.replay"]
        assert event["original_audit_id"] == caller.audits()[0]["id"]
        assert (event["original_request_id"], event["request_id"]) == ("r-1", "r-2")
        assert (event["original_correlation_id"], event["correlation_id"]) == ("r-1", "chain")
        assert (event["tenant"], event["endpoint"]) == (caller.tenant, "orders.create")
        assert (event["actor"], event["status"]) == (f"{caller.tenant}'s phone", 201)

    def test_no_log_record_contains_a_key(
        self, caller: Caller, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.DEBUG):
            for do in ("raise", "stream", "422", ""):
                caller.send("the-secret-key", do=do)
            caller.send("the-secret-key", body={"item": "other"})
            caller.send("the-secret-key " * 3)
        logged = [f"{r.getMessage()} {r.__dict__!r}" for r in caplog.records]
        assert logged
        assert [line for line in logged if "the-secret-key" in line] == []

    @pytest.mark.parametrize("do", ["200", "202", "204", "201 size=40000"])
    def test_every_kind_of_success_is_replayed(self, new_caller: NewCaller, do: str) -> None:
        caller = new_caller(memory_bytes=0)
        first, again = caller.send(do=do), caller.send(do=do)
        assert (again.status, again.body) == (first.status, first.body)
        assert (first.status, again.is_replay) == (int(do[:3]), True)
        assert again.header("etag") == '"7"'
        assert (again.header("content-length") is None) is (do == "204")
        assert caller.runs == 1

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({"content": b'{"a":1,"b":2}'}, {"content": b' { "b" : 2.0, "a" : 1 } '}),
            ({"path": "/orders?a=1&b=2"}, {"path": "/orders?b=2&a=%31"}),
        ],
        ids=["JSON", "query"],
    )
    def test_same_request_formatted_differently_is_a_replay(
        self, caller: Caller, first: dict[str, Any], second: dict[str, Any]
    ) -> None:
        one, again = caller.send(**first), caller.send(**second)
        assert (one.status, again.body, again.is_replay) == (201, one.body, True)

    def test_only_the_fields_that_the_policy_names_are_left_out_of_the_hash(
        self, new_caller: NewCaller
    ) -> None:
        first = {"a": 1, "sentAt": "12:00", "proof": "x"}
        naming = new_caller(Policy(volatile_fields=frozenset({"sentAt", "proof"})))
        one, again = naming.send(body=first), naming.send(body={"a": 1, "sentAt": "12:05"})
        assert (one.status, again.body, again.is_replay) == (201, one.body, True)
        plain = new_caller(Policy())
        plain.send(body=first)
        assert plain.send(body={**first, "sentAt": "12:05"}).status == 409

    def test_another_app_on_the_same_database_replays(
        self, caller: Caller, new_caller: NewCaller
    ) -> None:
        other = new_caller(tenant=caller.tenant)
        first, again = caller.send(), other.send()
        assert (again.body, again.is_replay) == (first.body, True)
        assert (caller.runs, other.runs) == (1, 0)

    @pytest.mark.parametrize("memory_bytes", [0, 1024 * 1024])
    def test_expired_record_is_treated_as_absent(
        self, new_caller: NewCaller, memory_bytes: int
    ) -> None:
        clock = SettableClock()
        policy = Policy(success_ttl=timedelta(hours=1))
        caller = new_caller(policy, clock=clock, memory_bytes=memory_bytes)
        first = caller.send()
        clock.move(timedelta(hours=1) - _TICK)
        assert caller.send().body == first.body
        clock.move(_TICK)
        second, again = caller.send(body={"item": "hat"}), caller.send(body={"item": "hat"})
        assert (second.status, second.is_replay) == (201, False)
        assert (again.body, again.is_replay) == (second.body, True)
        assert caller.counts() == (2, 1, 2)

    def test_stored_error_expires_after_error_ttl(self, new_caller: NewCaller) -> None:
        clock = SettableClock()
        caller = new_caller(clock=clock)
        refused = caller.send(do="422")
        clock.move(timedelta(hours=4) - _TICK)
        assert caller.send().body == refused.body
        clock.move(_TICK)
        assert caller.send().status == 201
        clock.move(timedelta(hours=24) - _TICK)
        assert caller.send().is_replay

    # -- other requests with the same key --------------------------------------------------------

    @pytest.mark.parametrize(("ietf", "status"), [(False, 409), (True, 422)])
    def test_mismatch_is_refused_with_both_hashes_and_writes_nothing(
        self, new_caller: NewCaller, ietf: bool, status: int
    ) -> None:
        caller = new_caller(Policy(ietf_statuses=ietf), memory_bytes=0)
        first, conflict = caller.send(), caller.send(body={"item": "hat"})
        assert code_of(conflict) == (status, "idempotency.payload_mismatch")
        assert conflict.header("content-type") == "application/problem+json"
        problem = conflict.json()
        assert (problem["status"], problem["requestId"]) == (
            status,
            conflict.header("x-request-id"),
        )
        hashes = problem["details"]
        assert set(hashes) == {"expectedHash", "receivedHash"}
        assert hashes["expectedHash"] != hashes["receivedHash"]
        assert {len(value) for value in hashes.values()} == {64}
        assert not conflict.is_replay
        assert (caller.runs, caller.counts()) == (1, (1, 1, 1))
        assert caller.send().body == first.body

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({"path": "/shelves/a"}, {"path": "/shelves/b"}),
            ({"path": "/orders?on=monday"}, {"path": "/orders?on=friday"}),
            ({"path": "/orders"}, {"path": "/orders?on=friday"}),
            ({"body": {"n": 1}}, {"body": {"n": 2}}),
            ({"body": {"a": {"b": 1}}}, {"body": {"a": {"b": 2}}}),
            ({"content": b"x", "content_type": None}, {"content": b"y", "content_type": None}),
            ({"content": b"", "content_type": None}, {"content": b" ", "content_type": None}),
            (
                {"content": b"x", "content_type": "text/html"},
                {"content": b"x", "content_type": "text/plain"},
            ),
        ],
        ids=range(8),
    )
    def test_key_used_for_another_request_is_a_mismatch(
        self, caller: Caller, first: dict[str, Any], second: dict[str, Any]
    ) -> None:
        assert caller.send(**first).status == 201
        conflict = caller.send(**second)
        assert code_of(conflict) == (409, "idempotency.payload_mismatch")
        details = conflict.json()["details"]
        assert details["expectedHash"] != details["receivedHash"]
        assert caller.runs == 1
        assert caller.send(**first).is_replay

    def test_key_belongs_to_one_endpoint(self, caller: Caller) -> None:
        first, other = caller.send(), caller.send(path="/shelves/a")
        assert (first.status, other.status) == (201, 201)
        assert first.body != other.body
        assert caller.counts() == (2, 2, 2)

    def test_key_of_another_tenant_is_unknown(self, caller: Caller) -> None:
        eve, bob = new_tenant(), new_tenant()
        ids = {"X-Request-ID": "r"}
        mine, theirs = caller.send("shared"), caller.send("shared", tenant=eve, headers=ids)
        fresh = caller.send("fresh", tenant=eve, headers=ids)
        assert theirs.status == fresh.status == 201
        assert [name for name, _ in theirs.headers] == [name for name, _ in fresh.headers]
        assert len({mine.body, theirs.body, fresh.body}) == 3
        other = caller.send("shared", tenant=bob, body={"item": "hat"})
        assert other.status == 201, "a conflict would reveal that the key is in use"

    def test_caller_who_is_not_signed_in_gets_401_and_no_replay(self, caller: Caller) -> None:
        refused = caller.send(tenant=NOT_SIGNED_IN)
        assert (refused.status, caller.counts()) == (401, (0, 0, 0))
        first = caller.send()
        assert (first.status, first.is_replay) == (201, False)
        refused = caller.send(tenant=NOT_SIGNED_IN)
        assert (refused.status, refused.is_replay) == (401, False)
        assert first.json()["id"].encode() not in refused.body
        assert caller.shop.visits[NOT_SIGNED_IN].runs == []
        assert (
            caller.rows(
                "SELECT * FROM onceward_idempotency_records WHERE tenant = :tenant",
                tenant=NOT_SIGNED_IN,
            )
            == []
        )

    # -- keys ------------------------------------------------------------------------------------

    def test_missing_key_is_refused(self, caller: Caller) -> None:
        refused = caller.send(None)
        assert code_of(refused) == (400, "idempotency.key_required")
        assert refused.json()["requestId"] == refused.header("x-request-id")
        assert (caller.runs, caller.counts()) == (0, (0, 0, 0))

    @pytest.mark.parametrize(
        "keys",
        [
            [""],
            [" "],
            ['""'],
            ["k" * 129],
            ["key 1"],
            ["k\xe4se"],
            ['"key-1'],
            ['"key-1";A=1'],
            ["key-1", "key-2"],
            ["key-1", ""],
        ],
        ids=range(10),
    )
    def test_malformed_or_ambiguous_key_is_refused(self, caller: Caller, keys: list[str]) -> None:
        assert code_of(caller.send(keys)) == (400, "idempotency.key_invalid")
        assert (caller.runs, caller.counts()) == (0, (0, 0, 0))

    def test_key_with_a_control_character_is_refused(self, caller: Caller) -> None:
        assert caller.send("key\x01").status == 400, "by the server, or by the guard"
        assert (caller.runs, caller.counts()) == (0, (0, 0, 0))

    def test_quoted_or_repeated_key_is_the_same_key(self, caller: Caller) -> None:
        assert caller.send("key-1").status == 201
        for keys in (['"key-1"'], ["key-1", "key-1"], ["key-1", '"key-1"'], [" key-1\t"]):
            assert caller.send(keys).is_replay
        assert caller.send('"key-1";a=1').is_replay
        assert caller.send("k" * 128).status == 201
        assert caller.runs == 2

    def test_uuid4_key_must_be_in_canonical_form(self, new_caller: NewCaller) -> None:
        caller = new_caller(Policy(key_format=KeyFormat.UUID4))
        malformed = (_UUID4.upper(), _UUID4.replace("-", ""), "key-1", f"{{{_UUID4}}}")
        for key in (*malformed, "a8098c1a-f86e-11da-bd1a-00112444be1e"):
            assert code_of(caller.send(key)) == (400, "idempotency.key_invalid")
        assert (caller.send(_UUID4).status, caller.runs) == (201, 1)

    def test_without_a_required_key_every_request_runs_and_is_audited(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller(Policy(key_required=False))
        assert [caller.send(None).status for _ in range(2)] == [201, 201]
        assert caller.counts() == (2, 0, 2)
        assert (caller.send(None, do="raise").status, caller.send(None, do="404").status) == (
            500,
            404,
        )
        assert caller.counts() == (2, 0, 2)
        for key in ("", " ", ["one", "two"]):
            assert code_of(caller.send(key)) == (400, "idempotency.key_invalid")
        assert caller.send().status == 201
        assert caller.send().is_replay

    def test_own_key_header_is_read_in_place_of_the_standard_one(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller(Policy(key_header="X-Shop-Key"))
        missing = caller.send("key-1")
        assert code_of(missing) == (400, "idempotency.key_required")
        assert "(header X-Shop-Key)" in missing.json()["detail"]
        assert caller.send(None, headers={"X-Shop-Key": "mine"}).status == 201
        assert caller.send(None, headers={"X-Shop-Key": '"mine"'}).is_replay
        assert caller.records()[0]["idempotency_key"] == "mine"
        refused = caller.send(None, headers={"X-Shop-Key": "mine, other"})
        assert code_of(refused) == (400, "idempotency.key_invalid")

    def test_key_may_be_a_field_of_the_body(self, new_caller: NewCaller) -> None:
        caller = new_caller(_KEY_IN_BODY)
        body = {"day": "2026-03-01", "idempotencyKey": _UUID4}
        first = caller.send(None, body=body)
        again = caller.send(_UUID4, body=dict(reversed(body.items())))
        assert (first.status, again.body, again.is_replay) == (201, first.body, True)
        two_keys = caller.send(_UUID4.replace("a10", "a11"), body=body)
        assert code_of(two_keys) == (400, "IDEMPOTENCY_KEY_INVALID")
        conflict = caller.send(None, body={**body, "day": "2026-03-02"})
        assert code_of(conflict) == (409, "IDEMPOTENCY_CONFLICT")

    def test_malformed_key_in_the_body_is_refused(self, new_caller: NewCaller) -> None:
        caller = new_caller(_KEY_IN_BODY)
        for content, code in MALFORMED_KEYS_IN_BODIES:
            assert code_of(caller.send(_UUID4, content=content)) == (400, code), content[:40]
        assert caller.runs == 0

    # -- at the same time ------------------------------------------------------------------------

    def test_duplicates_wait_for_the_first_request_and_replay_it(self, caller: Caller) -> None:
        first = caller.begin()
        duplicates = [caller.soon() for _ in range(5)]
        sleep(0.05)
        assert not any(one.done() for one in duplicates)
        caller.visits.gate.set()
        response = first.result()
        for duplicate in duplicates:
            assert (duplicate.result().body, duplicate.result().is_replay) == (response.body, True)
        assert (caller.runs, caller.counts()) == (1, (1, 1, 1))

    def test_duplicate_with_another_payload_is_a_mismatch_when_the_first_is_done(
        self, caller: Caller
    ) -> None:
        first = caller.begin()
        other = caller.soon(body={"item": "hat"})
        sleep(0.05)
        caller.visits.gate.set()
        assert first.result().status == 201
        assert code_of(other.result()) == (409, "idempotency.payload_mismatch")

    @pytest.mark.parametrize(
        ("error_format", "code"),
        [
            (ErrorFormat.PROBLEM, "idempotency.in_progress"),
            (ErrorFormat.ENVELOPE, "IDEMPOTENCY_IN_PROGRESS"),
        ],
    )
    def test_duplicate_past_its_wait_gets_in_progress_and_retry_after(
        self, new_caller: NewCaller, error_format: ErrorFormat, code: str
    ) -> None:
        caller = new_caller(Policy(wait=_BRIEF, error_format=error_format))
        first = caller.begin()
        refused = caller.send()
        assert code_of(refused) == (409, code)
        assert int(refused.header("retry-after") or 0) >= 1
        assert not first.done()
        caller.visits.gate.set()
        assert first.result().status == 201
        assert (caller.send().is_replay, caller.runs) == (True, 1)

    @pytest.mark.parametrize("failure", ["500", "raise"])
    def test_one_waiting_duplicate_of_a_failed_request_runs_the_handler(
        self, caller: Caller, failure: str
    ) -> None:
        first = caller.begin(do=f"wait {failure}")
        waiting = [caller.soon() for _ in range(4)]
        sleep(0.05)
        caller.visits.gate.set()
        assert first.result().status == 500
        responses = [one.result() for one in waiting]
        assert {one.status for one in responses} == {201}
        assert len({one.body for one in responses}) == 1
        assert sum(not one.is_replay for one in responses) == 1
        assert (caller.runs, caller.counts()) == (2, (1, 1, 1))

    def test_waiting_duplicate_of_a_request_that_streams_gets_it_or_runs(
        self, caller: Caller
    ) -> None:
        first = caller.begin(do="wait stream")
        waiting = caller.soon()
        sleep(0.05)
        caller.visits.gate.set()
        assert first.result().status == (201 if self.collects_streams else 500)
        assert (waiting.result().status, waiting.result().is_replay) == (201, self.collects_streams)
        assert (caller.runs, caller.counts()) == (2 - self.collects_streams, (1, 1, 1))

    def test_waiting_duplicate_replays_a_stored_error(self, caller: Caller) -> None:
        first = caller.begin(do="wait 404")
        waiting = caller.soon()
        sleep(0.05)
        caller.visits.gate.set()
        assert first.result().status == waiting.result().status == 404
        assert (waiting.result().body, caller.runs) == (first.result().body, 1)

    def test_waiting_duplicate_of_an_error_that_is_not_stored_runs_the_handler(
        self, caller: Caller
    ) -> None:
        first = caller.begin(do="wait 403")
        waiting = caller.soon()
        sleep(0.05)
        caller.visits.gate.set()
        assert (first.result().status, waiting.result().status) == (403, 201)

    def test_twelve_simultaneous_duplicates_have_one_effect(self, caller: Caller) -> None:
        for number in range(3):
            sending = [caller.soon(f"key-{number}") for _ in range(12)]
            responses = [one.result() for one in sending]
            assert {one.status for one in responses} == {201}
            assert len({one.body for one in responses}) == 1
            assert sum(not one.is_replay for one in responses) == 1
        assert (caller.runs, caller.counts()) == (3, (3, 3, 3))

    def test_simultaneous_requests_with_different_keys_all_run(self, caller: Caller) -> None:
        sending = [caller.soon(f"key-{number}") for number in range(30)]
        assert {one.result().status for one in sending} == {201}
        assert caller.counts() == (30, 30, 30)

    # -- errors of the handler -------------------------------------------------------------------

    @pytest.mark.parametrize("do", ["raise", "500", "503", "599", "enqueue 500"])
    def test_failed_handler_leaves_nothing_and_its_key_is_free(
        self, caller: Caller, do: str
    ) -> None:
        failed = caller.send(do=do)
        assert (failed.status >= 500, failed.is_replay) == (True, False)
        assert (caller.counts(), caller.jobs()) == ((0, 0, 0), 0)
        assert caller.visits.committed == []
        again = caller.send()
        assert (again.status, again.is_replay) == (201, False)
        assert (caller.runs, caller.counts()) == (2, (1, 1, 1))

    def test_unhandled_error_is_logged_and_responded_with_its_request(
        self, caller: Caller, caplog: pytest.LogCaptureFixture
    ) -> None:
        failed = caller.send(do="raise", headers={"X-Request-ID": "r-1"})
        if failed.headers:  # else the server responds, which knows no ids
            assert (failed.status, failed.header("x-request-id")) == (500, "r-1")
        [line] = [r for r in caplog.records if r.name == "onceward.request" and r.exc_info]
        facts = line.__dict__
        assert (facts["request_id"], facts["tenant"]) == ("r-1", caller.tenant)
        assert facts["endpoint"] == "orders.create"
        for text in ("r-1", caller.tenant, "orders.create"):
            assert text in line.getMessage()

    def test_streamed_response_is_refused_or_stored_as_a_whole(self, caller: Caller) -> None:
        first, again = caller.send(do="stream size=2000"), caller.send()
        if self.collects_streams:
            assert (first.status, again.body, again.is_replay) == (201, first.body, True)
        else:
            assert (first.status, b"xxx" in first.body) == (500, False)
            assert (again.status, again.is_replay) == (201, False)
        assert caller.counts() == (1, 1, 1)

    def test_response_over_the_limit_is_refused(self, new_caller: NewCaller) -> None:
        caller = new_caller(Policy(max_response_bytes=1000))
        assert caller.send("small", do="size=700").status == 201
        refused = caller.send(do="size=1000")
        assert (refused.status, len(refused.body) < 1000) == (500, True)
        assert (caller.counts(), len(caller.visits.committed)) == ((1, 1, 1), 1)
        assert caller.send().status == 201

    @pytest.mark.parametrize("status", [400, 404, 409, 410, 418, 422, 499])
    def test_4xx_of_the_handler_is_stored_without_its_writes(
        self, caller: Caller, status: int
    ) -> None:
        refused, again = caller.send(do=f"{status} enqueue"), caller.send()
        assert (refused.status, refused.is_replay) == (status, False)
        assert (again.status, again.body, again.is_replay) == (status, refused.body, True)
        assert (caller.runs, caller.counts(), caller.jobs()) == (1, (0, 1, 0), 0)
        assert caller.records()[0]["response_status"] == status

    @pytest.mark.parametrize("status", [401, 403, 408, 424, 425, 428, 429])
    @pytest.mark.parametrize("keep", ["", "keep"])
    def test_statuses_about_the_caller_or_the_time_are_never_stored(
        self, caller: Caller, status: int, keep: str
    ) -> None:
        assert caller.send(do=f"{status} {keep}").status == status
        assert caller.records() == []
        again = caller.send()
        assert (again.status, caller.runs) == (201, 2)

    @pytest.mark.parametrize("stored", [ErrorsStored.NONE, ErrorsStored.STALE_ONLY])
    def test_policy_that_stores_no_errors_frees_the_key(
        self, new_caller: NewCaller, stored: ErrorsStored
    ) -> None:
        caller = new_caller(Policy(errors_stored=stored))
        assert (caller.send(do="409").status, caller.records()) == (409, [])
        again = caller.send()
        assert (again.status, again.is_replay, caller.runs) == (201, False, 2)

    @pytest.mark.parametrize("status", [404, 500])
    def test_keep_writes_on_error_commits_a_4xx_but_never_a_5xx(
        self, caller: Caller, status: int
    ) -> None:
        assert caller.send(do=f"keep {status}").status == status
        kept = 1 if status < 500 else 0
        assert caller.counts() == (kept, kept, 0)
        assert caller.send().status == (404 if kept else 201)
        assert caller.counts().orders == 1

    def test_service_error_of_the_handler_is_rendered_stored_and_rolled_back(
        self, caller: Caller
    ) -> None:
        refused, again = caller.send(do="refuse"), caller.send(do="refuse")
        assert code_of(refused) == (422, "order.refused")
        assert refused.json()["details"] == {"item": 5}
        assert refused.header("content-type") == "application/problem+json"
        assert refused.json()["requestId"] == refused.header("x-request-id")
        assert (again.status, again.body, again.is_replay) == (422, refused.body, True)
        assert (caller.runs, caller.counts()) == (1, (0, 1, 0))

    def test_redirect_is_not_stored_and_is_an_error_after_a_write(self, caller: Caller) -> None:
        signed_out = caller.send(do="quiet 302 to=/login")
        assert (signed_out.status, signed_out.header("location")) == (302, "/login")
        undone = caller.send(do="303 to=/orders/a")
        assert code_of(undone) == (500, "server.internal")
        assert caller.counts() == (0, 0, 0)
        done = caller.send()
        assert (done.status, done.is_replay, caller.counts()) == (201, False, (1, 1, 1))

    def test_redirect_that_the_policy_stores_is_replayed_unless_it_leads_to_sign_in(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller(Policy(redirects_stored={302, 303}), memory_bytes=0)
        for _ in range(2):
            asked = caller.send(do="quiet 302 to=/login")
            assert (asked.header("location"), asked.is_replay) == ("/login", False)
        first, again = caller.send(do="303 to=/done"), caller.send(do="303 to=/done")
        assert (first.status, first.header("location"), first.is_replay) == (303, "/done", False)
        assert (again.status, again.header("location"), again.is_replay) == (303, "/done", True)
        login = [caller.send("key-2", do="302 to=/login") for _ in range(2)]
        assert [one.is_replay for one in login] == [False, True], "it has written"
        assert (caller.runs, caller.counts()) == (4, (2, 2, 2))

    def test_no_store_frees_the_key(self, caller: Caller) -> None:
        for _ in range(2):
            response = caller.send(do="quiet no-store 200")
            assert (response.status, response.is_replay) == (200, False)
        assert caller.send(do="no-store 200").status == 500, "a retry would write again"
        assert caller.counts() == (0, 0, 0)
        assert caller.send(do="no-store keep 200").status == 200
        assert (caller.runs, caller.counts()) == (4, (1, 0, 1))

    # -- what is known of the key ----------------------------------------------------------------

    @pytest.mark.parametrize(
        ("do", "effect"),
        [
            ("201", "stored"),
            ("404", "stored"),
            ("403", "none"),
            ("429", "none"),
            ("500", "none"),
            ("keep 404", "stored"),
            ("keep 403", None),
            ("quiet 302 to=/login", "none"),
            ("quiet no-store 200", "none"),
            ("no-store keep 200", None),
        ],
    )
    def test_response_says_whether_anything_has_happened(
        self, caller: Caller, do: str, effect: str | None
    ) -> None:
        response = caller.send(do=do)
        assert response.header("onceward-effect") == effect
        if effect == "none":
            assert (caller.counts(), caller.records()) == ((0, 0, 0), [])
        if effect == "stored":
            again = caller.send(do=do)
            assert (again.is_replay, again.header("onceward-effect")) == (True, "stored")

    def test_refusal_before_the_key_is_looked_up_says_nothing_of_it(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller(Policy(wait=_BRIEF))
        assert caller.send(None).header("onceward-effect") is None
        first = caller.begin()
        assert caller.send().header("onceward-effect") is None, "it may still happen"
        caller.visits.gate.set()
        assert first.result().header("onceward-effect") == "stored"
        assert caller.send(body={"item": "hat"}).header("onceward-effect") is None

    def test_disabled_endpoint_says_that_nothing_has_happened(self, new_caller: NewCaller) -> None:
        caller = new_caller(disabled={"orders.create"}.__contains__)
        assert caller.send().header("onceward-effect") == "none"

    def test_without_a_key_nothing_is_known(self, new_caller: NewCaller) -> None:
        caller = new_caller(Policy(key_required=False))
        for do in ("201", "403", "500"):
            assert caller.send(None, do=do).header("onceward-effect") is None

    # -- bodies ----------------------------------------------------------------------------------

    def test_body_over_the_limit_is_refused_by_its_declared_length(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller(Policy(max_body_bytes=10))
        text: dict[str, Any] = {"content_type": "text/plain"}
        assert code_of(caller.send(content=b"x" * 11, **text)) == (413, "request.too_large")
        assert (caller.runs, caller.counts()) == (0, (0, 0, 0))
        fits = caller.send(content=b"x" * 10, **text)
        assert (fits.status, fits.json()["bytes"]) == (201, 10)

    def test_body_that_breaks_off_runs_nothing_and_leaves_the_key_free(
        self, caller: Caller
    ) -> None:
        for content_type in ("application/json", "text/plain"):
            cut = caller.send(
                content=b'{"item"', content_type=content_type, declared=100, breaks_off=True
            )
            assert cut.status in (0, 400)
        assert (caller.runs, caller.counts()) == (0, (0, 0, 0))
        assert caller.send().status == 201

    def test_malformed_json_is_refused_and_runs_nothing(self, new_caller: NewCaller) -> None:
        caller = new_caller()
        faults = FaultyStore(caller.app.onceward.store)
        for content in MALFORMED_JSON:
            assert code_of(caller.send(content=content)) == (400, "request.invalid"), content[:30]
        assert (caller.runs, faults.calls) == (0, 0)
        assert caller.send().status == 201

    def test_json_at_the_limits_is_accepted(self, caller: Caller) -> None:
        for number, content in enumerate(JSON_AT_THE_LIMITS):
            assert caller.send(f"key-{number}", content=content).status == 201

    def test_bodies_of_any_kind_are_guarded(self, caller: Caller) -> None:
        for number, (content, content_type) in enumerate(OTHER_BODIES):
            key = f"key-{number}"
            kind: dict[str, Any] = {"content_type": content_type}
            first, again = (caller.send(key, content=content, **kind) for _ in range(2))
            assert (first.status, first.json()["bytes"]) == (201, len(content)), content_type
            assert (again.body, again.is_replay) == (first.body, True)
            assert caller.send(key, content=content + b" !", **kind).status in (400, 409)
        assert caller.runs == len(OTHER_BODIES)

    # -- staleness -------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("age", "status"),
        [
            (timedelta(0), 201),
            (_MOST, 201),
            (_MOST + _TICK, 422),
            (timedelta(days=400), 422),
            (-timedelta(hours=6), 201),
            (-timedelta(hours=6) - _TICK, 422),
        ],
        ids=range(6),
    )
    def test_action_older_than_the_cap_is_refused_stored_and_replayed(
        self, new_caller: NewCaller, age: timedelta, status: int
    ) -> None:
        clock = SettableClock()
        caller = new_caller(_STALE, clock=clock)
        made_at = clock.now() - age
        body = {"clientGeneratedAt": _iso(made_at)}
        first = caller.send(body=body, headers={"X-Request-ID": "r-1"})
        assert first.status == status
        ran = 1 if status == 201 else 0
        assert (caller.runs, caller.counts()) == (ran, (ran, 1, ran))
        if status == 422:
            assert (first.json()["error"], first.json()["requestId"]) == ("STALE_ACTION", "r-1")
            details = first.json()["details"]
            assert datetime.fromisoformat(details["clientGeneratedAt"]) == made_at
            assert datetime.fromisoformat(details["serverNow"]) == clock.now()
            assert (details["capDays"], details["graceHours"]) == (7, 6)
            assert details["ageDays"] == age // timedelta(days=1)
        clock.move(timedelta(hours=1))
        again = caller.send(body={**body, "clientSubmittedAt": _iso(clock.now())})
        assert (again.status, again.body, again.is_replay) == (status, first.body, True)
        assert again.header("content-type") == first.header("content-type")
        assert again.header("x-original-request-id") == "r-1"
        conflict = caller.send(body={"clientGeneratedAt": _iso(clock.now())})
        assert code_of(conflict) == (409, "IDEMPOTENCY_CONFLICT")
        assert caller.runs == ran

    def test_replay_is_never_stale(self, new_caller: NewCaller) -> None:
        clock = SettableClock()
        caller = new_caller(_STALE, clock=clock, memory_bytes=0)
        body = {"clientGeneratedAt": _iso(clock.now())}
        first = caller.send(body=body)
        clock.move(timedelta(days=8))
        again = caller.send(body=body)
        assert (again.status, again.body, again.is_replay) == (201, first.body, True)
        assert caller.send("key-2", body=body).status == 422

    def test_missing_or_malformed_time_is_refused_and_leaves_the_key_free(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller(_STALE, clock=SettableClock())
        for body in MALFORMED_TIMES:
            assert code_of(caller.send(body=body)) == (400, "BAD_REQUEST"), body
        for content_type in ("application/json", "text/plain"):
            deep = caller.send(content=_DEEP_TIME, content_type=content_type)
            assert code_of(deep) == (400, "BAD_REQUEST")
        assert (caller.runs, caller.records()) == (0, [])
        assert caller.send(body={"clientGeneratedAt": "2026-03-01T12:00:00Z"}).status == 201

    def test_action_cannot_be_sent_before_it_was_made(self, new_caller: NewCaller) -> None:
        clock, grace = SettableClock(), timedelta(hours=6)
        caller = new_caller(_STALE, clock=clock)
        made_at = _iso(clock.now())
        for number, early in enumerate((grace, timedelta(days=-3), grace + _TICK)):
            body = {"clientGeneratedAt": made_at, "clientSubmittedAt": _iso(clock.now() - early)}
            response = caller.send(f"key-{number}", body=body)
            assert response.status == (201 if early <= grace else 400)
        assert response.json()["error"] == "BAD_REQUEST"
        assert response.json()["details"] == {"field": "clientSubmittedAt"}
        assert (caller.runs, len(caller.records())) == (2, 2)
        assert caller.send("key-2", body={"clientGeneratedAt": made_at}).status == 201

    def test_action_without_a_key_may_be_stale_too(self, new_caller: NewCaller) -> None:
        clock = SettableClock()
        caller = new_caller(Policy(key_required=False, staleness=Staleness()), clock=clock)
        old = {"clientGeneratedAt": _iso(clock.now() - timedelta(days=8))}
        assert code_of(caller.send(None, body=old)) == (422, "action.stale")
        assert caller.send(None, body={}).status == 400
        assert caller.runs == 0
        assert caller.send(None, body={"clientGeneratedAt": _iso(clock.now())}).status == 201

    # -- what is not guarded ---------------------------------------------------------------------

    def test_routes_without_a_guard_are_unchanged_and_never_touch_records(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller()
        faults = FaultyStore(caller.app.onceward.store)
        for method, path, status in [
            ("GET", "/open", 200),
            ("POST", "/open", 200),
            ("POST", "/nowhere", 404),
        ]:
            for _ in range(2):
                response = caller.send(method=method, path=path)
                assert (response.status, response.is_replay) == (status, False)
        assert caller.send(None, path="/open").status == 200
        for method in ("GET", "HEAD", "OPTIONS"):
            assert caller.send(method=method).status in (200, 404, 405)
        assert (faults.calls, caller.runs, caller.counts()) == (0, 0, (0, 0, 0))

    # -- commit ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("do", ["201", "404"])
    def test_nothing_is_sent_before_the_commit(self, new_caller: NewCaller, do: str) -> None:
        caller = new_caller()
        faults = FaultyStore(caller.app.onceward.store)
        seen: list[str] = []

        async def commit(unit: Any, record: Any, audit: Any) -> None:
            seen.extend(["committing", *caller.visits.committed, *caller.visits.background])
            await unit.commit(record, audit)
            seen.append("committed")

        faults.commits.append(commit)
        assert caller.send(do=do, on_response=lambda: seen.append("sent")).status == int(do)
        assert seen == ["committing", "committed", "sent"]
        assert len(caller.visits.committed) == (1 if do == "201" else 0)

    def test_failed_commit_discards_the_response_and_frees_the_key(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller(Policy(key_required=False))
        faults = FaultyStore(caller.app.onceward.store)
        for key in ("key-1", None):
            for failure, status in (
                (StoreUnavailableError("the disk is full"), 503),
                (RuntimeError("a defect of the store"), 500),
            ):
                faults.commits.append(_rolled_back(failure))
                refused = caller.send(key)
                assert refused.status == status
                assert caller.counts() == (0, 0, 0)
        assert caller.visits.committed == caller.visits.background == []
        assert (caller.send().status, caller.counts()) == (201, (1, 1, 1))

    @pytest.mark.parametrize("point", ["after_claim", "after_business_write", "before_commit"])
    def test_failure_at_any_point_before_the_commit_frees_the_key(
        self, new_caller: NewCaller, point: str
    ) -> None:
        faults = RaiseAt(point)
        caller = new_caller(Policy(wait=timedelta(seconds=1)), faults=faults)
        for do in ("201", "404"):
            faults.point = point
            assert caller.send(do=do).status == 500
            assert caller.counts() == (0, 0, 0)
        assert caller.visits.committed == []
        assert (caller.send().status, caller.counts()) == (201, (1, 1, 1))

    def test_waiting_duplicate_runs_the_handler_when_the_commit_fails(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller()
        faults = FaultyStore(caller.app.onceward.store)
        faults.commits.append(_rolled_back(StoreUnavailableError("the disk is full")))
        first = caller.begin()
        waiting = caller.soon()
        sleep(0.05)
        caller.visits.gate.set()
        assert (first.result().status, waiting.result().status) == (503, 201)
        assert caller.counts() == (1, 1, 1)

    @pytest.mark.parametrize("do", ["201", "404", "keep 404"])
    def test_commit_whose_confirmation_was_lost_is_found(
        self, new_caller: NewCaller, do: str
    ) -> None:
        caller = new_caller()
        FaultyStore(caller.app.onceward.store).commits.append(_lost_after_commit)
        response, again = caller.send(do=do), caller.send(do=do)
        assert (response.status, response.is_replay) == (int(do[-3:]), False)
        assert (again.body, again.is_replay) == (response.body, True)
        written = 0 if do == "404" else 1
        assert caller.counts() == (written, 1, 1 if do == "201" else 0)
        assert len(caller.visits.committed) == (1 if do == "201" else caller.counts().orders)

    @pytest.mark.parametrize("do", ["201", "404", "keep 404"])
    def test_lost_commit_is_503_and_the_retry_has_the_one_effect(
        self, new_caller: NewCaller, do: str
    ) -> None:
        caller = new_caller()
        faults = FaultyStore(caller.app.onceward.store)
        faults.commits.append(_rolled_back(CommitUnknownError("the connection is gone")))
        lost = caller.send(do=do)
        assert (lost.status, lost.header("retry-after") is not None) == (503, True)
        assert lost.header("onceward-effect") is None
        assert (caller.counts(), caller.visits.committed) == ((0, 0, 0), [])
        again = caller.send(do=do)
        assert (again.status, again.is_replay) == (int(do[-3:]), False)
        written = 0 if do == "404" else 1
        assert caller.counts() == (written, 1, 1 if do == "201" else 0)

    def test_lost_commit_without_a_key_is_503(self, new_caller: NewCaller) -> None:
        caller = new_caller(Policy(key_required=False))
        FaultyStore(caller.app.onceward.store).commits.append(_lost_after_commit)
        lost = caller.send(None)
        assert code_of(lost) == (503, "idempotency.store_unavailable")
        assert lost.header("content-type") == "application/problem+json"
        assert caller.visits.committed == caller.visits.background == []

    def test_outcome_that_cannot_be_looked_up_is_503_and_the_retry_gets_it(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller()
        faults = FaultyStore(caller.app.onceward.store)

        async def lose(unit: Any, record: Any, audit: Any) -> None:
            await unit.commit(record, audit)
            faults.down = _AWAY
            raise CommitUnknownError("the server is gone")

        faults.commits.append(lose)
        unknown = caller.send()
        assert (unknown.status, caller.visits.committed) == (503, [])
        assert unknown.header("onceward-effect") is None
        faults.down = None
        again = caller.send()
        assert (again.status, again.is_replay, caller.counts()) == (201, True, (1, 1, 1))

    def test_response_to_a_client_that_has_gone_away_is_stored(self, caller: Caller) -> None:
        gone = caller.begin(goes_away=True)
        caller.visits.gate.set()
        assert gone.result().status == 0
        again = caller.send()
        assert (again.status, again.is_replay) == (201, True)
        assert (caller.runs, caller.counts()) == (1, (1, 1, 1))

    # -- store down ------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("error_format", "code"),
        [
            (ErrorFormat.PROBLEM, "idempotency.store_unavailable"),
            (ErrorFormat.ENVELOPE, "STORE_UNAVAILABLE"),
        ],
    )
    @pytest.mark.parametrize("key", ["key-1", None])
    def test_store_that_is_down_is_503_and_the_handler_does_not_run(
        self, new_caller: NewCaller, error_format: ErrorFormat, code: str, key: str | None
    ) -> None:
        caller = new_caller(Policy(error_format=error_format, key_required=False), memory_bytes=0)
        faults = FaultyStore(caller.app.onceward.store)
        faults.down = _AWAY
        refused = caller.send(key)
        assert code_of(refused) == (503, code)
        assert refused.header("retry-after") == "3", "rounded up: an early retry would be refused"
        assert refused.json()["details"] == {"reason": "unreachable"}
        assert caller.runs == 0
        faults.down = None
        assert (caller.send(key).status, caller.counts().orders) == (201, 1)

    # -- limits and switches ---------------------------------------------------------------------

    def test_rate_limit_counts_replays_and_says_what_is_left(self, new_caller: NewCaller) -> None:
        limiter = LimiterOf(2)
        caller = new_caller(Policy(rate_limit="2/minute"), limiter=limiter)
        responses = [caller.send() for _ in range(3)]
        assert [one.status for one in responses] == [201, 201, 429]
        assert code_of(responses[2]) == (429, "rate.limited")
        assert responses[2].header("retry-after") == "8"
        assert [one.header("ratelimit") for one in responses] == [
            '"x";r=1',
            '"x";r=0',
            '"x";r=-1',
        ]
        assert {one.header("ratelimit-policy") for one in responses} == {'"x";q=2'}
        assert limiter.calls == [("2/minute", caller.tenant, "orders.create")] * 3
        limiter.left = 1
        assert (caller.send().is_replay, caller.runs) == (True, 1)

    def test_limiter_of_the_library_limits_and_says_what_is_left(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller(Policy(rate_limit="2/hour"), limiter=LimitsRateLimiter())
        responses = [caller.send() for _ in range(3)]
        assert [one.status for one in responses] == [201, 201, 429]
        left = [(one.header("ratelimit") or "").split(";")[1] for one in responses]
        assert left == ["r=1", "r=0", "r=0"]
        assert {one.header("ratelimit-policy") for one in responses} == {'"2-per-hour";q=2;w=3600'}
        assert 0 < int(responses[2].header("retry-after") or "") <= 3600
        assert caller.runs == 1

    def test_checks_after_the_sign_in_run_in_the_documented_order(
        self, new_caller: NewCaller
    ) -> None:
        clock, limiter = SettableClock(), LimiterOf(1)
        policy = _STALE.replace(rate_limit="5/minute", key_format=KeyFormat.UUID4)
        caller = new_caller(policy, clock=clock, limiter=limiter, memory_bytes=0)
        faults = FaultyStore(caller.app.onceward.store)
        stored = caller.send(_UUID4, body={"clientGeneratedAt": _iso(clock.now())})
        assert stored.status == 201
        calls = faults.calls
        assert caller.send("no key", tenant=NOT_SIGNED_IN).status == 401
        assert len(limiter.calls) == 1, "unauthenticated requests are not counted"
        old = {"clientGeneratedAt": _iso(clock.now() - timedelta(days=30))}
        assert code_of(caller.send("no key", body=old)) == (429, "RATE_LIMITED")
        limiter.left = 99
        assert code_of(caller.send("no key", body=old)) == (400, "IDEMPOTENCY_KEY_INVALID")
        assert code_of(caller.send(_UUID4, content=b'{"a":1,"a":2}')) == (400, "BAD_REQUEST")
        assert faults.calls == calls, "none of these may reach the store"
        assert code_of(caller.send(_UUID4, body=old)) == (409, "IDEMPOTENCY_CONFLICT")
        other = _UUID4.replace("a10", "a11")
        assert code_of(caller.send(other, body=old)) == (422, "STALE_ACTION")
        assert caller.runs == 1

    def test_disabled_endpoint_is_403_but_stored_responses_are_replayed(
        self, new_caller: NewCaller
    ) -> None:
        disabled: set[str] = set()
        caller = new_caller(disabled=disabled.__contains__, memory_bytes=0)
        caller.send("before")
        disabled.add("orders.create")
        for _ in range(2):
            assert code_of(caller.send()) == (403, "feature.disabled")
        assert caller.send("before").is_replay
        assert caller.send(path="/shelves/a").status == 201
        disabled.clear()
        assert caller.send().status == 201

    # -- error formats ---------------------------------------------------------------------------

    def test_errors_have_the_format_of_the_policy(self, new_caller: NewCaller) -> None:
        problem = new_caller().send(None)
        assert (problem.status, problem.header("content-type")) == (400, "application/problem+json")
        assert set(problem.json()) >= {"type", "title", "status", "detail", "code", "requestId"}
        caller = new_caller(Policy(error_format=ErrorFormat.ENVELOPE))
        for envelope, code in (
            (caller.send(None), "IDEMPOTENCY_KEY_REQUIRED"),
            (caller.send(do="refuse"), "order.refused"),
        ):
            assert (envelope.json()["error"], envelope.header("content-type")) == (
                code,
                "application/json",
            )
            assert {"error", "message", "requestId"} <= set(envelope.json())
            assert envelope.json()["requestId"] == envelope.header("x-request-id")

    def test_error_format_of_the_app_is_used_for_all_errors(self, new_caller: NewCaller) -> None:
        caller = new_caller(error_format=lambda error: {"fault": error.code})
        refused = caller.send(None)
        assert refused.json() == {"fault": "idempotency.key_required"}
        assert refused.header("onceward-error") == "idempotency.key_required"
        assert caller.send(do="refuse").json() == {"fault": "order.refused"}
        assert caller.send(do="refuse").is_replay

    # -- jobs and sequences ----------------------------------------------------------------------

    def test_job_is_enqueued_once_with_the_write(self, caller: Caller) -> None:
        assert [caller.send(do="enqueue").status for _ in range(2)] == [201, 201]
        assert (caller.jobs(), caller.counts()[:2]) == (1, (1, 1))

    def test_strict_sequences_run_in_order(self, caller: Caller) -> None:
        def send(number: int, name: str = "", do: str = "") -> Response:
            headers = {"X-Client-ID": "phone", "X-Sequence": str(number)}
            return caller.send(name or f"key-{number}", path="/numbered", headers=headers, do=do)

        assert caller.send(path="/numbered").status == 400
        assert send(1).status == 201
        gap, other = send(3), send(1, "other")
        assert code_of(gap) == code_of(other) == (422, "sequence.violation")
        assert gap.json()["details"] == {"expected": 2}
        assert other.json()["details"] == {"expected": 2, "used_by": "other_key"}
        assert send(1).is_replay
        # Different keys with one number at the same time: one of them runs, the others wait.
        raced = [caller.pool.submit(send, 2, name) for name in "abcd"]
        assert sorted(one.result().status for one in raced) == [201, 422, 422, 422]
        assert (send(3).status, caller.counts().orders) == (201, 3)


class RaiseAt:
    """A fault point that raises once."""

    def __init__(self, point: str) -> None:
        self.point: str | None = point

    async def reach(self, point: str) -> None:
        """Raise if this is the point."""
        if point == self.point:
            self.point = None
            raise RuntimeError(f"fault at {point}")


def _rolled_back(failure: Exception) -> Callable[[Any, Any, Any], Any]:
    """Return a commit that rolls back and raises."""

    async def commit(unit: Any, _record: Any, _audit: Any) -> None:
        await unit.rollback()
        raise failure

    return commit


async def _lost_after_commit(unit: Any, record: Any, audit: Any) -> None:
    await unit.commit(record, audit)
    raise CommitUnknownError("the connection is gone")


class ChunkedBodyContract(GuardHarness):
    """Tests of bodies that arrive in pieces and without their length."""

    def test_chunked_body_is_one_body(self, caller: Caller) -> None:
        chunked = caller.send(chunks=[b'{"i', b"", b'tem":', b'"boots"}'])
        assert (chunked.status, chunked.json()["bytes"]) == (201, len(b'{"item":"boots"}'))
        assert caller.send().body == chunked.body

    def test_chunked_body_over_the_limit_is_refused(self, new_caller: NewCaller) -> None:
        caller = new_caller(Policy(max_body_bytes=10))
        refused = caller.send(chunks=[b"123456", b"78901"], content_type="text/plain")
        assert code_of(refused) == (413, "request.too_large")
        assert (caller.runs, caller.counts()) == (0, (0, 0, 0))
        assert caller.send(chunks=[b"12345", b"67890"], content_type="text/plain").status == 201


class AsgiContract(ChunkedBodyContract):
    """Tests of what only ASGI has: background tasks, and bodies that are awaited."""

    def test_background_task_runs_after_the_commit_and_not_for_a_replay(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller()
        faults = FaultyStore(caller.app.onceward.store)
        before: list[str] = []

        async def commit(unit: Any, record: Any, audit: Any) -> None:
            await unit.commit(record, audit)
            before.extend(caller.visits.background)

        faults.commits.append(commit)
        first = caller.send()
        assert caller.send().is_replay
        assert (before, caller.visits.background) == ([], [first.json()["id"]])

    def test_background_task_of_a_discarded_response_does_not_run(
        self, new_caller: NewCaller
    ) -> None:
        caller = new_caller()
        faults = FaultyStore(caller.app.onceward.store)
        for failure in (StoreUnavailableError("down"), CommitUnknownError("gone")):
            faults.commits.append(_rolled_back(failure))
            assert caller.send().status == 503
        caller.send(do="stream")
        assert caller.visits.background == []
        assert (caller.send().status, len(caller.visits.background)) == (201, 1)

    def test_response_of_a_route_without_a_guard_has_a_request_id(self, caller: Caller) -> None:
        for path in ("/open", "/nowhere"):
            response = caller.send(method="GET", path=path, headers={"X-Request-ID": "r-1"})
            assert response.header("x-request-id") == "r-1"

    def test_body_that_stalls_is_408_and_the_connection_is_closed(
        self, new_caller: NewCaller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("onceward.guard.request_body._LINGER_IDLE_SECONDS", 0.02)
        caller = new_caller(Policy(body_deadline=timedelta(seconds=0.05)))
        late = caller.send(content=b'{"item"', declared=100, stalls=True)
        assert code_of(late) == (408, "request.timeout")
        assert late.header("connection") == "close"
        assert (caller.runs, caller.counts()) == (0, (0, 0, 0))
        assert caller.send().status == 201
