"""The base class of stores, with the defaults of optional capabilities."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Generic

from onceward.errors import NoTransactionError, StoreUnavailableError
from onceward.ports import (
    BlockingGate,
    Chunk,
    EpochReading,
    Gate,
    Params,
    RecordQuery,
    Row,
    StoreMetrics,
    TransactionT_co,
)
from onceward.records import AuditEvent, Record
from onceward.stores.parts import Schema
from onceward.stores.rows import listed_record, to_text
from onceward.stores.sql_loader import load_queries
from onceward.stores.table_names import TableNames
from onceward_protocol.storage.migrations import Migration
from onceward_protocol.storage.sql_files import Queries


class BaseUnit:
    """The defaults of what not every unit of work can do."""

    __slots__ = ()

    # True if another request has committed this key since the claim.
    superseded = False
    # Whether the handler uses ``transaction`` without ``await``.
    is_sync = False
    # Whether it has ``commit_after``.
    can_commit_after = False

    @property
    def is_lost(self) -> bool:
        """Whether the connection is known to have been lost while the handler ran."""
        return False

    @property
    def holds_write_lock(self) -> bool:
        """Whether nothing else can write to the database until it has ended."""
        return False

    async def keep_alive(self) -> None:
        """Do nothing: the database does not end an idle transaction, or none is idle for long."""

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:  # noqa: ARG002
        return None

    async def commit_after(self, statement: str) -> None:
        raise NotImplementedError


def ended() -> NoTransactionError:
    """Return the error for a statement or a commit after the end of a unit."""
    return NoTransactionError("the transaction has ended: it was committed or rolled back")


class ItemUnit(BaseUnit):
    """The part of one request of a chunk: from its savepoint to its release, or the rollback."""

    __slots__ = ("_end_item", "_ended", "statements", "transaction")

    def __init__(
        self, end_item: Callable[..., Awaitable[None]], statements: Any, transaction: Any
    ) -> None:
        """``end_item`` releases the savepoint or rolls back to it; ``statements`` can be ended."""
        self._end_item = end_item
        self._ended = False
        self.statements = statements
        self.transaction = transaction

    async def has_written(self) -> bool:
        """Return True: it is not known."""
        return True

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:  # noqa: ARG002
        self._end()
        await self._end_item(is_kept=True)

    async def rollback(self) -> None:
        if not self._ended:
            self._end()
            await self._end_item(is_kept=False)

    def _end(self) -> None:
        self._ended = True
        self.statements.end()


class BaseStore(Generic[TransactionT_co]):
    """The part of a store that is the same for all databases and drivers."""

    # Whether it has one writer at a time, so that other writes give way to requests.
    is_one_writer = False
    # How many requests of a batch share a transaction; 0 if none can.
    chunk_items = 0
    # Whether sync frameworks need no event loop for it.
    runs_in_request_thread = False
    # Whether it is on the app's own connection pool.
    is_gated = False
    # Whether transactions are sessions of the app, so that a request can share one.
    has_sessions = False
    # Whether it shares the session that a sync app has in the thread of a request.
    has_thread_sessions = False
    # Whether it reads if its database is replicated.
    knows_durability = False

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
    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement in its own transaction and return its rows, if it has any."""

    @abstractmethod
    async def _list(self, sql: str, values: Any) -> Sequence[Any]:
        """Run one of Onceward's queries and return its rows."""

    async def ping(self) -> None:
        await self.read("SELECT 1 AS one")

    async def secret(self) -> bytes:
        """Return the secret of this database."""
        return bytes((await self.read(self.sql["read_secret"]))[0]["secret"])

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records, newest first, for operators."""
        after = query.after or (None, None, None, None)
        at = None if after[0] is None else self.instant(after[0])
        values = (query.only_tenant, query.endpoint, query.key, at, *after[1:], query.limit)
        rows = await self._list(self.sql["list_records"], values)
        return [listed_record(tuple(row)) for row in rows]

    async def read_epoch(self) -> EpochReading:
        """Read the epoch, as far as the database has one."""
        return EpochReading("", await self._cache_epoch())

    async def _cache_epoch(self) -> str:
        """Return the value in the database that ``onceward restore`` and ``keys rm`` renew."""
        sql = load_queries("onceward.stores", "records.sql", names=self.table_names)
        return str((await self.read(sql["read_cache_epoch"]))[0]["cache_epoch"])

    async def _newest_record(self) -> datetime | None:
        """Return when the record that was inserted last was created, on SQLite."""
        sql = load_queries("onceward.stores", "records.sql", names=self.table_names)
        rows = await self.read(sql["read_newest_record"])
        return datetime.fromisoformat(rows[0]["created_at"]) if rows else None

    def report_to(self, metrics: StoreMetrics) -> None:
        """Do nothing: no caller waits for a connection."""

    def report_epochs(self, report: Callable[[EpochReading], None]) -> None:
        """Do nothing: connections do not tell which database they have reached."""

    # -- what not every store can do --------------------------------------------------------

    async def write_unless_busy(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Do as ``write``: other writers do not wait."""
        return await self.write(sql, params)

    @property
    def max_chunks(self) -> int:
        return 1

    async def begin_chunk(self, *, has_savepoints: bool = True) -> Chunk:
        raise NotImplementedError

    @property
    def gate(self) -> Gate | None:
        """None: it has a pool of its own."""
        return None

    @property
    def thread_gate(self) -> BlockingGate | None:
        return None

    def new_session(self) -> Any:
        raise NotImplementedError

    async def release_session(self, session: Any) -> bool:
        raise NotImplementedError

    async def close_session(self, session: Any) -> None:
        raise NotImplementedError

    def outage_of(self, session: Any, error: Exception) -> StoreUnavailableError | None:
        raise NotImplementedError

    async def release_connection(self) -> None:
        """Do nothing: a sync app has no session of this store."""

    @property
    def is_replicated(self) -> bool | None:
        """Whether acknowledged commits outlive the loss of the server; None if unknown."""
        return None

    async def read_durability(self) -> None:
        """Do nothing: it is unknown."""

    def require_durability(self) -> None:
        raise NotImplementedError
