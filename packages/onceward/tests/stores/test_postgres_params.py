"""Named parameters and literals: what reaches PostgreSQL's parser, and what never does."""

import re
from datetime import UTC, datetime, timedelta, timezone

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward.errors import UsageError
from onceward.stores.postgres.params import (
    bytes_literal,
    instant_literal,
    int_literal,
    positional,
    text_literal,
    text_literals,
)
from onceward_testing.samples import AWKWARD_NAMES


def test_named_parameters_are_numbered_in_order():
    sql, values = positional("INSERT INTO t VALUES (:b, :a)", {"a": 1, "b": 2, "unused": 3})
    assert sql == "INSERT INTO t VALUES ($1, $2)"
    assert values == [2, 1]


def test_a_repeated_name_is_one_parameter():
    sql, values = positional("SELECT :a, :b, :a", {"a": 1, "b": 2})
    assert sql == "SELECT $1, $2, $1"
    assert values == [1, 2]


@pytest.mark.parametrize(
    "untouched",
    [
        "SELECT '1'::int, x::text FROM t",
        "SELECT 'at 12:30 :name', 'it''s :name'",
        r"SELECT E'it\'s :name', e'\\'",
        'SELECT ":name", "a"":name" FROM t',
        "SELECT 1 -- :name\n",
        "SELECT 1 /* :name\n :other */",
        "SELECT $$ :name $$, $tag$ :name $$ $tag$",
        "SELECT a[1:2]",
        "SELECT 1 AS x; ",
    ],
)
def test_text_that_looks_like_a_parameter_is_unchanged(untouched):
    assert positional(untouched, None) == (untouched, [])


def test_parameters_next_to_strings_and_comments_are_found():
    sql, values = positional(
        "SELECT ':x'::text, :x::int, '''' || :y -- :z\n, $q$:z$q$ WHERE a = :x", {"x": 1, "y": "q"}
    )
    assert sql == "SELECT ':x'::text, $1::int, '''' || $2 -- :z\n, $q$:z$q$ WHERE a = $1"
    assert values == [1, "q"]


@pytest.mark.parametrize("written", ["%s", "%(a)s", "$1", "?"])
def test_parameter_as_other_libraries_write_it_is_refused(written):
    with pytest.raises(UsageError, match="write :name"):
        positional(f"INSERT INTO t VALUES ({written})", {"a": 1})


@pytest.mark.parametrize("params", [None, {}, {"other": 1}])
def test_a_missing_parameter_is_named(params):
    with pytest.raises(UsageError, match=":customer"):
        positional("SELECT :customer", params)


@pytest.mark.parametrize(
    "ending",
    [
        "COMMIT",
        " commit ;",
        "ROLLBACK",
        "-- done\nEND",
        "/* x */ ABORT",
        ";BEGIN",
        "START TRANSACTION",
        "PREPARE TRANSACTION 'x'",
    ],
)
def test_a_handler_cannot_end_the_transaction(ending):
    with pytest.raises(UsageError, match="Onceward"):
        positional(ending, None)


@pytest.mark.parametrize("allowed", ["SAVEPOINT a", "ROLLBACK TO a", "RELEASE a", "SELECT 1"])
def test_savepoints_are_allowed(allowed):
    assert positional(allowed, None) == (allowed, [])


@given(st.text(st.characters(codec="utf-8")))
def test_no_text_can_end_its_literal(value):
    literal = text_literal(value)
    encoded = r"convert_from\(decode\('[0-9a-f]*','hex'\),'UTF8'\)"
    assert re.fullmatch(rf"'[\x20-\x7e]*'|{encoded}", literal), literal
    assert "\\" not in literal
    assert literal.count("'") in (2, 6)


@given(st.binary())
def test_bytes_are_hexadecimal_digits(value):
    assert re.fullmatch(r"decode\('[0-9a-f]*','hex'\)", bytes_literal(value))


def test_none_is_null_and_integers_are_digits():
    assert text_literal(None) == "NULL"
    assert int_literal(None) == "NULL"
    assert int_literal(-5) == "-5"
    with pytest.raises(ValueError):
        int_literal("1; DROP TABLE t")  # type: ignore[arg-type]


@pytest.mark.parametrize("special", ["'); COMMIT--", "\\", "\n", "ä", "\x7f"])
def test_several_texts_are_written_as_each_of_them_alone(special: str) -> None:
    for texts in (("a", None, "b c", ""), ("a", special, None), (special,), ()):
        assert text_literals(texts) == [text_literal(text) for text in texts]
    assert special not in "".join(text_literals(("a", special, "b")))


@pytest.mark.parametrize("strings", ["on", "off"])
@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "SJIS", "GBK", "SQL_ASCII"])
async def test_postgresql_reads_every_literal_back_in_every_session(postgres, strings, encoding):
    """An app's engine or a handler may have chosen these settings."""
    postgres.start()
    at = datetime(2026, 3, 1, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    settings = {"standard_conforming_strings": strings, "client_encoding": encoding}
    connection = await asyncpg.connect(postgres.url(), server_settings=settings)
    try:
        for name in (*AWKWARD_NAMES, "", "'", "\\'", "\\x41", "plain"):
            read = await connection.fetchval(f"SELECT convert_to({text_literal(name)},'UTF8')")
            assert read.decode() == name
        for body in (b"", b"\x00'\\", b"\\x41", bytes(range(256))):
            assert await connection.fetchval(f"SELECT {bytes_literal(body)}") == body
        read = await connection.fetchval(f"SELECT {instant_literal(at)}::timestamptz")
        assert read == at.astimezone(UTC)
    finally:
        await connection.close()
