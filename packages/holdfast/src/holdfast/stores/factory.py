"""The one place that picks a store by its URL."""

from collections.abc import Sequence
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.ports import Store
from holdfast.stores.migrations import Migration, load_migrations

__all__ = ["migrations_for", "open_store"]


def open_store(
    url: str, *, migration_packages: Sequence[tuple[str, str]] = (), **options: Any
) -> Store:
    """Make the store a URL names: ``sqlite:///file.db`` or ``postgresql://…``.

    ``migration_packages`` are ``(namespace, package)`` pairs; their migrations run after the
    core's. Each package has a ``sqlite`` and a ``postgres`` folder of numbered ``.sql`` files.
    """
    scheme, _, _ = url.partition(":")  # the rest is for its store to read, and to refuse
    if scheme == "sqlite":
        from holdfast.stores.sqlite import SqliteStore  # noqa: PLC0415 - adapters are optional

        path = url.removeprefix("sqlite:///")
        if path == url or not path:
            raise ConfigurationError(
                "write a SQLite URL as sqlite:///file.db or sqlite:////full/path"
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
        f"{scheme!r} is not a database Holdfast knows: use sqlite:///… or postgresql://…"
    )


def migrations_for(database: str, migration_packages: Sequence[tuple[str, str]]) -> list[Migration]:
    """Load the migrations of these packages for one kind of database."""
    return [
        migration
        for namespace, package in migration_packages
        for migration in load_migrations(namespace, f"{package}.{database}")
    ]
