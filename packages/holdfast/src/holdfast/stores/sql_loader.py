"""Named SQL: queries live in ``.sql`` files, readable by themselves, and are called by name."""

import re
from functools import cache
from importlib.resources import files

from holdfast.errors import ConfigurationError

__all__ = ["Queries", "load_queries"]

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


class Queries:
    """The queries of one file, by name."""

    def __init__(self, source: str, texts: dict[str, str]) -> None:
        """Keep where they came from, for the error message."""
        self._source = source
        self._texts = texts

    def __getitem__(self, name: str) -> str:
        """Return the SQL of one query."""
        try:
            return self._texts[name]
        except KeyError:
            raise ConfigurationError(f"no query {name!r} in {self._source}") from None


@cache
def load_queries(package: str, file: str = "queries.sql") -> Queries:
    """Read a file of queries, each headed by ``-- name: …``."""
    text = files(package).joinpath(file).read_text(encoding="utf-8")
    parts = _NAME.split(text)
    named = zip(parts[1::2], parts[2::2], strict=True)
    return Queries(f"{package}/{file}", {name: sql.strip().rstrip(";") for name, sql in named})
