"""Load named SQL statements with the names that a database's tables have."""

from functools import cache

from onceward.stores.table_names import DEFAULT_NAMES, TableNames
from onceward_protocol.storage.sql_files import Queries, read_queries


@cache
def load_queries(
    package: str, file: str = "queries.sql", *, names: TableNames = DEFAULT_NAMES
) -> Queries:
    """Read the statements of a file; those ``on citus`` only where the tables are distributed.

    The file names Onceward's tables as they are called by default (``onceward_jobs``); ``names``
    are the names in the database at hand.
    """
    variant = "citus" if names.is_distributed else None
    queries = read_queries(package, file, variant=variant)
    return Queries(queries.source, {name: names.render(sql) for name, sql in queries.items()})
