"""The PostgreSQL database of all services: migrated once, emptied for each test."""

from onceward import open_store
from onceward.stores.parts import installed_parts
from onceward_services.registry import migration_packages

__all__ = ["migrate"]


async def migrate(url: str) -> None:
    """Create the tables of all services and parts."""
    store = open_store(url, migration_packages=migration_packages())
    store.schema.want(*installed_parts().values())
    await store.open()
    await store.close()
