"""Database URLs: which are accepted, and what is written about the others."""

from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import Onceward, open_store
from onceward.errors import ConfigurationError
from onceward.stores.factory import parse_store_url
from onceward.stores.postgres import PostgresStore
from onceward.stores.sqlite import SqliteStore


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://[bad", "Invalid IPv6"),
        ("postgresql://me:secret@127.0.0.1:abc/x", "from 1 to 65535"),
        ("postgresql://127.0.0.1:99999/x", "from 1 to 65535"),
        ("postgres://127.0.0.1:0/x", "from 1 to 65535"),
        ("postgresql://[::1]:65536/x", "from 1 to 65535"),
        ("postgresql://one:5432,two:54321234/x", "from 1 to 65535"),
        ("postgresql:///x?host=/tmp&port=abc", "from 1 to 65535"),
    ],
)
def test_malformed_postgres_url_is_refused(url: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match="PostgreSQL URL is malformed") as error:
        open_store(url)
    assert expected in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:p:a%40ss@[::1]:5432/x",
        "postgresql://one,two:5433/x?target_session_attrs=read-write",
        "postgresql:///x?host=/var/run/postgresql&port=5433",
        "postgres://me@%2Fvar%2Frun/x",
        "postgresql://localhost",
    ],
)
def test_every_valid_form_of_a_url_is_accepted(url: str) -> None:
    assert open_store(url).name == "postgresql"


@pytest.mark.parametrize("url", ["", "mysql://[bad", "nonsense", ":"])
def test_unsupported_database_is_named_in_the_error(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is not supported"):
        open_store(url)


@pytest.mark.parametrize("mark", ["/", "#", "?"])
def test_error_contains_no_part_of_a_password(mark: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_store(f"postgresql://app:s3cret{mark}x@db/name")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("postgres://me@db/x", "postgresql://me@db/x"),
        ("postgresql+asyncpg://me@db/x", "postgresql://me@db/x"),
        ("postgresql+psycopg://me@db/x?sslmode=require", "postgresql://me@db/x?sslmode=require"),
        (
            "postgresql+asyncpg://db/x?ssl=require&prepared_statement_cache_size=0",
            "postgresql://db/x?sslmode=require",
        ),
        ("sqlite:///shop.db", "shop.db"),
        ("sqlite+aiosqlite:////var/shop.db", "/var/shop.db"),
    ],
)
def test_urls_of_sqlalchemy_and_postgres_scheme_are_accepted(url: str, location: str) -> None:
    database = "sqlite" if url.startswith("sqlite") else "postgresql"
    assert open_store(url).name == database
    parsed = parse_store_url(url)
    assert (parsed.database, parsed.location) == (database, location)


def test_prefix_and_schema_are_read_from_the_url() -> None:
    url = "postgresql+asyncpg://db/x?schema=own&sslmode=require&table_prefix=acme_"
    parsed = parse_store_url(url)
    assert (parsed.table_prefix, parsed.schema) == ("acme_", "own")
    assert parsed.location == "postgresql://db/x?sslmode=require"
    for store in (open_store(url), PostgresStore(url), open_store(url, table_prefix="acme_")):
        assert store.table_names.table("jobs") == '"own".acme_jobs'
    assert open_store("sqlite:///x.db?table_prefix=acme_").table_names.table("jobs") == "acme_jobs"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql+psycopg2://me:hunter2@db/x", "driver 'psycopg2' .* postgresql://user@host"),
        ("sqlite+pysqlcipher:///x.db", "driver 'pysqlcipher' .* sqlite:///file.db"),
        ("mysql://me:hunter2@db/x", "database 'mysql' is not supported: use sqlite:///"),
        ("shop.db", "without a scheme .* sqlite:///file.db"),
        ("host=db password=hunter2", "without a scheme"),
        ("sqlite://shop.db", "no file: write sqlite:///file.db"),
        ("sqlite:///shop.db?mode=ro", "unknown option 'mode'"),
        ("sqlite:///shop.db?schema=own", "SQLite has no schemas: use table_prefix"),
        ("sqlite:///shop.db?table_prefix=a&table_prefix=b", "table_prefix twice"),
        ("postgresql://db/x?table_prefix=DROP", "table_prefix 'DROP' is not valid"),
    ],
)
def test_wrong_url_is_refused_in_one_line_that_says_what_to_write(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        open_store(url)
    assert "\n" not in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_prefix_that_differs_from_the_one_in_the_url_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'b_' as an option and 'a_' in the URL"):
        open_store("sqlite:///x.db?table_prefix=a_", table_prefix="b_")


def test_anything_but_a_url_or_a_store_is_refused(tmp_path: Path) -> None:
    for given in (create_async_engine("sqlite+aiosqlite:///x.db"), tmp_path / "x.db", None):
        with pytest.raises(ConfigurationError, match=r"URL or a store, not a .*SqlAlchemyStore"):
            Onceward(given)  # type: ignore[call-overload]


def test_url_of_another_store_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="give a URL to open_store"):
        SqliteStore("sqlite:///shop.db")
    with pytest.raises(ConfigurationError, match="postgresql://user@host/name"):
        PostgresStore("sqlite:///shop.db")
