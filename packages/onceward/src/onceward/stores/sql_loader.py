"""Load named SQL statements with the names that a database's tables have."""

import re
from functools import cache
from typing import Final

from onceward.stores.table_names import DEFAULT_NAMES, TableNames
from onceward_protocol.storage.sql_files import Queries, read_queries

# A plan that is cached while a table is tiny reads all of it, while the connection lives and
# however much the table grows. Functions have ``SET enable_seqscan = off``. Statements by a whole
# primary key have a condition that costs nothing when the value is known, and very much in a plan
# for any value: so PostgreSQL plans each execution, by the size that the table has then.
_PLANNED: Final = re.compile(r"\s+AND PLANNED_FOR\((:\w+)\)")
_ANEW: Final = r" AND (\1::text >= '' OR (SELECT count(*) FROM generate_series(1, 1000000000)) > 0)"


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
    # Nodes of Citus plan each statement anew. SQLite plans by its indexes.
    condition = "" if names.schema is None or names.is_distributed else _ANEW
    return Queries(
        queries.source,
        {name: _PLANNED.sub(condition, names.render(sql)) for name, sql in queries.items()},
    )
