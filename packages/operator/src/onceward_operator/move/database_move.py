"""The steps of a move: migrate the target and check everything, copy, verify, switch.

The first step is one transaction, so a refused move changes nothing. A move can be killed at any
point and run again. Each batch of rows commits together with its progress in the target. From its
start, both databases carry a mark that keeps servers from starting
on them; the end removes the target's mark, and the source keeps its own::

    target: migrated, marked ─▶ rows, batch by batch ─▶ verified, mark removed
    source:             marked "moving" ────────────────────────────────────▶ marked "moved"
"""

import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Final
from uuid import uuid4

import asyncpg

from onceward.errors import ConfigurationError, StoreError
from onceward.ports import FaultPoints
from onceward.stores.factory import migrations_for
from onceward.stores.parts import GUARD, MIGRATION_LOCK, Part, Schema, installed_parts
from onceward.stores.postgres.asyncpg_driver import AsyncpgDriver
from onceward.stores.table_names import DEFAULT_PREFIX, TableNames
from onceward_operator.move.source import Source, SourceMark
from onceward_operator.move.target import MoveState, Target, TargetTable, connect
from onceward_operator.move.values import RowHash, converter_for, milliseconds
from onceward_protocol.storage.migrations import run_steps_async

__all__ = ["FAULT_POINTS", "DatabaseMove", "MoveReport", "MovedTable", "undo_move"]

# Where tests kill the process.
FAULT_POINTS: Final = (
    "after_migration",
    "after_target_marked",
    "after_source_marked",
    "before_batch_commit",
    "after_batch",
    "after_copy",
    "after_verification",
    "after_target_finished",
)
# Rows per transaction. A killed move repeats at most one batch.
_BATCH: Final = 5_000
_FETCH: Final = 1_000

# Errors of one row: by PostgreSQL, or by its driver.
_REFUSED_ROW: Final = (
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.DataError,
    OverflowError,
    ValueError,
)

# Where PostgreSQL says which row of a batch it refuses.
_LINE: Final = re.compile(r"^COPY .*, line (\d+)", re.MULTILINE)

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class MovedTable:
    """The verification of one table: rows and hash on both sides."""

    table: str
    rows: int
    hash: str
    target_rows: int
    target_hash: str

    @property
    def is_equal(self) -> bool:
        """Whether both sides have the same rows."""
        return (self.rows, self.hash) == (self.target_rows, self.target_hash)


@dataclass(frozen=True, slots=True)
class MoveReport:
    """The result of a move. ``was_finished`` if an earlier run had finished it already."""

    tables: tuple[MovedTable, ...]
    not_moved: tuple[str, ...]
    was_resumed: bool = False
    was_finished: bool = False

    @property
    def is_verified(self) -> bool:
        """Whether every table is equal on both sides."""
        return all(table.is_equal for table in self.tables)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One table to copy: its name in the source, its columns, and how to convert them."""

    source: str
    target: TargetTable
    # In the order of the source; the names in both databases.
    source_columns: tuple[str, ...]
    columns: tuple[str, ...]
    converters: tuple[Callable[[Any], Any], ...]
    # Rows refer to other rows of the table: they have to be copied in one statement.
    refers_to_itself: bool = False

    @property
    def types(self) -> list[str]:
        return [self.target.columns[name].type for name in self.columns]

    def rows(self, source: Source, *, skip: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield the rows as PostgreSQL's driver takes them; raises ``ConfigurationError``."""
        rows = source.rows(self.source, self.source_columns, skip=skip)
        for position, row in enumerate(rows, skip):
            converted = []
            for name, convert, value in zip(self.columns, self.converters, row, strict=True):
                try:
                    converted.append(convert(value))
                except ValueError as error:
                    shown = self.target.columns[name].shown_type
                    raise ConfigurationError(
                        f"table {self.source}, column {name}, row "
                        f"{source.key_of(self.source, position)}: the value does not fit the type "
                        f"{shown} of the target: {error}"
                    ) from error
            yield tuple(converted)


class DatabaseMove:
    """Moves the tables of one SQLite file to one PostgreSQL database."""

    def __init__(
        self,
        source: str,
        target_url: str,
        *,
        tables: Sequence[str] | None = None,
        restart: bool = False,
        migration_packages: Sequence[tuple[str, str]] = (),
        table_prefix: str = DEFAULT_PREFIX,
        target_prefix: str | None = None,
        target_schema: str | None = None,
        shown_target: str = "PostgreSQL",
        on_progress: OnProgress = lambda _table, _done, _total: None,
        faults: FaultPoints | None = None,
        batch: int = _BATCH,
    ) -> None:
        """``source`` is the path of the file. ``tables`` are those of the app to move as well.

        With ``tables`` None the move is refused if the app has tables in the file. ``restart``
        deletes what an unfinished move has copied. ``shown_target`` is the target without
        password, for messages and for the mark in the source.
        """
        self._path = source
        self._url = target_url
        self._tables = tables
        self._restart = restart
        self._packages = migration_packages
        self._prefix = table_prefix
        self._target_names = TableNames.chosen(target_prefix, target_schema, is_sqlite=False)
        self._shown_target = shown_target
        self._on_progress = on_progress
        self._faults = faults
        self._batch = batch

    async def run(self) -> MoveReport:
        """Move and verify. Raises ``ConfigurationError`` with nothing changed, or ``StoreError``.

        A report that is not verified leaves both databases marked: servers start on neither.
        """
        with self._source() as source:
            moved, not_moved = self._choose(source)
            async with self._connected() as connection:
                return await self._run(source, connection, moved, not_moved)

    async def plan(self) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return the tables that would be moved with their rows, and those that would not.

        Raises what ``run`` would raise before it copies, and changes nothing.
        """
        with self._source() as source:
            moved, not_moved = self._choose(source)
            async with self._connected() as connection:
                tables = await self._planned(source, connection, moved)
            return {name: source.count(name) for name in tables}, tuple(not_moved)

    # -- connections ----------------------------------------------------------------------------

    @contextmanager
    def _source(self) -> Iterator[Source]:
        with Source(self._path, table_prefix=self._prefix) as source:
            self._check_version(source)
            try:
                yield source
            except sqlite3.Error as error:
                raise StoreError(f"cannot read {self._path}: {error}") from error

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        connection = await connect(self._url)
        try:
            yield connection
        except (asyncpg.PostgresError, *AsyncpgDriver.outages) as error:
            raise StoreError(f"PostgreSQL has failed a statement: {error}") from error
        finally:
            await connection.close(timeout=5)

    # -- checks ---------------------------------------------------------------------------------

    def _check_version(self, source: Source) -> None:
        known = [
            *(m for part in _parts_of(source) for m in part.migrations(is_sqlite=True)),
            *migrations_for("sqlite", self._packages),
        ]
        namespaces = {GUARD.name, *(namespace for namespace, _ in source.applied)}
        missing = {m.id for m in known if m.namespace in namespaces} - source.applied
        unknown = {
            found
            for found in source.applied - {m.id for m in known}
            if found[0] in {m.namespace for m in known}
        }
        if unknown:
            raise ConfigurationError(
                f"{self._path} was migrated by a newer version: upgrade Onceward, then move"
            )
        if missing:
            raise ConfigurationError(
                f"{self._path} does not have this version's tables: "
                f"run onceward migrate --database sqlite:///{self._path}"
            )

    def _choose(self, source: Source) -> tuple[list[tuple[str, str | None]], list[str]]:
        """Return the tables to move, as (source, core name in the target), and the others."""
        core = source.core_tables()
        registered = source.tables_of(migrations_for("sqlite", self._registered(source)))
        of_app = source.other_tables([*core, *registered])
        chosen = of_app if self._tables == ["all"] else self._tables
        if chosen is None:
            if of_app:
                raise ConfigurationError(
                    f"{self._path} has tables of your app: {', '.join(of_app)}. Create them in the "
                    f"target and give --tables {','.join(of_app)} (or all) to move their rows, or "
                    "--tables none to move only Onceward's"
                )
            chosen = []
        chosen = list(dict.fromkeys(chosen))
        unknown = [name for name in chosen if name not in of_app]
        if unknown:
            raise ConfigurationError(f"{self._path} has no table {', '.join(unknown)} of your app")
        moved: list[tuple[str, str | None]] = [*core.items()]
        moved += [(name, None) for name in (*registered, *chosen)]
        return moved, [name for name in of_app if name not in chosen]

    def _registered(self, source: Source) -> list[tuple[str, str]]:
        applied = {namespace for namespace, _ in source.applied}
        return [pair for pair in self._packages if pair[0] in applied]

    # -- steps ----------------------------------------------------------------------------------

    async def _run(
        self,
        source: Source,
        connection: Any,
        moved: Sequence[tuple[str, str | None]],
        not_moved: Sequence[str],
    ) -> MoveReport:
        target = Target(connection, self._target_names)
        state, mark, is_continued = await self._progress(source, target)
        if state and mark and is_continued:
            if state.is_finished:
                source.set_mark(SourceMark(mark.move_id, mark.target, is_finished=True))
                return _finished(state, not_moved)
            target = await self._opened(connection)
            copies = await self._copies(source, target, moved)
            return await self._finish(source, target, copies, state, not_moved)
        mark = SourceMark(uuid4().hex, self._shown_target, is_finished=False)
        async with connection.transaction():
            target, copies = await self._prepare(source, connection, moved, state)
            await target.begin(mark.move_id, self._path, [copy.source for copy in copies])
        await self._reach("after_target_marked")
        source.set_mark(mark)
        await self._reach("after_source_marked")
        begun = await target.state()
        assert begun is not None  # noqa: S101 - it was just written
        return await self._finish(source, target, copies, begun, not_moved)

    async def _planned(
        self, source: Source, connection: Any, moved: Sequence[tuple[str, str | None]]
    ) -> list[str]:
        """Run the checks in a transaction that is rolled back; return the tables in order."""
        state, _, is_continued = await self._progress(
            source, Target(connection, self._target_names)
        )
        if state and is_continued and state.is_finished:
            return list(state.copied)
        transaction = connection.transaction()
        await transaction.start()
        try:
            if state and is_continued:
                copies = await self._copies(source, await self._opened(connection), moved)
                _refuse_other_tables(copies, state)
                _check_values(source, copies)
            else:
                _, copies = await self._prepare(source, connection, moved, state)
        finally:
            await transaction.rollback()
        return [copy.source for copy in copies]

    async def _progress(
        self, source: Source, target: Target
    ) -> tuple[MoveState | None, SourceMark | None, bool]:
        """Return the marks of both databases, and whether it is a move to continue.

        Raises ``ConfigurationError`` for another move that is in the way.
        """
        await target.lock()
        state, mark = await target.state(), source.mark()
        is_same = state is not None and mark is not None and state.move_id == mark.move_id
        if state and is_same and (state.is_finished or not self._restart):
            return state, mark, True
        self._refuse_other_move(state, mark)
        await target.refuse_connected_servers()
        return state, mark, False

    async def _prepare(
        self,
        source: Source,
        connection: Any,
        moved: Sequence[tuple[str, str | None]],
        state: MoveState | None,
    ) -> tuple[Target, list[_Copy]]:
        """Migrate the target, check everything, delete what an unfinished move has copied.

        Runs in a transaction: the caller commits or rolls back. Raises ``ConfigurationError``.
        """
        # The values of a large source take longer to check than a server may allow.
        await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        if state is not None:  # of an unfinished move, which held servers off
            await Target(connection, self._target_names).allow_servers()
        target = await self._migrate(source, connection)
        await self._reach("after_migration")
        copies = await self._copies(source, target, moved)
        copied = {} if state is None else state.copied
        core_names = dict(moved)
        foreign, deleted = [], []
        for copy in reversed(copies):
            if not await target.has_rows(copy.target):
                continue
            # A target that was migrated before has one secret, and a new move replaces it.
            is_secret = state is None and core_names[copy.source] == "secret"
            ours = 1 if is_secret else copied.get(copy.source, 0)
            if ours:
                await target.lock_table(copy.target)
            if await target.has_rows(copy.target, beyond=ours):
                foreign.append(copy.target.name)
            else:
                deleted.append(copy.target)
        _refuse_rows(reversed(foreign))
        referring = await target.filled_references(deleted, [copy.target for copy in copies])
        _refuse_rows(referring)
        _check_values(source, copies)
        await target.delete_rows(deleted)
        return target, copies

    def _refuse_other_move(self, state: MoveState | None, mark: SourceMark | None) -> None:
        if state is not None and state.is_finished:
            raise ConfigurationError(
                f"the target holds the result of an earlier move, from {state.source}: "
                "choose an empty database"
            )
        if mark is not None and not self._restart:
            raise ConfigurationError(
                f"{self._path} {'was' if mark.is_finished else 'is being'} moved to {mark.target}: "
                "finish that move with the same --to, or end it with onceward move --undo "
                f"--from sqlite:///{self._path}"
            )
        # Before the source is marked nothing is copied, and the move may begin again.
        if state is not None and any(state.copied.values()) and not self._restart:
            raise ConfigurationError(
                f"the target holds a part of another move, from {state.source}: give --restart to "
                "delete that part and copy everything again"
            )

    async def _migrate(self, source: Source, connection: Any) -> Target:
        """Bring the target's tables up to date, inside the transaction of the caller."""
        schema = Schema(
            self._target_names,
            is_sqlite=False,
            migrations=migrations_for("postgres", self._registered(source)),
        )
        migration = schema.migration(*_parts_of(source))
        await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)
        await run_steps_async(migration.apply(), _executing(connection))
        return Target(connection, migration.names)

    async def _opened(self, connection: Any) -> Target:
        """Return the target with the names that its tables have."""
        migration = Schema(self._target_names, is_sqlite=False).migration()
        await run_steps_async(migration.read(), _executing(connection))
        return Target(connection, migration.names)

    async def _copies(
        self, source: Source, target: Target, moved: Sequence[tuple[str, str | None]]
    ) -> list[_Copy]:
        copies = []
        for name, core_name in moved:
            wanted = name if core_name is None else target.table_name(core_name)
            found = await target.find(wanted)
            if found is None:
                raise ConfigurationError(
                    f"the target has no table {wanted}: create it with your app's migrations first"
                )
            copies.append(_copy_of(name, source, found, is_core=core_name is not None))
        return await _in_order(target, copies)

    async def _finish(
        self,
        source: Source,
        target: Target,
        copies: Sequence[_Copy],
        state: MoveState,
        not_moved: Sequence[str],
    ) -> MoveReport:
        _refuse_other_tables(copies, state)
        for copy in copies:
            await self._copy(source, target, copy, done=state.copied[copy.source])
        await self._reach("after_copy")
        for copy in copies:
            await _continue_sequences(source, target, copy)
            await target.connection.execute(f"ANALYZE {copy.target.sql}")
        moved = [await self._verify(source, target, copy) for copy in copies]
        report = MoveReport(tuple(moved), tuple(not_moved), was_resumed=any(state.copied.values()))
        await self._reach("after_verification")
        if not report.is_verified:
            return report
        async with target.connection.transaction():
            await target.finish({table.table: asdict(table) for table in moved})
        await self._reach("after_target_finished")
        source.set_mark(SourceMark(state.move_id, self._shown_target, is_finished=True))
        return report

    async def _copy(self, source: Source, target: Target, copy: _Copy, *, done: int) -> None:
        total = source.count(copy.source)
        rows = copy.rows(source, skip=done)
        batch = max(total, 1) if copy.refers_to_itself else self._batch
        while done < total:
            counted = _Counted(islice(rows, batch))
            async with target.connection.transaction():
                try:
                    await target.copy(copy.target, copy.columns, counted)
                except _REFUSED_ROW as error:
                    line = _LINE.search(getattr(error, "context", None) or "")
                    key = source.key_of(copy.source, done + int(line[1]) - 1) if line else ""
                    raise ConfigurationError(
                        f"table {copy.source}{key and f', row {key}'}: PostgreSQL refuses a row: "
                        f"{' '.join(str(error).split())}"
                    ) from error
                await self._reach("before_batch_commit")
                await target.set_copied(copy.source, done + counted.rows)
            done += counted.rows
            self._on_progress(copy.source, done, total)
            await self._reach("after_batch")

    async def _verify(self, source: Source, target: Target, copy: _Copy) -> MovedTable:
        ours, theirs = RowHash(copy.types), RowHash(copy.types)
        for row in copy.rows(source):
            ours.add(row)
        columns = ", ".join(f'"{name}"' for name in copy.columns)
        async with target.connection.transaction(readonly=True):
            query = f"SELECT {columns} FROM {copy.target.sql}"  # noqa: S608
            async for row in target.connection.cursor(query, prefetch=_FETCH):
                theirs.add(row)
        return MovedTable(copy.source, ours.rows, ours.hexdigest(), theirs.rows, theirs.hexdigest())

    async def _reach(self, point: str) -> None:
        if self._faults is not None:
            await self._faults.reach(point)


class _Counted:
    """Counts the rows that are taken from an iterator."""

    def __init__(self, rows: Iterator[Any]) -> None:
        self._source = rows
        self.rows = 0

    def __iter__(self) -> Iterator[Any]:
        for row in self._source:
            self.rows += 1
            yield row


def undo_move(path: str, *, table_prefix: str = DEFAULT_PREFIX) -> SourceMark | None:
    """Allow servers to start on the source again; return the mark that was removed, if any."""
    with Source(path, table_prefix=table_prefix) as source:
        mark = source.mark()
        if mark is not None:
            source.set_mark(None)
        return mark


def _refuse_rows(full: Iterable[str]) -> None:
    names = list(full)
    if names:
        raise ConfigurationError(
            f"the target is not empty, it has rows in {', '.join(names)}: choose an empty database"
        )


def _refuse_other_tables(copies: Sequence[_Copy], state: MoveState) -> None:
    missing = {copy.source for copy in copies} ^ set(state.copied)
    if missing:
        raise ConfigurationError(
            f"the unfinished move was begun with other tables ({', '.join(sorted(missing))}): "
            "give the same --tables, or --restart to begin again"
        )


def _check_values(source: Source, copies: Sequence[_Copy]) -> None:
    """Convert every row, so that a value that does not fit is found before anything changes."""
    for copy in copies:
        for _ in copy.rows(source):
            pass


def _finished(state: MoveState, not_moved: Sequence[str]) -> MoveReport:
    tables = tuple(MovedTable(**result) for result in state.results.values())
    return MoveReport(tables, tuple(not_moved), was_finished=True)


def _copy_of(name: str, source: Source, target: TargetTable, *, is_core: bool) -> _Copy:
    pairs = []
    for column in source.columns(name):
        found = target.columns.get(column) or target.columns.get(column.lower())
        if found is None:
            raise ConfigurationError(
                f"the target's table {target.name} has no column {column}: add it there, or remove "
                "it from the source"
            )
        if not found.is_computed:
            pairs.append((column, found))
    given = {found.name for _, found in pairs}
    needed = [c.name for c in target.columns.values() if c.is_required and c.name not in given]
    if needed:
        raise ConfigurationError(
            f"the target's table {target.name} requires {', '.join(needed)}, which {name} of the "
            "source does not have"
        )
    converters = []
    for _, found in pairs:
        convert = converter_for(found.type, found.stored_type)
        if convert is None:
            raise ConfigurationError(
                f"the target's column {target.name}.{found.name} has the type {found.shown_type}, "
                "which cannot be converted from SQLite: leave the table out of --tables and copy "
                "it with your own script"
            )
        if is_core and found.type == "timestamptz":
            convert = _time_of_core(convert)
        converters.append(convert)
    return _Copy(
        source=name,
        target=target,
        source_columns=tuple(column for column, _ in pairs),
        columns=tuple(found.name for _, found in pairs),
        converters=tuple(converters),
    )


def _time_of_core(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a converter for both: times of records are text, those of jobs are numbers."""
    return lambda value: milliseconds(value) if isinstance(value, int) else convert(value)


async def _in_order(target: Target, copies: Sequence[_Copy]) -> list[_Copy]:
    """Sort tables so that each comes after those it refers to."""
    keys = await target.foreign_keys([copy.target for copy in copies])
    waiting = {copy.target.oid: copy for copy in copies}
    ordered: list[_Copy] = []
    while waiting:
        free = [
            copy
            for oid, copy in waiting.items()
            if not any(
                child == oid and parent in waiting and parent != oid for child, parent in keys
            )
        ]
        if not free:
            names = ", ".join(copy.target.name for copy in waiting.values())
            raise ConfigurationError(
                f"the tables {names} refer to each other in a circle: drop one of their foreign "
                "keys during the move"
            )
        for copy in free:
            del waiting[copy.target.oid]
            refers = (copy.target.oid, copy.target.oid) in keys
            ordered.append(replace(copy, refers_to_itself=refers))
    return ordered


async def _continue_sequences(source: Source, target: Target, copy: _Copy) -> None:
    for column in copy.target.columns.values():
        if column.sequence is not None:
            await target.set_sequence(copy.target, column, source.last_number(copy.source))


def _parts_of(source: Source) -> list[Part]:
    """Return the parts that the source has."""
    present = {GUARD.name, *(namespace for namespace, _ in source.applied)}
    return [part for name, part in installed_parts().items() if name in present]


def _executing(connection: Any) -> Callable[[str, tuple[Any, ...]], Awaitable[Sequence[Any]]]:
    async def execute(sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
        rows: Sequence[Any] = await connection.fetch(sql, *values)
        return rows

    return execute
