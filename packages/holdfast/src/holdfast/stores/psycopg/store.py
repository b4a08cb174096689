"""The PostgreSQL store on psycopg."""

from typing import Any

from holdfast.stores.postgres import PostgresStore
from holdfast.stores.psycopg.drivers import PsycopgDriver, PsycopgThreadDriver

__all__ = ["PsycopgStore", "PsycopgSyncStore"]


class PsycopgStore(PostgresStore):
    """The PostgreSQL store on psycopg's async connections. Takes the options of ``PostgresStore``.

    A handler gets a ``PsycopgTransaction``, whose ``connection`` is psycopg's.
    """

    def __init__(self, url: str, **options: Any) -> None:
        """Check the URL, which may raise ``ConfigurationError``. ``open`` connects."""
        super().__init__(url, driver=PsycopgDriver, **options)


class PsycopgSyncStore(PostgresStore):
    """The PostgreSQL store on psycopg's sync connections. Takes the options of ``PostgresStore``.

    For sync handlers: Flask's, and FastAPI's ``def`` handlers. They get a
    ``PsycopgSyncTransaction``, whose ``connection`` is psycopg's. Statements run in the handler's
    thread; claim and commit in the thread of the request where the framework has one, else in a
    thread of the store, before and after the handler.
    """

    # Sync frameworks need no event loop for this store.
    runs_in_request_thread = True

    def __init__(self, url: str, **options: Any) -> None:
        """Check the URL, which may raise ``ConfigurationError``. ``open`` connects."""
        super().__init__(url, driver=PsycopgThreadDriver, **options)
