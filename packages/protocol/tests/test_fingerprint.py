"""Fingerprints: which requests are the same request."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceward_protocol.errors import BodyInvalidError
from onceward_protocol.fingerprint import body_hash, lock_number, request_fingerprint, short_hash

EMPTY = hashlib.sha256(b"").hexdigest()
# Servers of two versions must agree on these values during an upgrade.
LOCKED = 6291066863197036875


def fingerprint(**changes):
    request = {
        "method": "POST",
        "endpoint": "POST /v1/missions/{mission_id}",
        "path_params": {"mission_id": "A"},
        "query": b"",
        "body_hash": EMPTY,
    }
    return request_fingerprint(**(request | changes))


def test_json_body_is_hashed_in_canonical_form():
    expected = hashlib.sha256(b'{"a":1,"b":2}').hexdigest()
    assert body_hash(b'{ "b": 2.0, "a": 1 }', "application/json") == expected


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json; charset=utf-8",
        "Application/JSON",
        " application/json ",
        "application/json ;charset=utf-8",
        "application/problem+json",
        "application/vnd.api+json;version=1",
    ],
)
def test_json_media_types_are_recognized(content_type):
    assert body_hash(b"[1.0]", content_type) == body_hash(b"[1]", "application/json")


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/jsonp", "text/json"])
def test_other_bodies_are_hashed_as_received(content_type):
    expected = hashlib.sha256((content_type or "").encode() + b"\n[1.0]").hexdigest()
    assert body_hash(b"[1.0]", content_type) == expected
    assert body_hash(b"[1.0]", content_type) != body_hash(b"[1]", content_type)


def test_content_type_is_part_of_the_hash_of_other_bodies():
    assert body_hash(b"x", "text/plain") != body_hash(b"x", "text/html")
    assert body_hash(b"x", "text/plain") != body_hash(b"x", None)
    assert body_hash(b"x", "a/b; c=d") != body_hash(b"x", "a/b; c=D")


def test_case_of_a_media_type_does_not_change_the_hash():
    assert body_hash(b"x", "Text/Plain; a=B ") == body_hash(b"x", "text/plain; a=B")


def test_json_body_and_raw_body_of_the_same_bytes_differ():
    assert body_hash(b"{}", "application/json") != body_hash(b"{}", None)


def test_empty_body_need_not_be_json():
    expected = hashlib.sha256(b"application/json\n").hexdigest()
    assert body_hash(b"", "application/json") == expected
    assert body_hash(b"", None) == hashlib.sha256(b"\n").hexdigest()


@pytest.mark.parametrize("content_type", ["application/json", "application/x+json; a=b"])
def test_invalid_json_body_is_rejected(content_type):
    with pytest.raises(BodyInvalidError):
        body_hash(b'{"a":1,"a":2}', content_type)


def test_volatile_fields_are_not_hashed_but_the_action_time_is():
    def sent(submitted, generated):
        body = f'{{"clientSubmittedAt":"{submitted}","clientGeneratedAt":"{generated}"}}'
        volatile = frozenset({"clientSubmittedAt", "attestationToken"})
        return body_hash(body.encode(), "application/json", volatile=volatile)

    assert sent("1", "1") == sent("2", "1")
    assert sent("1", "1") != sent("1", "2")


def test_same_request_has_the_same_fingerprint():
    one = fingerprint()
    assert one == fingerprint()
    assert len(one) == 64
    assert set(one) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "change",
    [
        {"method": "PUT"},
        {"endpoint": "POST /v1/missions/{mission_id}/assignments"},
        {"path_params": {"mission_id": "B"}},
        {"path_params": {"project_id": "A"}},
        {"path_params": {}},
        {"path_params": {"mission_id": "A", "x": ""}},
        {"query": b"a=1"},
        {"query": b"a"},
        {"body_hash": hashlib.sha256(b"x").hexdigest()},
    ],
)
def test_each_part_of_a_request_changes_its_fingerprint(change):
    assert fingerprint(**change) != fingerprint()


def test_order_of_path_parameters_does_not_change_the_fingerprint():
    one, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert fingerprint(path_params=one) == fingerprint(path_params=other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=1&b=2", b"b=2&a=1"),
        (b"a=%41", b"a=A"),
        (b"a=x+y", b"a=x%20y"),
        (b"a=%c3%a9", b"a=%C3%A9"),
        (b"a=\xc3\xa9", b"a=%C3%A9"),
        (b"a=", b"a"),
        (b"a=1&&b=2", b"a=1&b=2"),
        (b"b=1&a=1&a=2", b"a=1&b=1&a=2"),
    ],
)
def test_equivalent_queries_have_the_same_fingerprint(one, other):
    assert fingerprint(query=one) == fingerprint(query=other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=1", b"a=2"),
        (b"a=1&a=2", b"a=2&a=1"),
        (b"a=1", b"a=1&a=1"),
        (b"a=1", b"a=1&b="),
        (b"a=1%26b=2", b"a=1&b=2"),
        (b"a=1;b=2", b"a=1&b=2"),
        (b"a=%ff", b"a=%fe"),
        (b"a=%ff", b"a=%EF%BF%BD"),
        (b"a=\xff", b"a=\xfe"),
    ],
)
def test_different_queries_have_different_fingerprints(one, other):
    assert fingerprint(query=one) != fingerprint(query=other)


def test_path_and_query_parameters_are_distinguished():
    path_params = {"a": "b", "query 2": "a"}
    assert fingerprint(path_params=path_params, query=b"c=d") != fingerprint(
        path_params={"a": "b"}, query=b"a=query+1&c=d"
    )
    assert fingerprint(path_params={"a": "1"}, query=b"") != fingerprint(
        path_params={}, query=b"a=1"
    )


def test_lone_surrogate_in_a_path_is_accepted():
    assert fingerprint(path_params={"a": "\ud800"}) != fingerprint(path_params={"a": "\ud801"})


def test_lock_number_is_a_stable_signed_64_bit_integer():
    assert lock_number("walker-1", "tree.allocate", "key-1") == LOCKED
    numbers = [lock_number("t", "e", str(n)) for n in range(200)]
    assert len(set(numbers)) == 200
    assert all(-(2**63) <= number < 2**63 for number in numbers)
    assert min(numbers) < 0 < max(numbers)


@settings(max_examples=200, deadline=None)
@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_different_records_have_different_lock_numbers(one, other):
    assert (lock_number(*one) == lock_number(*other)) == (one == other)


def test_lock_number_depends_on_where_each_part_ends():
    assert lock_number("a", "bc", "d") != lock_number("ab", "c", "d")
    assert lock_number("a", "b", "c") != lock_number("", "ab", "c")
    assert lock_number("1:a", "", "") != lock_number("", "1:a", "")


def test_short_hash_is_a_prefix_of_the_sha256_of_the_key():
    assert short_hash("abc") == "ba7816bf8f01"
    assert short_hash("\ud800") != short_hash("\ud801")
