"""Database URLs, and the store that each names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Final, Literal
from urllib.parse import unquote

from onceward.errors import ConfigurationError
from onceward.ports import Store, Transaction
from onceward.stores.table_names import TableNames
from onceward_protocol.storage.migrations import Migration, load_migrations

__all__ = [
    "StoreUrl",
    "migrations_for",
    "open_store",
    "parse_store_url",
    "store_of",
    "uses_psycopg",
]

# As SQLAlchemy writes them. On PostgreSQL ``open_store`` chooses its store by the driver.
_SQLITE_DRIVERS: Final = frozenset({"", "aiosqlite", "pysqlite"})
_POSTGRES_DRIVERS: Final = frozenset({"", "asyncpg", "psycopg", "psycopg_async"})
_OPTIONS: Final = frozenset({"table_prefix", "schema"})
# Options that SQLAlchemy reads itself.
_OF_SQLALCHEMY: Final = frozenset(
    {"async_fallback", "prepared_statement_cache_size", "prepared_statement_name_func"}
)


def open_store(
    url: str,
    *,
    table_prefix: str | None = None,
    schema: str | None = None,
    migration_packages: Sequence[tuple[str, str]] = (),
    **options: Any,
) -> Store[Transaction]:
    """Return the store of a URL: ``sqlite:///file.db`` or ``postgresql://…``. Connects nothing.

    On PostgreSQL the driver is asyncpg, or psycopg for ``postgresql+psycopg://…``.

    On SQLite, names of Onceward's tables begin with ``table_prefix`` (default: ``onceward_``). On
    PostgreSQL they are in ``schema`` (default: ``onceward``), with a prefix only if it is given or
    the schema is ``public``. Both may be written into the URL instead: ``…?table_prefix=acme_``.

    ``migration_packages`` are ``(namespace, package)`` pairs; their migrations run after the
    library's. Each package has a ``sqlite`` and a ``postgres`` folder of numbered ``.sql`` files.
    """
    target = parse_store_url(url)
    names = target.names(table_prefix, schema)
    if target.database == "sqlite":
        from onceward.stores.sqlite import SqliteStore  # noqa: PLC0415 - adapters are optional

        return SqliteStore(
            target.location,
            table_prefix=names.prefix,
            migrations=migrations_for("sqlite", migration_packages),
            **options,
        )
    return _postgres_store(target.driver)(
        target.location,
        table_prefix=names.prefix,
        schema=names.schema,
        migrations=migrations_for("postgres", migration_packages),
        **options,
    )


def store_of(given: Store | str) -> Store:
    """Return a store as it is, and the store of a URL. Raises ``ConfigurationError``."""
    if isinstance(given, str):
        return open_store(given)
    if not hasattr(given, "claim"):
        raise ConfigurationError(
            f"Onceward takes a database URL or a store, not a {type(given).__name__}: "
            + _instead_of(given)
        )
    return given


def _instead_of(given: object) -> str:
    """Say what to write for an object of the app. SQLAlchemy is optional."""
    names = {base.__name__ for base in type(given).__mro__}
    is_flask_sqlalchemy = hasattr(given, "init_app") and hasattr(given, "session")
    if "scoped_session" in names or is_flask_sqlalchemy:
        return "write Onceward(SqlAlchemySyncStore(db.session))"
    if names & {"Engine", "sessionmaker"}:
        return "for a sync engine write Onceward(SqlAlchemySyncStore(engine))"
    if "Session" in names:
        return "a session serves one request; write Onceward(SqlAlchemySyncStore(engine))"
    return (
        "for an async engine write Onceward(SqlAlchemyStore(engine)), for a sync one "
        'Onceward(SqlAlchemySyncStore(engine)), for a file Onceward("sqlite:///…")'
    )


def uses_psycopg(driver: str) -> bool:
    """Check which driver serves a PostgreSQL URL: psycopg if it is named, or without asyncpg."""
    if driver:
        return driver.startswith("psycopg")
    return find_spec("asyncpg") is None and find_spec("psycopg") is not None


def _postgres_store(driver: str) -> Callable[..., Store[Transaction]]:
    if uses_psycopg(driver):
        if find_spec("psycopg") is None:
            raise ConfigurationError('psycopg is missing: pip install "onceward[psycopg]"')
        from onceward.stores.psycopg import PsycopgStore  # noqa: PLC0415 - adapters are optional

        return PsycopgStore
    from onceward.stores.postgres import PostgresStore  # noqa: PLC0415

    return PostgresStore


def migrations_for(database: str, migration_packages: Sequence[tuple[str, str]]) -> list[Migration]:
    """Load the migrations of these packages for one kind of database."""
    return [
        migration
        for namespace, package in migration_packages
        for migration in load_migrations(namespace, files(package) / database)
    ]


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A parsed URL."""

    # Which database it names.
    database: Literal["sqlite", "postgresql"]
    # The path of a file, or a ``postgresql://`` URL for drivers.
    location: str
    # Options of Onceward in the URL.
    table_prefix: str | None = None
    # The schema of Onceward's tables, if the URL names one.
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
