"""Names of Onceward's tables: prefix and schema."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from onceward.errors import ConfigurationError
from onceward.stores.table_names import DEFAULT_NAMES, MAX_PREFIX_LENGTH, TableNames

CREATED = re.compile(r"CREATE (?:OR REPLACE )?(?:TABLE|FUNCTION) (\w+)")
INDEX = re.compile(r"CREATE (?:UNIQUE )?INDEX (\S+)")


ROOTS = [
    files("onceward.stores").joinpath("schema"),
    files("onceward.stores").joinpath("sql"),
    files("onceward_operator").joinpath("schema"),
]
ALL = [str(file) for root in ROOTS for file in Path(str(root)).rglob("*.sql")]


def text_of(name: str) -> str:
    return Path(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ALL)
def test_prefix_and_schema_apply_to_every_name_of_a_file(name: str) -> None:
    sql = text_of(name)
    assert "onceward_" not in TableNames("acme_").render(sql)
    in_schema = TableNames("acme_", "own").render(sql)
    for created in CREATED.findall(sql):
        assert re.search(
            rf'(?:TABLE|FUNCTION) "own"\.acme_{created.removeprefix("onceward_")}\b',
            in_schema,
        )
    # PostgreSQL refuses a schema in the name of an index.
    assert not any('"' in found for found in INDEX.findall(in_schema))


def test_names_with_the_longest_prefix_fit_into_postgresql() -> None:
    longest = TableNames("p" * MAX_PREFIX_LENGTH, "s" * 63)
    names = [
        found.rpartition(".")[2]
        for name in ALL
        for pattern in (re.compile(r"(?:TABLE|FUNCTION) ([^\s(]+)"), INDEX)
        for found in pattern.findall(longest.render(text_of(name)))
    ]
    assert max(map(len, [*names, longest.channel])) == 63


def test_only_names_of_onceward_are_replaced() -> None:
    sql = "SELECT total, my_onceward_jobs FROM reports, onceward_jobs"
    assert (
        TableNames("acme_").render(sql) == "SELECT total, my_onceward_jobs FROM reports, acme_jobs"
    )
    assert DEFAULT_NAMES.render(sql) == sql


@pytest.mark.parametrize(
    ("prefix", "schema", "jobs"),
    [
        (None, None, '"onceward".jobs'),
        (None, "own", '"own".jobs'),
        (None, "public", '"public".onceward_jobs'),
        ("acme_", None, '"onceward".acme_jobs'),
        ("acme_", "public", '"public".acme_jobs'),
        ("", "own", '"own".jobs'),
    ],
)
def test_names_on_postgresql(prefix: str | None, schema: str | None, jobs: str) -> None:
    assert TableNames.chosen(prefix, schema, is_sqlite=False).table("jobs") == jobs


def test_tables_without_a_prefix_need_a_schema_of_their_own() -> None:
    for is_sqlite, schema in ((True, None), (False, "public")):
        with pytest.raises(ConfigurationError, match=r"^table_prefix "):
            TableNames.chosen("", schema, is_sqlite=is_sqlite)


def test_locks_and_channel_belong_to_the_prefix_and_the_schema() -> None:
    several = [
        DEFAULT_NAMES,
        TableNames("acme_"),
        TableNames("other_"),
        TableNames(schema="own"),
        TableNames("acme_", "own"),
    ]
    assert len({names.lock_number("t", "e", "k") for names in several}) == len(several)
    assert len({names.channel for names in several}) == len(several)


def test_default_channel_has_the_name_of_the_project() -> None:
    for names in (DEFAULT_NAMES, TableNames.chosen(None, None, is_sqlite=False)):
        assert names.channel == "onceward_jobs"


@pytest.mark.parametrize(
    "prefix",
    ["", "Acme_", "1_", "a-b", "a.b", 'a"', "a'; DROP TABLE x; --", "sqlite_", "é", "a" * 30],
)
def test_invalid_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^table_prefix "):
        TableNames(prefix)


@pytest.mark.parametrize("schema", ["", "Own", "a.b", 'a"', "pg_own", "s" * 64])
def test_invalid_schema_is_refused(schema: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^schema "):
        TableNames(schema=schema)
