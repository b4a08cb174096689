"""Two real PostgreSQL servers, a primary and its standby, for tests of failovers.

::

    with RealPostgresPair() as pair:
        url = pair.create_database()  # names both servers
        pair.kill_primary()  # SIGKILL
        pair.fail_over()  # the standby is the primary now
        pair.rewind()  # the old primary follows it

Replication is synchronous: a commit is acknowledged when both servers have it on disk. From
``fail_over`` until ``rewind`` the new primary is alone and acknowledges by itself, as under an HA
manager that prefers availability (Patroni's ``synchronous_mode``). What it acknowledged in that
time is on one server only, so fail over to the other one only after ``rewind``. With
``fail_over(alone=False)`` it waits for the other one instead (``synchronous_mode_strict``).

The two servers reach each other through links of their own, so ``cut_network`` separates them while
clients still reach both.
"""

import os
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from onceward_testing.network_link import NetworkLink
from onceward_testing.server_process import HOST
from onceward_testing.servers import RealPostgres

__all__ = ["PairedPostgres", "RealPostgresPair"]

# Includes a copy of all data on a busy machine.
_WAIT_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.02
# So that a standby can follow after an absence; one that cannot gets a new copy from ``rewind``.
_WAL_KEEP_SIZE: Final = "128MB"


class PairedPostgres(RealPostgres):
    """One server of a pair, with ``fsync`` on in both roles.

    Its settings are in a file of its own: ``pg_rewind`` replaces all files of the data directory by
    those of the other server.
    """

    def __init__(self, name: str) -> None:
        """``name`` is its ``cluster_name``, and its ``application_name`` as a standby."""
        super().__init__()
        # Its ``cluster_name`` and ``application_name``.
        self.name = name
        # Where the other server connects to this one.
        self.link = NetworkLink(self.port)
        self._source: PairedPostgres | None = None
        self._required_standby = ""
        self._syncs = False

    def start(self) -> None:
        """Start and wait until it responds. Does nothing if it is running."""
        if self.pid is not None:
            return
        # After a crash PostgreSQL would first sync all files of the data directory, which takes
        # seconds on a busy disk. The machine has not crashed: nothing of them can be missing.
        self._syncs = False
        if self.has_files:
            self._write_settings()
        super().start()
        self._syncs = True
        self._write_settings()
        self._reload()

    def query(self, sql: str) -> str:
        """Return the values of a statement, separated by ``|`` and line breaks."""
        return self._psql(sql)

    def start_as_standby_of(self, primary: "PairedPostgres") -> None:
        """Start and follow the primary; the first start makes a copy of its data."""
        self._source = primary
        self._required_standby = ""
        if self.has_files:
            self._mark_as_standby()
        self.start()

    def require_standby(self, name: str) -> None:
        """Acknowledge commits only once this standby has them on disk; empty for none."""
        self._required_standby = name
        self._write_settings()
        self._reload()

    def rewind_to(self, primary: "PairedPostgres") -> None:
        """Undo what this stopped server has and the primary has not."""
        self.run(
            "pg_rewind",
            f"--target-pgdata={self._data}",
            f"--source-server={primary.connection_of(self)} dbname=postgres",
            f"--config-file={self._settings_file}",
            "--no-sync",
        )

    def copy_from(self, primary: "PairedPostgres") -> None:
        """Replace the data of this stopped server by a copy of the primary's."""
        shutil.rmtree(self._data)
        self._copy_data(primary.connection_of(self))

    def connection_of(self, other: "PairedPostgres") -> str:
        """Return how the other server connects to this one."""
        return f"host={HOST} port={self.link.port} user=postgres application_name={other.name}"

    def flush(self) -> None:
        """Write all WAL to disk, so that a standby can get it."""
        sql = "SET synchronous_commit = local; SELECT pg_logical_emit_message(true, 'flush', '')"
        self._psql(sql)

    def _reload(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGHUP)

    @property
    def _settings_file(self) -> Path:
        return self.directory / "pair.conf"

    def _command(self) -> list[str]:
        return [*super()._command(), "-c", f"config_file={self._settings_file}"]

    def _init_data(self) -> None:
        if self._source is None:
            super()._init_data()
        else:
            self._copy_data(self._source.connection_of(self))
            self._mark_as_standby()

    def _copy_data(self, source: str) -> None:
        options = ("--no-sync", "--checkpoint=fast")
        self.run("pg_basebackup", "-D", str(self._data), "-d", source, *options)

    def _mark_as_standby(self) -> None:
        mark = self._data / "standby.signal"
        mark.touch()
        self._found.chown(mark)

    def _write_settings(self) -> None:
        self._settings_file.write_text("\n".join(self._settings()) + "\n")

    def _settings(self) -> list[str]:
        settings = [
            *super()._settings(),
            f"fsync = {'on' if self._syncs else 'off'}",
            f"cluster_name = '{self.name}'",
            "wal_log_hints = on",  # for pg_rewind, where the data has no checksums
            f"wal_keep_size = {_WAL_KEEP_SIZE}",
            "min_wal_size = 32MB",  # pg_rewind copies the WAL files that are kept for reuse, too
            "wal_retrieve_retry_interval = 100ms",
            f"synchronous_standby_names = '{self._required_standby}'",
        ]
        if self._source is not None:
            settings.append(f"primary_conninfo = '{self._source.connection_of(self)}'")
        return settings


class RealPostgresPair:
    """A primary and its standby. The methods block until what they do is done; not thread-safe.

    ``primary`` and ``standby`` say which is which; ``fail_over`` exchanges them.
    """

    def __init__(self, *, synchronous: bool = True) -> None:
        """``synchronous=False``: commits do not wait for the standby, and a failover loses some."""
        # Whether commits wait for the standby.
        self.synchronous = synchronous
        self._servers = (PairedPostgres("onceward_a"), PairedPostgres("onceward_b"))
        # The server that takes writes, or did until it was lost.
        self.primary = self._servers[0]
        # The server that follows it, or will after ``rewind``.
        self.standby = self._servers[1]
        self._is_in_sync = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def url(self, database: str = "postgres") -> str:
        """Return the URL for clients. It names both servers, and stays the same in a failover."""
        hosts = ",".join(f"{HOST}:{server.port}" for server in self._servers)
        return f"postgresql://postgres@{hosts}/{database}?target_session_attrs=read-write"

    def create_database(self, prefix: str = "onceward") -> str:
        """Create an empty database with a unique name and return its URL."""
        name = urlsplit(self.primary.create_database(prefix)).path[1:]
        if self.standby.pid is not None and not self.standby.is_frozen:
            # A client that asks the standby first must not hear that the database does not exist.
            end = self.primary.query("SELECT pg_current_wal_flush_lsn()")
            self._wait_for(f"replay_lsn >= '{end}'")
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database of ``create_database``, and close all connections to it."""
        self.primary.drop_database(url)

    def start(self) -> None:
        """Start the primary, copy it, and start the standby. Only for a new pair."""
        try:
            for server in self._servers:
                server.link.start()
            self.primary.start()
            self.standby.start_as_standby_of(self.primary)
            self._wait_for_standby()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill both servers and remove their files. Idempotent."""
        for server in self._servers:
            try:
                server.close()
            finally:
                server.link.close()

    @property
    def is_in_sync(self) -> bool:
        """Whether the primary acknowledges nothing that the standby does not have.

        Only then can the standby be promoted without loss. False while the primary is alone after
        a failover, and always with ``synchronous=False``.
        """
        return self._is_in_sync

    def kill_primary(self) -> None:
        """Send SIGKILL to the primary and all its backends."""
        self.primary.kill()

    def kill_standby(self) -> None:
        """Send SIGKILL to the standby; with synchronous replication, commits wait for it then."""
        self.standby.kill()

    def start_primary(self) -> None:
        """Start a primary that was killed, as a primary."""
        self.primary.start()

    def start_standby(self) -> None:
        """Start a standby that was killed, and wait until it has all that was acknowledged."""
        self.standby.start_as_standby_of(self.primary)
        self._wait_for_standby()

    def freeze_primary(self) -> None:
        """Send SIGSTOP to the primary and all its backends: clients get no response."""
        self.primary.freeze()

    def thaw(self) -> None:
        """Let a frozen server continue, which after ``fail_over`` is the old primary.

        It still believes that it is the primary. With synchronous replication it can acknowledge
        nothing, because no standby follows it.
        """
        for server in self._servers:
            server.thaw()

    def cut_network(self) -> None:
        """Let nothing pass between the two servers; clients still reach both."""
        for server in self._servers:
            server.link.cut()

    def heal_network(self) -> None:
        """Connect the two servers again."""
        for server in self._servers:
            server.link.heal()

    def fail_over(self, *, alone: bool = True) -> None:
        """Promote the standby, and exchange ``primary`` and ``standby``.

        The old primary is neither stopped nor asked. With ``alone=False`` the new primary
        acknowledges no commit before ``rewind``.
        """
        new, old = self.standby, self.primary
        if new.pid is None:
            raise RuntimeError(f"{new.name} is not running, so it cannot be promoted")
        if self.synchronous and not alone:
            new.require_standby(old.name)
        self._is_in_sync = False
        new.promote()
        self.primary, self.standby = new, old

    def rewind(self) -> str | None:
        """Make the old primary the standby of the new one, and wait until it has everything.

        It is killed if it is still running. Returns None, or why ``pg_rewind`` could not do it; all
        data was copied then.
        """
        reason = None
        self.standby.kill()
        try:
            self.standby.rewind_to(self.primary)
        except RuntimeError as error:
            reason = str(error)
            self.standby.copy_from(self.primary)
        # The standby responds once it has all WAL that the primary had written at this point.
        self.primary.flush()
        self.start_standby()
        return reason

    def log_tail(self) -> str:
        """Return the last lines of both logs."""
        return "\n\n".join(
            f"{server.name}:\n{server.log_tail()}" for server in self._servers if server.has_files
        )

    def _wait_for_standby(self) -> None:
        """Wait until the standby has what was acknowledged so far, and let commits wait for it."""
        name, expected = self.standby.name, "async"
        if self.synchronous:
            expected = "sync"
            self.primary.require_standby(name)
        self._wait_for(f"state = 'streaming' AND sync_state = '{expected}'")
        # The checkpointer is the process that lets commits wait. It reads new settings before it
        # begins a checkpoint, so whatever was acknowledged without waiting is before this position.
        self.primary.query("CHECKPOINT")
        end = self.primary.query("SELECT pg_current_wal_flush_lsn()")
        self._wait_for(f"flush_lsn >= '{end}'")
        self._is_in_sync = self.synchronous

    def _wait_for(self, condition: str) -> None:
        """Wait until the primary's view of its standby meets the condition."""
        sql = (
            "SELECT count(*) FROM pg_stat_replication"  # noqa: S608 - text of this module only
            f" WHERE application_name = '{self.standby.name}' AND {condition}"
        )
        deadline = time.monotonic() + _WAIT_SECONDS
        while self.primary.query(sql) == "0":
            if self.standby.pid is None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.standby.name} does not follow {self.primary.name}; their logs:\n"
                    f"{self.log_tail()}"
                )
            time.sleep(_POLL_SECONDS)
