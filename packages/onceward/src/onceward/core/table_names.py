"""The names of Onceward's tables and functions: a prefix, and on PostgreSQL a schema.

The ``.sql`` files are written with the default names (``onceward_jobs``), so they are valid SQL.
``TableNames.render`` replaces them, once, when a file is loaded.
"""

import re
from dataclasses import dataclass, field
from typing import Final

from onceward.errors import ConfigurationError
from onceward_protocol.fingerprint import lock_number

__all__ = ["DEFAULT_NAMES", "DEFAULT_PREFIX", "MAX_PREFIX_LENGTH", "TableNames"]

DEFAULT_PREFIX: Final = "onceward_"

# In databases of version 0.1 these have no prefix. Their names are kept.
_FORMERLY_UNPREFIXED: Final = (
    "idempotency_records",
    "audit_events",
    "jobs",
    "job_completions",
    "dead_letters",
    "job_failures",
    "job_steps",
)
# The other tables, and functions. Every table and function of the migrations and of citus.sql is in
# one of the two lists: they are what a schema qualifies, unlike indexes and triggers.
_OTHERS: Final = (
    "secret",
    "migrations",
    "move",
    "job_causes",
    "audit_seals",
    "sequences",
    "sequence_numbers",
    "request_log",
    "request_counts",
    "paused_queues",
    "console_sessions",
    "claim",
    "finish",
    "save_record",
    "complete_job",
    "attempt_lost",
    "enqueue",
    "enqueue_coalesced",
    "requeue_job",
    "cancel_job",
    "lease_jobs",
    "lease_locked_jobs",
    "claim_jobs",
    "claim_named_jobs",
    "mark_published",
    "reset_published",
    "unpublish_jobs",
    "next_visible",
    "jobs_to_publish",
    "queue_depths",
    "some_depths",
    "sweep_expired",
    "sweep_records",
    "clean_jobs",
    "find_records",
    "two_phase_commit",
    "first_jobs",
    "newest_records",
    "next_tenants",
    "tenants_of_job",
)

# The longest first: claim_jobs is not an index of claim.
_OBJECTS: Final = "|".join(sorted((*_FORMERLY_UNPREFIXED, *_OTHERS), key=len, reverse=True))
# A table or function; or an index or trigger, which is named after one.
_NAME: Final = re.compile(rf"\b(idx_)?{DEFAULT_PREFIX}({_OBJECTS})(_\w+)?\b")

# PostgreSQL cuts longer names off.
_MAX_NAME_LENGTH: Final = 63
MAX_PREFIX_LENGTH: Final = _MAX_NAME_LENGTH - len("idx_idempotency_records_expires_at")
_VALID: Final = re.compile(r"[a-z_][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class TableNames:
    """How Onceward's tables are named in one database. Raises ``ConfigurationError``."""

    prefix: str = DEFAULT_PREFIX
    schema: str | None = None
    # The names of version 0.1: most tables have no prefix.
    is_unprefixed: bool = False
    # The tables are distributed by Citus, which needs other statements here and there.
    is_distributed: bool = False
    # Distinguishes the advisory locks of two apps in one database. Empty for the default names.
    _lock_salt: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check("table_prefix", self.prefix, MAX_PREFIX_LENGTH)
        if self.prefix.startswith("sqlite_"):
            raise ConfigurationError("table_prefix must not begin with sqlite_: choose another")
        if self.schema is not None:
            _check("schema", self.schema, _MAX_NAME_LENGTH)
            if self.schema.startswith("pg_"):
                raise ConfigurationError("schema must not begin with pg_: choose another")
        is_default = self.prefix == DEFAULT_PREFIX and self.schema is None
        salt = "" if is_default else f"{self.schema or ''}.{self.prefix} "
        object.__setattr__(self, "_lock_salt", salt)

    def render(self, sql: str) -> str:
        """Replace the default names in a statement or script by these names."""
        if self == DEFAULT_NAMES:
            return sql
        return _NAME.sub(self._replace, sql)

    def table(self, name: str) -> str:
        """Return a table as statements name it: ``table("jobs")`` is ``onceward_jobs``."""
        return self.render(DEFAULT_PREFIX + name)

    @property
    def channel(self) -> str:
        """The channel on which workers are notified of new jobs."""
        jobs = f"{self.prefix}jobs"
        if self.schema is None:
            return jobs
        # A name is cut off after 63 characters, so the schema is represented by a number.
        return f"{jobs}_{lock_number(self.schema, '', '') & 0xFFFFFFFF:08x}"

    def lock_number(self, tenant: str, endpoint: str, key: str) -> int:
        """Return the number of an advisory lock of PostgreSQL, which belongs to these tables."""
        return lock_number(self._lock_salt + tenant, endpoint, key)

    def _replace(self, match: re.Match[str]) -> str:
        index, name, suffix = match.group(1) or "", match.group(2), match.group(3) or ""
        prefix = "" if self.is_unprefixed and name in _FORMERLY_UNPREFIXED else self.prefix
        full_name = f"{index}{prefix}{name}{suffix}"
        is_in_schema = self.schema is not None and not index and not suffix
        return f'"{self.schema}".{full_name}' if is_in_schema else full_name


def _check(option: str, name: str, max_length: int) -> None:
    if _VALID.fullmatch(name) is None or len(name) > max_length:
        raise ConfigurationError(
            f"{option} {name!r} is not valid: use 1 to {max_length} characters of a-z, 0-9 and _, "
            "not beginning with a digit"
        )


DEFAULT_NAMES: Final = TableNames()
