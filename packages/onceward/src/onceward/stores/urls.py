"""Database URLs: which database they name, and the options of Onceward in them."""

from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote

from onceward.errors import ConfigurationError
from onceward.stores.table_names import TableNames

__all__ = ["StoreUrl", "parse_store_url"]

# As SQLAlchemy writes them. On PostgreSQL ``open_store`` chooses its store by the driver.
_SQLITE_DRIVERS: Final = frozenset({"", "aiosqlite", "pysqlite"})
_POSTGRES_DRIVERS: Final = frozenset({"", "asyncpg", "psycopg", "psycopg_async"})
_OPTIONS: Final = frozenset({"table_prefix", "schema"})
# Options that SQLAlchemy reads itself.
_OF_SQLALCHEMY: Final = frozenset(
    {"async_fallback", "prepared_statement_cache_size", "prepared_statement_name_func"}
)


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A parsed URL. ``location`` is the path of a file, or a ``postgresql://`` URL for drivers."""

    database: Literal["sqlite", "postgresql"]
    location: str
    table_prefix: str | None = None
    schema: str | None = None
    # The driver that the URL of a PostgreSQL database names, if any.
    driver: str = ""

    def names(self, table_prefix: str | None = None, schema: str | None = None) -> TableNames:
        """Return the names of the tables, from these options or from the URL.

        Raises ``ConfigurationError`` if the two differ, or for a schema on SQLite.
        """
        return TableNames.chosen(
            _one_of("table_prefix", table_prefix, self.table_prefix),
            _one_of("schema", schema, self.schema),
            is_sqlite=self.database == "sqlite",
        )


def parse_store_url(url: str) -> StoreUrl:
    """Parse ``sqlite:///file.db`` or ``postgresql://…``, with ``?table_prefix=…&schema=…``.

    The URLs of SQLAlchemy (``postgresql+asyncpg://``) and ``postgres://`` name the same databases.
    Raises ``ConfigurationError``; the message contains no part of the URL but its scheme.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ConfigurationError(
            "a database URL without a scheme is not supported: write sqlite:///file.db for a "
            "file, or postgresql://user@host/name"
        )
    database, _, driver = scheme.partition("+")
    if database == "sqlite" and driver in _SQLITE_DRIVERS:
        return _sqlite(rest)
    if database in {"postgresql", "postgres"} and driver in _POSTGRES_DRIVERS:
        return _postgres(rest, driver)
    if database in {"sqlite", "postgresql", "postgres"}:
        write = "sqlite:///file.db" if database == "sqlite" else "postgresql://user@host/name"
        raise ConfigurationError(f"the driver {driver!r} is not supported: write {write}")
    raise ConfigurationError(
        f"database {scheme!r} is not supported: use sqlite:///… or postgresql://…"
    )


def _sqlite(rest: str) -> StoreUrl:
    location, options, others = _without_options(rest)
    path = location.removeprefix("/")
    if path == location or not path:
        raise ConfigurationError(
            "SQLite URL has no file: write sqlite:///file.db or sqlite:////full/path"
        )
    if others:
        raise ConfigurationError(
            f"SQLite URL has an unknown option {others[0].partition('=')[0]!r}: only table_prefix "
            "is supported"
        )
    return StoreUrl("sqlite", path, **options)


def _postgres(rest: str, driver: str) -> StoreUrl:
    location, options, others = _without_options(rest)
    kept = [
        # The name of the option in SQLAlchemy's URLs; asyncpg's is that of libpq.
        f"sslmode={value}" if name == "ssl" else f"{name}{equals}{value}"
        for name, equals, value in (option.partition("=") for option in others)
        if name not in _OF_SQLALCHEMY
    ]
    query = f"?{'&'.join(kept)}" if kept else ""
    return StoreUrl("postgresql", f"postgresql://{location}{query}", driver=driver, **options)


def _without_options(rest: str) -> tuple[str, dict[str, str], list[str]]:
    """Split off Onceward's options; return them, and the other options as they were written."""
    location, mark, query = rest.rpartition("?")
    if not mark or "=" not in query or "@" in query:  # a "?" in a password
        return rest, {}, []
    options: dict[str, str] = {}
    others = []
    for option in query.split("&"):
        name, _, value = option.partition("=")
        if name not in _OPTIONS:
            others.append(option)
        elif name in options:
            raise ConfigurationError(f"the URL has the option {name} twice")
        else:
            options[name] = unquote(value)
    return location, options, others


def _one_of(option: str, given: str | None, in_url: str | None) -> str | None:
    if given is not None and in_url is not None and given != in_url:
        raise ConfigurationError(
            f"{option} is {given!r} as an option and {in_url!r} in the URL: write it once"
        )
    return in_url if given is None else given
