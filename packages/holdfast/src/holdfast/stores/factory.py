"""Open the store that a URL names."""

from collections.abc import Sequence
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.ports import Store
from holdfast.stores.migrations import Migration, load_migrations
from holdfast.stores.urls import parse_store_url

__all__ = ["migrations_for", "open_store"]


def open_store(
    url: str,
    *,
    table_prefix: str | None = None,
    schema: str | None = None,
    migration_packages: Sequence[tuple[str, str]] = (),
    **options: Any,
) -> Store:
    """Return the store of a URL: ``sqlite:///file.db`` or ``postgresql://…``. Connects nothing.

    Names of Holdfast's tables begin with ``table_prefix`` (default: ``holdfast_``). On PostgreSQL
    they are in ``schema``. Both may be written into the URL instead: ``…?table_prefix=acme_``.

    ``migration_packages`` are ``(namespace, package)`` pairs; their migrations run after the
    core's. Each package has a ``sqlite`` and a ``postgres`` folder of numbered ``.sql`` files.
    """
    target = parse_store_url(url)
    names = target.names(table_prefix, schema)
    if target.database == "sqlite":
        from holdfast.stores.sqlite import SqliteStore  # noqa: PLC0415 - adapters are optional

        return SqliteStore(
            target.location,
            table_prefix=names.prefix,
            migrations=migrations_for("sqlite", migration_packages),
            **options,
        )
    try:
        from holdfast.stores.postgres import PostgresStore  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            'PostgreSQL needs its driver: pip install "holdfast[postgres]"'
        ) from error
    return PostgresStore(
        target.location,
        table_prefix=names.prefix,
        schema=names.schema,
        migrations=migrations_for("postgres", migration_packages),
        **options,
    )


def migrations_for(database: str, migration_packages: Sequence[tuple[str, str]]) -> list[Migration]:
    """Load the migrations of these packages for one kind of database."""
    return [
        migration
        for namespace, package in migration_packages
        for migration in load_migrations(namespace, f"{package}.{database}")
    ]
