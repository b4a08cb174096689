"""The names of Onceward's tables and functions: a prefix on SQLite, a schema on PostgreSQL.

The ``.sql`` files are written with a prefix (``onceward_jobs``), so they are valid SQL.
``TableNames.render`` replaces the names, once, when a file is loaded.
"""

import re
from dataclasses import dataclass, field
from typing import Final, Self

from onceward.errors import ConfigurationError
from onceward_protocol.fingerprint import lock_number

DEFAULT_PREFIX: Final = "onceward_"
DEFAULT_SCHEMA: Final = "onceward"
# The schema that PostgreSQL apps share.
_PUBLIC: Final = "public"

# A table or function; or an index, which is in the schema of its table and never named with it.
_NAME: Final = re.compile(rf"\b(idx_)?{DEFAULT_PREFIX}(\w+)")

# PostgreSQL cuts longer names off.
_MAX_NAME_LENGTH: Final = 63
MAX_PREFIX_LENGTH: Final = _MAX_NAME_LENGTH - len("idx_idempotency_records_expires_at")
_VALID: Final = re.compile(r"[a-z_][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class TableNames:
    """How Onceward's tables are named in one database. Raises ``ConfigurationError``."""

    prefix: str = DEFAULT_PREFIX
    schema: str | None = None
    # The tables are distributed by Citus, which needs other statements here and there.
    is_distributed: bool = False
    # Distinguishes the advisory locks of two apps in one database.
    _lock_salt: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.prefix or self.schema in {None, _PUBLIC}:
            _check("table_prefix", self.prefix, MAX_PREFIX_LENGTH)
        if self.prefix.startswith("sqlite_"):
            raise ConfigurationError("table_prefix must not begin with sqlite_: choose another")
        if self.schema is not None:
            _check("schema", self.schema, _MAX_NAME_LENGTH)
            if self.schema.startswith("pg_"):
                raise ConfigurationError("schema must not begin with pg_: choose another")
        object.__setattr__(self, "_lock_salt", f"{self.schema or ''}.{self.prefix} ")

    @classmethod
    def chosen(cls, prefix: str | None, schema: str | None, *, is_sqlite: bool) -> Self:
        """Return the names for options of a store, of which either may be None.

        On PostgreSQL the schema is ``onceward`` by default. Tables have a prefix where they are not
        in a schema of their own: on SQLite, and in ``public``.
        """
        if is_sqlite:
            if schema is not None:
                raise ConfigurationError(
                    "SQLite has no schemas: use table_prefix instead of schema"
                )
            return cls(DEFAULT_PREFIX if prefix is None else prefix)
        schema = DEFAULT_SCHEMA if schema is None else schema
        by_default = DEFAULT_PREFIX if schema == _PUBLIC else ""
        return cls(by_default if prefix is None else prefix, schema)

    def render(self, sql: str) -> str:
        """Replace the names in a statement or script of a file by these names."""
        if self == DEFAULT_NAMES:
            return sql
        return _NAME.sub(self._replace, sql)

    def table(self, name: str) -> str:
        """Return a table as statements name it: ``table("jobs")`` is ``onceward_jobs``."""
        return self.render(DEFAULT_PREFIX + name)

    @property
    def channel(self) -> str:
        """The channel on which workers are notified of new jobs."""
        jobs = f"{self.prefix or DEFAULT_PREFIX}jobs"
        if self.schema in {None, DEFAULT_SCHEMA}:
            return jobs
        # A name is cut off after 63 characters, so the schema is represented by a number.
        return f"{jobs}_{lock_number(self.schema or '', '', '') & 0xFFFFFFFF:08x}"

    def lock_number(self, tenant: str, endpoint: str, key: str) -> int:
        """Return the number of an advisory lock of PostgreSQL, which belongs to these tables."""
        return lock_number(self._lock_salt + tenant, endpoint, key)

    def _replace(self, match: re.Match[str]) -> str:
        index = match.group(1) or ""
        name = f"{index}{self.prefix}{match.group(2)}"
        return name if index or self.schema is None else f'"{self.schema}".{name}'


def _check(option: str, name: str, max_length: int) -> None:
    if _VALID.fullmatch(name) is None or len(name) > max_length:
        raise ConfigurationError(
            f"{option} {name!r} is not valid: use 1 to {max_length} characters of a-z, 0-9 and _, "
            "not beginning with a digit"
        )


DEFAULT_NAMES: Final = TableNames()
