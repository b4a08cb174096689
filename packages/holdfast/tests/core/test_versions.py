"""Optimistic locking: what counts as a version, and what a mismatch says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.versions import ANY_VERSION, check_version, etag, expected_version
from holdfast.errors import BodyInvalidError, VersionMismatchError, VersionRequiredError


@given(st.integers(min_value=1, max_value=2**63 - 1))
def test_an_etag_names_its_version(version: int) -> None:
    assert expected_version(if_match=[etag(version)]) == frozenset({version})
    assert expected_version(in_body=version) == frozenset({version})
    check_version(expected_version(if_match=[etag(version)]), version)


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_only_the_version_that_was_seen_may_be_written_to(seen: int, current: int) -> None:
    expected = expected_version(if_match=[etag(seen)])
    if seen == current:
        check_version(expected, current)
        return
    with pytest.raises(VersionMismatchError) as mismatch:
        check_version(expected, current)
    assert mismatch.value.details == {"currentVersion": current, "expectedVersion": seen}


def test_no_version_at_all_is_required() -> None:
    with pytest.raises(VersionRequiredError):
        expected_version()


def test_a_star_forces_only_where_that_is_allowed() -> None:
    assert expected_version(if_match=["*"], allow_any=True) is ANY_VERSION
    check_version(ANY_VERSION, 12)
    with pytest.raises(VersionRequiredError):
        expected_version(if_match=["*"])


def test_any_of_several_tags_may_match() -> None:
    expected = expected_version(if_match=['"3", "5"'])
    check_version(expected, 5)
    with pytest.raises(VersionMismatchError):
        check_version(expected, 4)


@pytest.mark.parametrize(
    "values",
    [
        ['"1"', '"2"'],
        ['W/"1"'],
        ['"1", W/"2"'],
        ["1"],
        [""],
        ["   "],
        ['"1'],
        ['"1" "2"'],
        [","],
        ["x" * 2000],
        ['"a\x00b"'],
    ],
)
def test_what_cannot_be_read_is_refused(values: list[str]) -> None:
    with pytest.raises(BodyInvalidError):
        expected_version(if_match=values)


@pytest.mark.parametrize(
    "tag", ['"-1"', '"0"', '"01"', '"9223372036854775808"', '"abc"', '""', '"1.0"']
)
def test_a_tag_that_is_no_version_of_ours_matches_none(tag: str) -> None:
    with pytest.raises(VersionMismatchError):
        check_version(expected_version(if_match=[tag]), 1)


@pytest.mark.parametrize("value", [-1, 0, 2**63, 10**30])
def test_an_absurd_version_in_the_body_matches_none(value: int) -> None:
    with pytest.raises(VersionMismatchError):
        check_version(expected_version(in_body=value), 1)


@pytest.mark.parametrize("value", ["1", 1.0, True, [1], {}])
def test_a_version_in_the_body_is_a_whole_number(value: object) -> None:
    with pytest.raises(BodyInvalidError):
        expected_version(in_body=value)


def test_header_and_body_must_agree() -> None:
    assert expected_version(if_match=['"4"'], in_body=4) == frozenset({4})
    with pytest.raises(BodyInvalidError):
        expected_version(if_match=['"4"'], in_body=5)


def test_the_same_header_twice_is_one() -> None:
    assert expected_version(if_match=['"4"', '"4"']) == frozenset({4})
