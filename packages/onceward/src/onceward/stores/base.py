"""What every store of records has: names, queries, parts of the schema, lists and secrets."""

from abc import abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Generic

from onceward.core.idempotency_record import Record
from onceward.core.table_names import TableNames
from onceward.ports import Params, RecordQuery, Row, TransactionT_co
from onceward.stores.parts import Schema
from onceward.stores.rows import listed_record
from onceward.stores.sql_loader import load_queries
from onceward.stores.sqlite.rows import to_text
from onceward_protocol.storage.migrations import Migration
from onceward_protocol.storage.sql_files import Queries

__all__ = ["BaseStore"]

# The parameters of SQLite's list_records, in the order of PostgreSQL's.
_LIST_NAMES: Final = (
    *("tenant", "endpoint", "key"),
    *("after_at", "after_tenant", "after_endpoint", "after_key", "limit"),
)


class BaseStore(Generic[TransactionT_co]):
    """The part of a store that is the same for all databases and drivers."""

    # The name in logs and in ``/readyz``: ``sqlite`` or ``postgresql``.
    name: str
    # Onceward's statements, with the names that the tables have here.
    sql: Queries

    def __init__(self, name: str, names: TableNames, migrations: Sequence[Migration] = ()) -> None:
        self.name = name
        # True on SQLite, where writers take turns and the primary key decides.
        self.is_sqlite = name == "sqlite"
        # The parts of the schema that are wanted, and those that the database has.
        self.schema = Schema(names, is_sqlite=self.is_sqlite, migrations=migrations)
        self._use_names(names)

    def _use_names(self, names: TableNames) -> None:
        self.table_names = names
        package = "onceward.stores.sqlite" if self.is_sqlite else "onceward.stores.postgres"
        self.sql = load_queries(package, names=names)
        # Functions of PostgreSQL.
        self.claim_function = names.table("claim")
        self.finish_function = names.table("save_record")

    def instant(self, at: datetime) -> Any:
        """Convert an instant to what this database stores."""
        return to_text(at) if self.is_sqlite else at

    @abstractmethod
    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run a query outside any guarded request."""

    @abstractmethod
    async def _list(self, sql: str, values: Any) -> Sequence[Any]:
        """Run one of Onceward's queries and return its rows."""

    async def ping(self) -> None:
        """Run a query."""
        await self.read("SELECT 1 AS one")

    async def secret(self) -> bytes:
        """Return the secret of this database."""
        return bytes((await self.read(self.sql["read_secret"]))[0]["secret"])

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records, newest first, for operators."""
        after = query.after or (None, None, None, None)
        at = None if after[0] is None else self.instant(after[0])
        values: Any = (query.only_tenant, query.endpoint, query.key, at, *after[1:], query.limit)
        if self.is_sqlite:
            values = dict(zip(_LIST_NAMES, values, strict=True))
        rows = await self._list(self.sql["list_records"], values)
        return [listed_record(tuple(row)) for row in rows]

    async def _cache_epoch(self) -> str:
        """Return the value that ``onceward restore`` and ``keys rm`` renew, on SQLite."""
        sql = load_queries("onceward.stores", "records.sql", names=self.table_names)
        return str((await self.read(sql["read_cache_epoch"]))[0]["cache_epoch"])
