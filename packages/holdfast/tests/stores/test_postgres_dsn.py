"""Validation of PostgreSQL URLs before connecting."""

import pytest

from holdfast import open_store
from holdfast.errors import ConfigurationError


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
