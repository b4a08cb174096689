"""Exactly-once effects for apps that work offline.

The public names. Where everything lives:

    errors    the whole tree of errors
    core      the rules: keys, canonical form, fingerprints, decision, staleness, retry, jobs,
              versions, the outbox's entries
    ports     what the rules need from the world
    system    the machine's clocks, and ids
    stores    SQLite, PostgreSQL, Redis
    jobs      work for later: enqueue, worker, leases, dead letters
    server    the intake: claim → run → record → reply
    client    for callers: a key that stays over retries
    device    the outbox: kept, in order, sent until it has happened
    observe   logs, metrics, traces
    services  what is built on these names
    proof     simulation, sieges, conformance: evidence, not product
    cli       for people
    testing   real servers and fault points, for your tests too

A name's room is opened when the name is first asked for: whoever needs the rules alone, or reads
``holdfast --help``, does not wait for stores, workers and the event loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import (
    HoldfastError,
    NonRetryableError,
    RequestError,
    RetryLaterError,
    ServiceError,
)

_AT_ONCE: Final = False

# Not a bare TYPE_CHECKING: the linter of layers leaves such imports out, and a lower room could
# reach a higher one by way of this file unseen.
if TYPE_CHECKING or _AT_ONCE:
    from holdfast.core.canonical_json import canonical_json
    from holdfast.core.fingerprint import body_hash
    from holdfast.core.job import AlreadyDone, Enqueued, Merged
    from holdfast.core.keys import KeyFormat
    from holdfast.core.policy import (
        ErrorFormat,
        ErrorsStored,
        Policy,
        Staleness,
    )
    from holdfast.core.retry import CLIENT, DEVICE, QUEUE, WORKER, RetryPolicy
    from holdfast.core.versions import check_version, etag, expected_version
    from holdfast.jobs.context import JobContext
    from holdfast.jobs.registry import JobRegistry
    from holdfast.jobs.worker import Worker
    from holdfast.ports import Transaction
    from holdfast.server.app import Holdfast
    from holdfast.server.execution import Execution
    from holdfast.server.guarded_request import Principal
    from holdfast.server.optimistic_locking import update_with_version
    from holdfast.stores.factory import open_store

__all__ = [
    "CLIENT",
    "DEVICE",
    "QUEUE",
    "WORKER",
    "AlreadyDone",
    "Enqueued",
    "ErrorFormat",
    "ErrorsStored",
    "Execution",
    "Holdfast",
    "HoldfastError",
    "JobContext",
    "JobRegistry",
    "KeyFormat",
    "Merged",
    "NonRetryableError",
    "Policy",
    "Principal",
    "RequestError",
    "RetryLaterError",
    "RetryPolicy",
    "ServiceError",
    "Staleness",
    "Transaction",
    "Worker",
    "body_hash",
    "canonical_json",
    "check_version",
    "etag",
    "expected_version",
    "open_store",
    "update_with_version",
]

_NAMES_OF_MODULE: Final = {
    "core.canonical_json": ("canonical_json",),
    "core.fingerprint": ("body_hash",),
    "core.job": (
        "AlreadyDone",
        "Enqueued",
        "Merged",
    ),
    "core.keys": ("KeyFormat",),
    "core.policy": (
        "ErrorFormat",
        "ErrorsStored",
        "Policy",
        "Staleness",
    ),
    "core.retry": (
        "CLIENT",
        "DEVICE",
        "QUEUE",
        "WORKER",
        "RetryPolicy",
    ),
    "core.versions": (
        "check_version",
        "etag",
        "expected_version",
    ),
    "jobs.registry": ("JobRegistry",),
    "jobs.context": ("JobContext",),
    "jobs.worker": ("Worker",),
    "ports": ("Transaction",),
    "server.guarded_request": ("Principal",),
    "server.execution": ("Execution",),
    "server.app": ("Holdfast",),
    "server.optimistic_locking": ("update_with_version",),
    "stores.factory": ("open_store",),
}
_MODULE_OF_NAME: Final = {
    name: module for module, names in _NAMES_OF_MODULE.items() for name in names
}


if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF_NAME.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
