"""Named statements in ``.sql`` files: each follows a line ``-- name: …``."""

import re
from functools import cache
from importlib.resources import files
from typing import Final

from onceward_protocol.errors import ConfigurationError

__all__ = ["Queries", "read_queries", "without_comments"]

_NAME: Final = re.compile(r"^-- name: (\w+)(?: on (\w+))?\s*$", re.MULTILINE)
_COMMENT: Final = re.compile(r"^[ \t]*--.*\n?", re.MULTILINE)


class Queries(dict[str, str]):
    """The statements of one file by name. An unknown name raises ``ConfigurationError``."""

    def __init__(self, source: str, texts: dict[str, str]) -> None:
        super().__init__(texts)
        self.source = source

    def __missing__(self, name: str) -> str:
        raise ConfigurationError(f"no query {name!r} in {self.source}")


def without_comments(sql: str) -> str:
    """Remove lines that hold nothing but a comment."""
    return _COMMENT.sub("", sql)


@cache
def read_queries(package: str, file: str, *, variant: str | None = None) -> Queries:
    """Read a file of statements from a package.

    A statement after ``-- name: … on VARIANT`` replaces that of the same name if ``variant`` is
    asked for, and is left out otherwise.
    """
    text = files(package).joinpath(file).read_text(encoding="utf-8")
    parts = _NAME.split(text)
    statements: dict[str, str] = {}
    for name, only_for, sql in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if only_for is None or only_for == variant:
            statements[name] = without_comments(sql).strip().rstrip(";")
    return Queries(f"{package}/{file}", statements)
