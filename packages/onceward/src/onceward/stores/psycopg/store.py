"""The PostgreSQL store on psycopg."""

from typing import Unpack

from onceward.stores.postgres.store import BasePostgresStore, PostgresOptions
from onceward.stores.psycopg.drivers import (
    PsycopgDriver,
    PsycopgSyncTransaction,
    PsycopgThreadDriver,
    PsycopgTransaction,
)


class PsycopgStore(BasePostgresStore[PsycopgTransaction]):
    """The PostgreSQL store on psycopg's async connections. Takes the options of ``PostgresStore``.

    A handler gets a ``PsycopgTransaction``, whose ``connection`` is psycopg's.
    """

    def __init__(self, url: str, **options: Unpack[PostgresOptions]) -> None:
        """Check the URL, which may raise ``ConfigurationError``. ``open`` connects."""
        super().__init__(url, driver=PsycopgDriver, **options)


class PsycopgSyncStore(BasePostgresStore[PsycopgSyncTransaction]):
    """The PostgreSQL store on psycopg's sync connections. Takes the options of ``PostgresStore``.

    For sync handlers: Flask's, and FastAPI's ``def`` handlers. They get a
    ``PsycopgSyncTransaction``, whose ``connection`` is psycopg's. Statements run in the handler's
    thread; claim and commit in the thread of the request where the framework has one, else in a
    thread of the store, before and after the handler.
    """

    # Sync frameworks need no event loop for this store.
    runs_in_request_thread = True
    # Its statements are not seen to fail, so that no request could be undone alone.
    chunk_items = 0

    def __init__(self, url: str, **options: Unpack[PostgresOptions]) -> None:
        """Check the URL, which may raise ``ConfigurationError``. ``open`` connects."""
        super().__init__(url, driver=PsycopgThreadDriver, **options)
