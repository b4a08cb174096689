"""Names of Onceward's tables: prefix, schema, and the names of version 0.1."""

import re
from importlib.resources import files

import pytest

from onceward.core.table_names import DEFAULT_NAMES, MAX_PREFIX_LENGTH, TableNames
from onceward.errors import ConfigurationError
from onceward_protocol.fingerprint import lock_number

CREATED = re.compile(r"CREATE (?:OR REPLACE )?(?:TABLE|FUNCTION) (\w+)")
INDEX_OR_TRIGGER = re.compile(r"CREATE (?:UNIQUE )?(?:INDEX|TRIGGER) (\S+)")


ALL = [
    f"{database}/{file.name.removesuffix('.sql')}"
    for database in ("postgres", "sqlite")
    for file in files(f"onceward.stores.{database}.migrations").iterdir()
    if file.name.endswith(".sql")
]


def migration(name: str) -> str:
    database, _, file = name.partition("/")
    folder = files(f"onceward.stores.{database}.migrations")
    return folder.joinpath(f"{file}.sql").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ALL)
def test_prefix_and_schema_apply_to_every_name_of_a_migration(name: str) -> None:
    sql = migration(name)
    assert "onceward_" not in TableNames("acme_").render(sql)
    in_schema = TableNames("acme_", "own").render(sql)
    for created in CREATED.findall(sql):
        assert re.search(
            rf'(?:TABLE|FUNCTION) "own"\.acme_{created.removeprefix("onceward_")}\b',
            in_schema,
        )
    # PostgreSQL refuses a schema in the name of an index or trigger.
    assert not any('"' in found for found in INDEX_OR_TRIGGER.findall(in_schema))


def test_names_with_the_longest_prefix_fit_into_postgresql() -> None:
    longest = TableNames("p" * MAX_PREFIX_LENGTH, "s" * 63)
    names = [
        found.rpartition(".")[2]
        for name in ALL
        for pattern in (re.compile(r"(?:TABLE|FUNCTION) ([^\s(]+)"), INDEX_OR_TRIGGER)
        for found in pattern.findall(longest.render(migration(name)))
    ]
    assert max(map(len, [*names, longest.channel])) == 63


def test_only_names_of_onceward_are_replaced() -> None:
    sql = "SELECT onceward_total, my_onceward_jobs FROM onceward_reports, onceward_jobs"
    assert TableNames("acme_").render(sql) == (
        "SELECT onceward_total, my_onceward_jobs FROM onceward_reports, acme_jobs"
    )
    assert DEFAULT_NAMES.render(sql) == sql


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


def test_default_locks_and_channel_are_those_of_version_0_1() -> None:
    for names in (DEFAULT_NAMES, TableNames(is_unprefixed=True)):
        assert names.lock_number("t", "e", "k") == lock_number("t", "e", "k")
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
