"""Open the store that a URL names."""

from collections.abc import Sequence
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.ports import Store
from holdfast.stores.migrations import Migration, load_migrations

__all__ = ["migrations_for", "open_store"]


def open_store(
    url: str, *, migration_packages: Sequence[tuple[str, str]] = (), **options: Any
) -> Store:
    """Return the store of a URL: ``sqlite:///file.db`` or ``postgresql://…``. Connects nothing.

    ``migration_packages`` are ``(namespace, package)`` pairs; their migrations run after the
    core's. Each package has a ``sqlite`` and a ``postgres`` folder of numbered ``.sql`` files.
    """
    scheme, _, _ = url.partition(":")
    if scheme == "sqlite":
        from holdfast.stores.sqlite import SqliteStore  # noqa: PLC0415 - adapters are optional

        path = url.removeprefix("sqlite:///")
        if path == url or not path:
            raise ConfigurationError(
                "SQLite URL has no file: write sqlite:///file.db or sqlite:////full/path"
            )
        return SqliteStore(path, migrations=migrations_for("sqlite", migration_packages), **options)
    if scheme in ("postgresql", "postgres"):
        try:
            from holdfast.stores.postgres import PostgresStore  # noqa: PLC0415
        except ImportError as error:
            raise ConfigurationError(
                'PostgreSQL needs its driver: pip install "holdfast[postgres]"'
            ) from error
        return PostgresStore(
            url, migrations=migrations_for("postgres", migration_packages), **options
        )
    raise ConfigurationError(
        f"database {scheme!r} is not supported: use sqlite:///… or postgresql://…"
    )


def migrations_for(database: str, migration_packages: Sequence[tuple[str, str]]) -> list[Migration]:
    """Load the migrations of these packages for one kind of database."""
    return [
        migration
        for namespace, package in migration_packages
        for migration in load_migrations(namespace, f"{package}.{database}")
    ]
