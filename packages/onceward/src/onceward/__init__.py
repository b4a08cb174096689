"""Exactly-once effects for apps that work offline.

The names below are all an app usually needs. Names used less often are in the ``__all__`` of
these modules:

    errors              every error of the server
    ports               protocols for stores, metrics, engines
    jobs.job            Enqueued, Merged, AlreadyDone: what ``enqueue`` returns
    tenants             ALL_TENANTS, for operators
    fastapi             dependencies for FastAPI: Session, Tx, Caller, Run; principal_from
    frameworks          integrations: starlette, asgi, wsgi, django
    sign_in             who calls: identify, jwt_auth
    guard               one guarded request; rate_limits
    stores              SQLite, PostgreSQL, SQLAlchemy, Django, the Redis cache
    jobs                background jobs in the same database
    client              an HTTP client that keeps the key over retries
    observability       logs, metrics, traces

What client and server agree on (canonical JSON, fingerprints, keys, retries, versions) is in
``onceward_protocol``; the offline queue of a device in ``onceward_outbox``; the console in
``onceward_operator``; servers and contract tests for your own tests in ``onceward_testing``.

The names are imported on first use (``import onceward`` takes 24 ms instead of 190), which keeps
the outbox and the command line from loading the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from onceward.errors import (
    NonRetryableError,
    OncewardError,
    RequestError,
    RetryLaterError,
    ServiceError,
)

_NEVER: Final = False

# Not a bare TYPE_CHECKING: import-linter leaves such imports out, and could not see a lower layer
# import a higher one by way of this file.
if TYPE_CHECKING or _NEVER:
    from onceward.app import Onceward
    from onceward.config import GuardConfig
    from onceward.frameworks.cors import CORS_HEADERS
    from onceward.guard.execution import Execution
    from onceward.guard.optimistic_locking import update_with_version
    from onceward.guard.policy import ErrorFormat, ErrorsStored, Policy, Staleness
    from onceward.guard.request import Principal
    from onceward.jobs.context import JobContext
    from onceward.jobs.worker import Worker
    from onceward.ports import Transaction
    from onceward.stores.factory import open_store
    from onceward.tenants import SINGLE_TENANT
    from onceward_protocol.keys import KeyFormat

__all__ = [
    "CORS_HEADERS",
    "SINGLE_TENANT",
    "ErrorFormat",
    "ErrorsStored",
    "Execution",
    "GuardConfig",
    "JobContext",
    "KeyFormat",
    "NonRetryableError",
    "Onceward",
    "OncewardError",
    "Policy",
    "Principal",
    "RequestError",
    "RetryLaterError",
    "ServiceError",
    "Staleness",
    "Transaction",
    "Worker",
    "open_store",
    "update_with_version",
]

_MODULE_OF_NAME: Final = {
    "CORS_HEADERS": "onceward.frameworks.cors",
    "SINGLE_TENANT": "onceward.tenants",
    "ErrorFormat": "onceward.guard.policy",
    "ErrorsStored": "onceward.guard.policy",
    "Execution": "onceward.guard.execution",
    "GuardConfig": "onceward.config",
    "Onceward": "onceward.app",
    "JobContext": "onceward.jobs.context",
    "KeyFormat": "onceward_protocol.keys",
    "Policy": "onceward.guard.policy",
    "Principal": "onceward.guard.request",
    "Staleness": "onceward.guard.policy",
    "Transaction": "onceward.ports",
    "Worker": "onceward.jobs.worker",
    "open_store": "onceward.stores.factory",
    "update_with_version": "onceward.guard.optimistic_locking",
}

if not TYPE_CHECKING:  # a type checker would accept every misspelt name

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF_NAME.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
