"""Tables that are distributed over the nodes of Citus by tenant.

The functions yield statements and get their rows, like those of ``onceward.stores.parts``;
they do no I/O. All statements run in one transaction on the coordinator.
"""

from collections.abc import Iterable
from typing import Final

from onceward.errors import ConfigurationError
from onceward.stores.table_names import TableNames
from onceward_protocol.storage.migrations import Steps

# Whether the extension is installed in the database.
IS_CITUS: Final = "SELECT to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL"

_LOCAL_GROUP: Final = "SELECT groupid FROM pg_dist_local_group"
_COORDINATOR: Final = 0
_KNOWN_COORDINATOR: Final = "SELECT 1 FROM pg_dist_node WHERE groupid = 0"
# Several tables or functions may be created in one transaction only if Citus uses one connection to
# each node.
SEQUENTIAL: Final = "SET LOCAL citus.multi_shard_modify_mode TO 'sequential'"
_RECORDS: Final = "idempotency_records"
# The library's tables whose rows belong to no tenant, and are read on every node.
_REFERENCES: Final = ("migrations", "secret")
# Those that the coordinator alone has: to use them needs no other node. Citus must know them, to
# commit them together with rows of tenants.
_LOCAL: Final = ("paused_queues", "console_sessions", "request_counts")
_DISTRIBUTE: Final = (
    "SELECT create_distributed_table($1::text::regclass, $2::text, colocate_with => $3::text)"
)


def refuse_other_nodes() -> Steps[None]:
    """Raise ``ConfigurationError`` unless this is the coordinator, which has all locks.

    Advisory locks of one node are unknown on the others. A second claim of a key would run its
    handler in vain, and jobs with an order key would not keep their order.
    """
    rows = yield _LOCAL_GROUP, ()
    if rows and rows[0][0] != _COORDINATOR:
        raise ConfigurationError(
            "this server is a worker node of Citus: connect to the coordinator, which has the locks"
        )


def is_distributed(names: TableNames) -> Steps[bool]:
    """Return whether the library's tables are distributed already."""
    if not (yield IS_CITUS, ())[0][0]:
        return False
    return (yield from _is_known(names.table(_RECORDS)))


def distribute(names: TableNames, tables: Iterable[tuple[str, str | None]]) -> Steps[list[str]]:
    """Distribute tables by a column, or copy them to all nodes; return those that were not yet.

    The coordinator keeps some of the library's own.

    ``tables`` are names with the column of the tenant; without one, a table becomes a reference
    table. The library's own are added. Rows that a table has are moved.

    Raises ``ConfigurationError`` if the extension is missing.
    """
    if not (yield IS_CITUS, ())[0][0]:
        raise ConfigurationError(
            "the extension citus is not installed in this database: install Citus, then run "
            "CREATE EXTENSION citus on every node"
        )
    if not (yield _KNOWN_COORDINATOR, ()):
        raise ConfigurationError(
            "the coordinator is not one of the nodes of Citus: run SELECT "
            "citus_set_coordinator_host('…') with the name by which the workers reach it"
        )
    yield SEQUENTIAL, ()
    records = names.table(_RECORDS)
    wanted: dict[str, str | None] = {records: "tenant"}
    wanted |= dict(tables)
    wanted |= dict.fromkeys(names.table(name) for name in (*_LOCAL, *_REFERENCES))
    local = {names.table(name) for name in _LOCAL}
    changed = []
    for table, column in wanted.items():
        is_missing = (yield "SELECT to_regclass($1::text) IS NULL", (table,))[0][0]
        if is_missing or (yield from _is_known(table)):
            continue
        if table in local:
            yield "SELECT citus_add_local_table_to_metadata($1::text::regclass)", (table,)
        elif column is None:
            yield "SELECT create_reference_table($1::text::regclass)", (table,)
        else:
            group = "none" if table == records else records
            yield _DISTRIBUTE, (table, column, group)
        changed.append(table)
    return changed


def _is_known(table: str) -> Steps[bool]:
    sql = "SELECT 1 FROM pg_dist_partition WHERE logicalrelid = to_regclass($1::text)"
    return bool((yield sql, (table,)))
