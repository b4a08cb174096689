"""Open the store that a URL names."""

from collections.abc import Callable, Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from onceward.errors import ConfigurationError
from onceward.ports import Store, Transaction
from onceward.stores.urls import parse_store_url
from onceward_protocol.storage.migrations import Migration, load_migrations

__all__ = ["migrations_for", "open_store", "store_of", "uses_psycopg"]


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
