"""Unit: key parsing and validation, payload hash canonicalization, optimistic lock evaluator,
replay response builder; and what planning adds to them. No server, no database."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onceward import update_with_version
from onceward.errors import (
    BodyInvalidError,
    KeyInvalidError,
    NotFoundError,
    VersionMismatchError,
    VersionRequiredError,
)
from onceward.guard.request import stored_headers
from onceward.records import Record, RecordId, RequestFingerprint
from onceward_protocol.fingerprint import body_hash
from onceward_protocol.keys import parse_key
from onceward_protocol.versions import check_version, expected_version
from onceward_services.planning.paging import page, read_cursor
from onceward_services.planning.policy import POLICY

JSON = "application/json"


# -- idempotency key parsing and validation -------------------------------------------------------


def test_idempotency_key_parsing_takes_128_visible_characters_bare_or_quoted() -> None:
    for key in ("k", "~" * 128, "!#$%&'()*+,-./:;<=>?@[]^_`{|}~"):
        assert parse_key([key.encode()], POLICY.key_format) == key
    assert parse_key([b'"k"', b"k"], POLICY.key_format) == "k"
    assert parse_key([], POLICY.key_format) is None


@pytest.mark.parametrize("key", ["", " ", "a b", "é", "x" * 129, "a\tb", "\x7f"])
def test_idempotency_key_validation_refuses_the_rest(key: str) -> None:
    with pytest.raises(KeyInvalidError):
        parse_key([key.encode()], POLICY.key_format)


# -- payload hash canonicalization ----------------------------------------------------------------


def test_payload_hash_canonicalization_ignores_order_whitespace_and_escapes() -> None:
    same = {
        b'{"title":"Survey","nested":{"a":1,"b":2}}',
        b' { "nested" : {"b":2.0, "a":1}, "title" : "S\\u0075rvey" } ',
    }
    assert len({body_hash(body, JSON) for body in same}) == 1


def test_payload_hash_canonicalization_includes_nested_fields() -> None:
    bodies = [b'{"a":{"b":1}}', b'{"a":{"b":2}}', b'{"a":{"c":1}}', b'{"a":[1]}', b'{"version":1}']
    assert len({body_hash(body, JSON) for body in bodies}) == len(bodies)


# -- optimistic lock evaluator --------------------------------------------------------------------


def test_optimistic_lock_evaluator_accepts_the_expected_version_and_reports_the_current_one() -> (
    None
):
    check_version(expected_version(if_match=['"3"']), 3)
    check_version(expected_version(in_body=3), 3)
    with pytest.raises(VersionMismatchError) as moved_on:
        check_version(expected_version(in_body=3), 4)
    assert moved_on.value.details == {"currentVersion": 4, "expectedVersion": 3}
    with pytest.raises(VersionRequiredError):
        expected_version(if_match=["*"])


class Row:
    """A row with a version, and what happens to it between two statements."""

    def __init__(self, version: int | None, *meanwhile: int | None) -> None:
        self.version = version
        self.meanwhile = list(meanwhile)
        self.writes = 0

    async def current(self) -> Any:
        if self.meanwhile:
            self.version = self.meanwhile.pop(0)
        return None if self.version is None else {"version": self.version}

    async def write(self, version: int) -> Any:
        self.writes += 1
        if self.version != version:
            return None
        self.version += 1
        return {"version": self.version}

    async def update_with_version(self, *tags: str, in_body: Any = None, **options: Any) -> int:
        row = await update_with_version(
            if_match=tags, in_body=in_body, current=self.current, write=self.write, **options
        )
        return int(row["version"])


async def test_update_of_the_expected_version_is_one_statement() -> None:
    row = Row(4)
    assert await row.update_with_version('"4"') == 5
    assert row.writes == 1


async def test_update_of_an_old_version_conflicts_and_of_nothing_is_not_found() -> None:
    with pytest.raises(VersionMismatchError) as moved_on:
        await Row(5).update_with_version('"4"')
    assert moved_on.value.details["currentVersion"] == 5
    for tags, in_body in (('"4"',), None), ((), 4), ((), None), (("*",), None), (("W/",), None):
        with pytest.raises(NotFoundError):
            await Row(None).update_with_version(*tags, in_body=in_body)
    with pytest.raises(NotFoundError):
        await Row(5, None).update_with_version('"4"')  # deleted between the two statements


async def test_version_reached_between_two_statements_is_updated() -> None:
    row = Row(3, 4)
    assert await row.update_with_version('"4"') == 5
    assert row.writes == 2


async def test_star_matches_any_version_where_allowed() -> None:
    row = Row(7, 8)
    assert await row.update_with_version("*", allow_any=True) == 9
    assert row.writes == 1
    with pytest.raises(NotFoundError):
        await Row(None).update_with_version("*", allow_any=True)
    with pytest.raises(VersionRequiredError):
        await Row(7).update_with_version("*")


async def test_one_current_etag_among_several_is_enough_for_a_write() -> None:
    assert await Row(7).update_with_version('"3", "7"') == 8
    row = Row(7)
    with pytest.raises(VersionMismatchError):
        await row.update_with_version('"3", "4"')
    with pytest.raises(VersionMismatchError):
        await row.update_with_version('"nonsense"')
    assert row.writes == 0


# -- replay response builder ----------------------------------------------------------------------


def test_replay_response_builder_repeats_status_body_and_the_headers_that_belong_to_it() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    record = Record(
        RecordId("acme", "POST /v1/projects", "k"),
        RequestFingerprint("hash", "fingerprint"),
        201,
        {"content-type": JSON, "etag": '"1"', "location": "/v1/projects/p"},
        b'{"id":"p"}',
        at,
        at + timedelta(hours=24),
        "request",
        "correlation",
    )
    reply = record.response()
    assert (reply.status, reply.body) == (201, b'{"id":"p"}')
    assert dict(reply.headers)[b"etag"] == b'"1"'
    assert stored_headers(reply) == record.headers


# -- cursors --------------------------------------------------------------------------------------


def test_a_cursor_leads_behind_the_last_row_and_fits_no_other_list() -> None:
    rows = [{"id": f"01970000-0000-7000-8000-00000000000{n}"} for n in range(3)]
    assert page(rows, 3, "projects") == {"items": rows, "next": None}
    cut = page(rows, 2, "projects")
    assert cut["items"] == rows[:2]
    assert read_cursor(cut["next"], "projects") == rows[1]["id"]
    assert read_cursor(None, "projects") is None
    with pytest.raises(BodyInvalidError):
        read_cursor(cut["next"], "missions")
