"""The PostgreSQL database of all services: migrated once, emptied for each test."""

from holdfast import open_store
from holdfast_services.registry import migration_packages

__all__ = ["migrate"]


async def migrate(url: str) -> None:
    """Create the tables of all services."""
    store = open_store(url, migration_packages=migration_packages())
    await store.open()
    await store.close()
