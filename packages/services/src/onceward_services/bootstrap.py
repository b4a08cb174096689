"""Create the store and the ``Onceward`` of a worker. Imports no web framework."""

from typing import Any

from onceward import GuardConfig, Onceward, open_store
from onceward.errors import ConfigurationError
from onceward.ports import Metrics, Store
from onceward.stores.factory import parse_store_url
from onceward_services.jobs import register_jobs
from onceward_services.registry import migration_packages
from onceward_services.settings import Settings

__all__ = ["create_onceward", "create_store"]


def create_onceward(settings: Settings, *, metrics: Metrics | None = None) -> Onceward:
    """Create a Onceward with the jobs of all services and without HTTP, for a worker."""
    onceward = Onceward(
        create_store(settings.model_copy(update={"run_jobs": True})),
        config=GuardConfig(
            sweep_every_seconds=None,
            retention=settings.retention(),
            audit_seal_seconds=settings.audit_seal_seconds or None,
            audit_keys=settings.audit_keys(),
            metrics=metrics,
            max_payload_bytes=settings.jobs_payload_bytes,
        ),
    )
    register_jobs(onceward, settings)
    return onceward


def create_store(settings: Settings) -> Store:
    """Create the store of all services, not opened yet."""
    target = parse_store_url(settings.database_url)
    if target.database == "sqlite" and settings.require_durability is not None:
        raise ConfigurationError(
            "SQLite has no standby, so ONCEWARD_REQUIRE_DURABILITY=replicated needs PostgreSQL: "
            "write --database postgresql://…"
        )
    options = {} if target.database == "sqlite" else _postgres_options(settings)
    return open_store(
        settings.database_url,
        table_prefix=target.table_prefix or settings.table_prefix or None,
        schema=target.schema or settings.table_schema or None,
        migration_packages=migration_packages(),
        **options,
    )


def _postgres_options(settings: Settings) -> dict[str, Any]:
    return {
        "max_connections": _connections(settings),
        "acquire_seconds": settings.database_acquire_seconds,
        "connect_seconds": settings.database_connect_seconds,
        "claim_seconds": settings.database_claim_seconds,
        "statement_seconds": settings.database_statement_seconds,
        "commit_seconds": settings.database_commit_seconds,
        "require_durability": settings.require_durability,
    }


def _connections(settings: Settings) -> int:
    """Return the pool size of a process: ``pool_size``, plus one connection per concurrent job.

    A job that writes holds a connection until it commits. If jobs used the connections of requests,
    a burst of slow jobs would make requests fail with 503.
    """
    return settings.pool_size + (settings.jobs_concurrency if settings.run_jobs else 0)
