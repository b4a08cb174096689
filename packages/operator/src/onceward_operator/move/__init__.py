"""Move a database from SQLite to PostgreSQL: ``onceward move``.

``database_move`` has the steps, ``source`` the SQLite file, ``target`` the PostgreSQL database,
``values`` the types.
"""

from onceward_operator.move.database_move import (
    FAULT_POINTS,
    DatabaseMove,
    MovedTable,
    MoveReport,
    undo_move,
)

__all__ = ["FAULT_POINTS", "DatabaseMove", "MoveReport", "MovedTable", "undo_move"]
