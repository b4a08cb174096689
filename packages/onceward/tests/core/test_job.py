"""Job keys and ids: which jobs are the same job."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward.errors import UsageError
from onceward.jobs.job import check_name, job_id, job_key, stable_uuid
from onceward_protocol.keys import KeyFormat, check_key

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True)
TEXT = st.text(min_size=1, max_size=20)


def test_key_consists_of_tenant_queue_type_and_resource() -> None:
    assert job_key("ada", "mail", "receipt.send", "order/1") == (
        "job:ada:mail:receipt.send:order/1"
    )


@given(TEXT, st.tuples(NAMES, NAMES, TEXT), st.tuples(NAMES, NAMES, TEXT))
def test_different_parts_never_give_the_same_key(
    tenant: str, one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    keys = [job_key(tenant, *parts) for parts in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)
    assert (job_id(keys[0]) == job_id(keys[1])) == (one == other)


def test_job_id_depends_on_the_key_only() -> None:
    """Ids are stored in tables and in other services: every version must make the same ones."""
    assert job_id("job:ada:mail:receipt.send:order/1") == "5e402763-6e25-4bae-8c17-a455140a1811"


@given(st.lists(st.text(max_size=10), max_size=4), st.lists(st.text(max_size=10), max_size=4))
def test_stable_uuids_are_the_same_for_the_same_parts_only(one: list[str], two: list[str]) -> None:
    assert (stable_uuid(*one) == stable_uuid(*two)) == (one == two)


@pytest.mark.parametrize("parts", [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc")])
def test_stable_uuid_depends_on_where_each_part_ends(parts: tuple[str, ...]) -> None:
    others = {("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc")} - {parts}
    assert stable_uuid(*parts) not in {stable_uuid(*other) for other in others}


@given(st.lists(st.text(st.characters(), max_size=10), max_size=3))
def test_stable_uuid_is_a_valid_idempotency_key(parts: list[str]) -> None:
    made = stable_uuid(*parts)
    assert check_key(made, KeyFormat.UUID4) == made
    assert uuid.UUID(made).version == 4
    assert uuid.UUID(made).variant == uuid.RFC_4122


def test_stable_uuid_accepts_a_lone_surrogate() -> None:
    assert stable_uuid("\ud800") != stable_uuid("\ud801")


@pytest.mark.parametrize("name", ["a", "receipt.send", "A-1_b", "0", "x" * 100])
def test_valid_names_are_accepted(name: str) -> None:
    assert check_name(name, "queue") == name


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a:b", "a/b", ".a", "-a", "_a", "ü", "a\n", "x" * 101, "a*", "a>"]
)
def test_names_invalid_in_keys_subjects_or_labels_are_rejected(name: str) -> None:
    with pytest.raises(UsageError, match="queue"):
        check_name(name, "queue")
