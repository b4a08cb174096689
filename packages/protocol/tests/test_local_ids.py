"""Local ids: references in body, headers and path, and their replacement by server ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward_outbox.errors import EntryInvalidError
from onceward_protocol.local_ids import (
    is_local_id,
    references,
    replace_in_body,
    replace_in_headers,
    replace_in_path,
)

A = "0b9f8c1e-4d5a-4b7c-8d9e-0f1a2b3c4d5e"
B = "7c6d5e4f-3a2b-4c1d-9e8f-a0b1c2d3e4f5"
IDS: dict[str, str | int] = {A: "srv-1", B: 42}


def test_references_are_found_in_body_headers_and_path() -> None:
    found = references(
        {"deep": [{"er": f"see {{local:{A}}} there"}]}, {"X-Parent": f"{{local:{B}}}"}, "/x"
    )
    assert found.placeholders == {A, B}
    assert references(None, {}, f"/x/{{local:{A}}}").placeholders == {A}
    assert references(None, {}, f"/x?y={{local:{A}}}").placeholders == {A}


def test_whole_value_in_local_id_format_is_a_candidate() -> None:
    found = references({"a": A, "list": [B], "text": f"not {A} alone"}, {}, f"/x/{B}")
    assert found.placeholders == frozenset()
    assert found.candidates == {A, B}


def test_member_names_are_not_references() -> None:
    found = references({A: 1, f"{{local:{B}}}": 2}, {}, "/x")
    assert found == (frozenset(), frozenset())


@pytest.mark.parametrize("text", ["{local:}", "{local:42}", f"{{local:{A.upper()}}}", "{local:"])
def test_placeholder_without_a_local_id_is_rejected(text: str) -> None:
    with pytest.raises(EntryInvalidError):
        references({"a": f"x {text} y"}, {}, "/x")


def test_bad_placeholder_next_to_a_good_one_is_rejected() -> None:
    with pytest.raises(EntryInvalidError):
        references(f"{{local:{A}}} and {{local:unknown}}", {}, "/x")


def test_local_id_has_one_format() -> None:
    assert is_local_id(A)
    assert not is_local_id(A.upper())
    assert not is_local_id(A + "0")
    assert not is_local_id("")


def test_whole_value_is_replaced_by_the_server_id() -> None:
    body = {"a": A, "b": [B, f"{{local:{B}}}"], "other": "x", "n": None}
    assert replace_in_body(body, IDS) == {"a": "srv-1", "b": [42, 42], "other": "x", "n": None}


def test_placeholder_inside_a_string_is_replaced_by_text() -> None:
    assert replace_in_body(f"{{local:{A}}}/{{local:{B}}}", IDS) == "srv-1/42"
    assert (
        replace_in_body(f"a bare {A} inside a text stays", IDS) == f"a bare {A} inside a text stays"
    )


def test_unknown_ids_are_kept() -> None:
    assert replace_in_body([A, f"{{local:{A}}}", f"x{{local:{A}}}"], {}) == [
        A,
        f"{{local:{A}}}",
        f"x{{local:{A}}}",
    ]
    assert replace_in_path(f"/x/{{local:{A}}}", {}) == f"/x/{{local:{A}}}"


def test_argument_is_not_changed() -> None:
    body = {"a": [A]}
    replace_in_body(body, IDS)
    assert body == {"a": [A]}


def test_ids_in_paths_and_headers_are_replaced() -> None:
    assert replace_in_path(f"/a/{{local:{A}}}/b/{B}?q={{local:{B}}}", IDS) == "/a/srv-1/b/42?q=42"
    assert replace_in_headers({"X": A, "Y": f"v={{local:{B}}}"}, IDS) == {"X": "srv-1", "Y": "v=42"}


def test_id_is_percent_encoded_in_the_path() -> None:
    assert replace_in_path(f"/a/{{local:{A}}}", {A: "a b/c?d#e"}) == "/a/a%20b%2Fc%3Fd%23e"


@pytest.mark.parametrize("hostile", ["..", ".", "../admin", "//evil", "a\r\nb", "a\x00b", "%2e%2e"])
def test_malicious_id_cannot_leave_the_path(hostile: str) -> None:
    with pytest.raises(EntryInvalidError):
        replace_in_path(f"/a/{{local:{A}}}/b", {A: hostile})
    with pytest.raises(EntryInvalidError):
        replace_in_path(f"/a/{A}/b", {A: hostile})


@pytest.mark.parametrize("hostile", ["a\r\nX-Evil: 1", "a\nb", "a\x00b", "caf\u00e9"])
def test_malicious_id_cannot_inject_a_header(hostile: str) -> None:
    with pytest.raises(EntryInvalidError):
        replace_in_headers({"X": f"{{local:{A}}}"}, {A: hostile})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.sampled_from([A, B, f"{{local:{A}}}"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_no_reference_is_left_after_replacement(body: object) -> None:
    try:
        found = references(body, {}, "/x")
    except EntryInvalidError:
        return
    ids: dict[str, str | int] = dict.fromkeys(found.placeholders | found.candidates, "srv")
    after = references(replace_in_body(body, ids), {}, "/x")
    assert after == (frozenset(), frozenset())
