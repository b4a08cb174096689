"""Optimistic locking: versions in If-Match and in the body."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward_protocol.errors import BodyInvalidError, VersionMismatchError, VersionRequiredError
from onceward_protocol.versions import ANY_VERSION, check_version, etag, expected_version


@given(st.integers(min_value=1, max_value=2**63 - 1))
def test_etag_contains_the_version(version: int) -> None:
    assert expected_version(if_match=[etag(version)]) == frozenset({version})
    assert expected_version(in_body=version) == frozenset({version})
    check_version(expected_version(if_match=[etag(version)]), version)


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_write_requires_the_current_version(seen: int, current: int) -> None:
    expected = expected_version(if_match=[etag(seen)])
    if seen == current:
        check_version(expected, current)
        return
    with pytest.raises(VersionMismatchError) as mismatch:
        check_version(expected, current)
    assert mismatch.value.details == {"currentVersion": current, "expectedVersion": seen}


def test_missing_version_is_rejected() -> None:
    with pytest.raises(VersionRequiredError):
        expected_version()


def test_star_is_accepted_only_where_allowed() -> None:
    assert expected_version(if_match=["*"], allow_any=True) is ANY_VERSION
    check_version(ANY_VERSION, 12)
    with pytest.raises(VersionRequiredError):
        expected_version(if_match=["*"])


def test_one_of_several_etags_may_match() -> None:
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
def test_malformed_if_match_is_rejected(values: list[str]) -> None:
    with pytest.raises(BodyInvalidError):
        expected_version(if_match=values)


@pytest.mark.parametrize(
    "tag", ['"-1"', '"0"', '"01"', '"9223372036854775808"', '"abc"', '""', '"1.0"']
)
def test_foreign_etag_does_not_match(tag: str) -> None:
    with pytest.raises(VersionMismatchError):
        check_version(expected_version(if_match=[tag]), 1)


@pytest.mark.parametrize("value", [-1, 0, 2**63, 10**30])
def test_out_of_range_version_in_the_body_does_not_match(value: int) -> None:
    with pytest.raises(VersionMismatchError):
        check_version(expected_version(in_body=value), 1)


@pytest.mark.parametrize("value", ["1", 1.0, True, [1], {}])
def test_version_in_the_body_must_be_an_integer(value: object) -> None:
    with pytest.raises(BodyInvalidError):
        expected_version(in_body=value)


def test_header_and_body_must_agree() -> None:
    assert expected_version(if_match=['"4"'], in_body=4) == frozenset({4})
    with pytest.raises(BodyInvalidError):
        expected_version(if_match=['"4"'], in_body=5)


def test_repeated_if_match_header_is_accepted() -> None:
    assert expected_version(if_match=['"4"', '"4"']) == frozenset({4})
