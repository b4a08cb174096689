"""Load named SQL statements from ``.sql`` files, with the names that a database's tables have."""

import re
from functools import cache
from importlib.resources import files
from typing import Final

from onceward.core.table_names import DEFAULT_NAMES, TableNames
from onceward.errors import ConfigurationError

__all__ = ["Queries", "load_queries", "without_comments"]

_NAME: Final = re.compile(r"^-- name: (\w+)( on citus)?\s*$", re.MULTILINE)
_COMMENT: Final = re.compile(r"^[ \t]*--.*\n?", re.MULTILINE)


class Queries(dict[str, str]):
    """The statements of one file by name. An unknown name raises ``ConfigurationError``."""

    def __init__(self, source: str, texts: dict[str, str]) -> None:
        super().__init__(texts)
        self._source = source

    def __missing__(self, name: str) -> str:
        raise ConfigurationError(f"no query {name!r} in {self._source}")


def without_comments(sql: str) -> str:
    """Remove lines that hold nothing but a comment."""
    return _COMMENT.sub("", sql)


@cache
def load_queries(
    package: str, file: str = "queries.sql", *, names: TableNames = DEFAULT_NAMES
) -> Queries:
    """Read a file of statements, each preceded by a line ``-- name: …``.

    A statement after ``-- name: … on citus`` replaces that of the same name in a database whose
    tables are distributed.

    The file names Onceward's tables as they are called by default (``onceward_jobs``); ``names``
    are the names in the database at hand.
    """
    text = files(package).joinpath(file).read_text(encoding="utf-8")
    parts = _NAME.split(text)
    statements: dict[str, str] = {}
    for name, is_for_citus, sql in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if not is_for_citus or names.is_distributed:
            statements[name] = names.render(without_comments(sql).strip().rstrip(";"))
    return Queries(f"{package}/{file}", statements)
