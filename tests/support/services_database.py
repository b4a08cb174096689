"""The PostgreSQL database of all services: migrated once, emptied for each test."""

from holdfast import open_store
from holdfast.services.catalogue import rooms

__all__ = ["migrate"]


async def migrate(url: str) -> None:
    """Make everyone's tables."""
    store = open_store(url, rooms=rooms())
    await store.open()
    await store.close()
