"""The three-way merge: examples, and properties that hold for all JSON objects."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward_outbox.conflicts import merge_patch, three_way_merge

scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "b"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)
objects = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


@pytest.mark.parametrize(
    ("base", "mine", "theirs", "merged", "conflicts"),
    [
        # Each side has changed another field.
        ({"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}, ()),
        # Both have changed the same, alike and differently.
        ({"a": 1}, {"a": 2}, {"a": 2}, {"a": 2}, ()),
        ({"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 3, "b": 2}, {"a": 2, "b": 2}, ("/a",)),
        # Added and removed.
        ({}, {"a": 1}, {"b": 1}, {"b": 1, "a": 1}, ()),
        ({"a": 1, "b": 1}, {"b": 1}, {"a": 1, "b": 2}, {"b": 2}, ()),
        ({"a": 1}, {}, {"a": 2}, {}, ("/a",)),
        ({"a": 1}, {"a": 2}, {}, {"a": 2}, ("/a",)),
        # Nested objects; names are escaped in pointers.
        ({"o": {"x": 1, "y": 1}}, {"o": {"x": 2, "y": 1}}, {"o": {"x": 1, "y": 2}},
         {"o": {"x": 2, "y": 2}}, ()),
        ({"a/b": {"~": 1}}, {"a/b": {"~": 2}}, {"a/b": {"~": 3}}, {"a/b": {"~": 2}},
         ("/a~1b/~0",)),
        # Arrays as a whole; true is not 1.
        ({"l": [1, 2]}, {"l": [1, 2, 3]}, {"l": [1, 2]}, {"l": [1, 2, 3]}, ()),
        ({"l": [1]}, {"l": [1, 2]}, {"l": [1, 3]}, {"l": [1, 2]}, ("/l",)),
        ({"a": 1}, {"a": 1}, {"a": True}, {"a": True}, ()),
    ],
)  # fmt: skip
def test_examples(base: Any, mine: Any, theirs: Any, merged: Any, conflicts: Any) -> None:
    assert three_way_merge(base, mine, theirs) == (merged, conflicts)


def test_arrays_with_an_identity_are_merged_by_element() -> None:
    def lines(*pairs: tuple[str, int]) -> dict[str, Any]:
        return {"lines": [{"id": name, "n": number} for name, number in pairs]}

    base, mine = lines(("a", 1), ("b", 1), ("c", 1)), lines(("a", 2), ("b", 1), ("d", 1))
    theirs = lines(("c", 1), ("a", 1), ("b", 2), ("e", 1))
    merged = three_way_merge(base, mine, theirs, identities={"/lines": "id"})
    assert merged == (lines(("a", 2), ("b", 2), ("e", 1), ("d", 1)), ())
    clash = three_way_merge(
        base, lines(("a", 2)), lines(("a", 3), ("b", 1), ("c", 1)), identities={"/lines": "id"}
    )
    assert clash == (lines(("a", 2)), ("/lines/a/n",))
    # Two elements with one identity: the array is one value.
    twice = lines(("a", 1), ("a", 2))
    assert three_way_merge(base, twice, theirs, identities={"/lines": "id"}).conflicts == (
        "/lines",
    )


def test_patch_without_a_base_conflicts_where_it_differs() -> None:
    assert merge_patch(None, {"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == (
        {"a": 1, "b": 2},
        ("/b",),
    )


@given(objects, objects)
def test_one_side_unchanged_gives_the_other(base: Any, changed: Any) -> None:
    assert three_way_merge(base, changed, base) == (changed, ())
    assert three_way_merge(base, base, changed) == (changed, ())
    assert three_way_merge(base, changed, changed) == (changed, ())


@given(objects, objects, objects)
def test_both_orders_agree_where_there_is_no_conflict(base: Any, mine: Any, theirs: Any) -> None:
    one = three_way_merge(base, mine, theirs)
    other = three_way_merge(base, theirs, mine)
    assert set(one.conflicts) == set(other.conflicts)
    if not one.conflicts:
        assert one.value == other.value
        # Merged once more, nothing changes.
        assert three_way_merge(theirs, one.value, theirs) == (one.value, ())


@given(objects, objects, objects)
def test_every_field_comes_from_a_side_that_changed_it(base: Any, mine: Any, theirs: Any) -> None:
    merged = three_way_merge(base, mine, theirs)
    absent = object()
    for name in {*base, *mine, *theirs}:
        before, ours, others = (side.get(name, absent) for side in (base, mine, theirs))
        value = merged.value.get(name, absent)
        if repr(ours) == repr(before):
            assert repr(value) == repr(others)
        elif repr(others) == repr(before):
            assert repr(value) == repr(ours)


@given(objects, objects, objects)
def test_patch_never_loses_a_change_of_the_server_silently(
    base: Any, patch: Any, theirs: Any
) -> None:
    merged = merge_patch(base, patch, theirs)
    assert merged.value.keys() <= patch.keys()
    for name, value in merged.value.items():
        changed_there = repr(theirs.get(name)) != repr(base.get(name)) or (
            (name in theirs) != (name in base)
        )
        if changed_there and repr(value) != repr(theirs.get(name)) and not isinstance(value, dict):
            assert f"/{name}" in merged.conflicts
