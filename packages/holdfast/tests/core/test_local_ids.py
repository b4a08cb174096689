"""Local ids: found wherever they may stand, and replaced there by what the server gave."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.local_ids import (
    is_local_id,
    references,
    replace_in_body,
    replace_in_headers,
    replace_in_path,
)
from holdfast.errors import EntryInvalidError

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


def test_a_whole_value_that_looks_like_a_local_id_is_a_candidate() -> None:
    found = references({"a": A, "list": [B], "text": f"not {A} alone"}, {}, f"/x/{B}")
    assert found.placeholders == frozenset()
    assert found.candidates == {A, B}


def test_names_of_members_are_no_references() -> None:
    found = references({A: 1, f"{{local:{B}}}": 2}, {}, "/x")
    assert found == (frozenset(), frozenset())


@pytest.mark.parametrize("text", ["{local:}", "{local:42}", f"{{local:{A.upper()}}}", "{local:"])
def test_a_placeholder_without_a_local_id_is_refused(text: str) -> None:
    with pytest.raises(EntryInvalidError):
        references({"a": f"x {text} y"}, {}, "/x")


def test_one_bad_placeholder_beside_a_good_one_is_refused() -> None:
    with pytest.raises(EntryInvalidError):
        references(f"{{local:{A}}} and {{local:nobody}}", {}, "/x")


def test_a_local_id_has_one_spelling() -> None:
    assert is_local_id(A)
    assert not is_local_id(A.upper())
    assert not is_local_id(A + "0")
    assert not is_local_id("")


def test_whole_values_take_the_servers_id_as_it_is() -> None:
    body = {"a": A, "b": [B, f"{{local:{B}}}"], "other": "x", "n": None}
    assert replace_in_body(body, IDS) == {"a": "srv-1", "b": [42, 42], "other": "x", "n": None}


def test_inside_strings_placeholders_become_text() -> None:
    assert replace_in_body(f"{{local:{A}}}/{{local:{B}}}", IDS) == "srv-1/42"
    assert (
        replace_in_body(f"a bare {A} inside a text stays", IDS) == f"a bare {A} inside a text stays"
    )


def test_unknown_ids_stay_as_they_are() -> None:
    assert replace_in_body([A, f"{{local:{A}}}", f"x{{local:{A}}}"], {}) == [
        A,
        f"{{local:{A}}}",
        f"x{{local:{A}}}",
    ]
    assert replace_in_path(f"/x/{{local:{A}}}", {}) == f"/x/{{local:{A}}}"


def test_the_body_given_is_not_changed() -> None:
    body = {"a": [A]}
    replace_in_body(body, IDS)
    assert body == {"a": [A]}


def test_paths_and_headers_are_replaced_too() -> None:
    assert replace_in_path(f"/a/{{local:{A}}}/b/{B}?q={{local:{B}}}", IDS) == "/a/srv-1/b/42?q=42"
    assert replace_in_headers({"X": A, "Y": f"v={{local:{B}}}"}, IDS) == {"X": "srv-1", "Y": "v=42"}


def test_an_id_with_strange_characters_is_encoded_in_the_path() -> None:
    assert replace_in_path(f"/a/{{local:{A}}}", {A: "a b/c?d#e"}) == "/a/a%20b%2Fc%3Fd%23e"


@pytest.mark.parametrize("hostile", ["..", ".", "../admin", "//evil", "a\r\nb", "a\x00b", "%2e%2e"])
def test_a_hostile_id_cannot_lead_out_of_the_path(hostile: str) -> None:
    with pytest.raises(EntryInvalidError):
        replace_in_path(f"/a/{{local:{A}}}/b", {A: hostile})
    with pytest.raises(EntryInvalidError):
        replace_in_path(f"/a/{A}/b", {A: hostile})


@pytest.mark.parametrize("hostile", ["a\r\nX-Evil: 1", "a\nb", "a\x00b", "caf\u00e9"])
def test_a_hostile_id_cannot_break_out_of_a_header(hostile: str) -> None:
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
def test_after_replacing_all_that_was_found_nothing_is_left_to_find(body: object) -> None:
    try:
        found = references(body, {}, "/x")
    except EntryInvalidError:
        return
    ids: dict[str, str | int] = dict.fromkeys(found.placeholders | found.candidates, "srv")
    after = references(replace_in_body(body, ids), {}, "/x")
    assert after == (frozenset(), frozenset())
