"""``onceward worker``: run the jobs of an app until a signal, or until none is due."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from onceward import Onceward
from onceward.cli.app_loader import load_onceward
from onceward.errors import OncewardError
from onceward.jobs.depth_reporter import DepthReporter
from onceward.jobs.engines import broker_engine
from onceward.jobs.worker import Worker
from onceward.observability.logs import configure_logging
from onceward.ports import JobMetrics
from onceward_protocol.cli.gc import resume_gc
from onceward_protocol.cli.output import CommandError, print_error
from onceward_protocol.cli.plugins import default_worker

__all__ = [
    "METRICS_HOST",
    "PARENT_VARIABLE",
    "WorkerOptions",
    "run_app_worker",
    "run_default_worker",
    "run_worker",
    "serve_metrics",
]

_USAGE: Final = 2
_INTERRUPTED: Final = 130
_CONCURRENCY: Final = 16
_DRAIN_SECONDS: Final = 30.0
_EXIT_SECONDS: Final = 1.0
_PARENT_SECONDS: Final = 1.0
# Metrics are served without sign-in.
METRICS_HOST: Final = "127.0.0.1"
# Set by ``--reload``: the process that restarts this one.
PARENT_VARIABLE: Final = "_ONCEWARD_RELOAD_PARENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of ``onceward worker`` that mean the same for every app."""

    queues: tuple[str, ...] = ()
    # None: the default of the worker, or for the services the setting.
    lease_seconds: float | None = None
    metrics_host: str = METRICS_HOST
    metrics_port: int | None = None
    once: bool = False
    # ``replicated``: refuse a database that does not wait for a synchronous standby.
    require_durability: str | None = None

    def check_durability(self) -> None:
        """Raise ``CommandError`` if the required durability is not one that exists."""
        if self.require_durability not in (None, "replicated"):
            raise CommandError(
                f"--require-durability should be replicated, not {self.require_durability}", _USAGE
            )

    def known_queues(self, known: Iterable[str]) -> list[str]:
        """Return the chosen queues. Raises ``CommandError`` for one that has no handler."""
        known = sorted(known)
        for queue in self.queues:
            if queue not in known:
                names = ", ".join(known) or "none: the app has no job handlers"
                raise CommandError(f"unknown queue {queue}: the queues are {names}", _USAGE)
        return list(self.queues)


def run_default_worker(
    *,
    database: str | None,
    nats: str | None,
    concurrency: int | None,
    drain_seconds: float | None,
    options: WorkerOptions,
) -> int:
    """Run the jobs of an installed package. Raises ``CommandError`` if none has any.

    Also in a Django project, unless a database is given: the jobs of the project were meant.
    """
    if database is None and "DJANGO_SETTINGS_MODULE" in os.environ:
        raise CommandError(
            "DJANGO_SETTINGS_MODULE is set, but no app is given: write onceward worker --app "
            "MODULE:NAME with the Onceward of your project, for example --app shop.jobs:onceward "
            "(for the jobs of the bundled services give --database URL)",
            _USAGE,
        )
    run = default_worker()
    if run is None:
        raise CommandError(
            "onceward worker needs the app whose jobs it runs: onceward worker --app MODULE:NAME, "
            "for example --app shop.main:onceward (the jobs of the bundled services need "
            "the package onceward-services)",
            _USAGE,
        )
    return run(
        database=database,
        nats=nats,
        concurrency=concurrency,
        drain_seconds=drain_seconds,
        options=options,
    )


def run_app_worker(
    app: str,
    *,
    nats: str | None,
    concurrency: int | None,
    drain_seconds: float | None,
    options: WorkerOptions,
) -> int:
    """Run the jobs of ``MODULE:NAME``; return the exit code."""
    options.check_durability()
    onceward = load_onceward(app)
    if options.require_durability is not None:
        if not onceward.store.knows_durability:
            raise CommandError(
                f"{app}: --require-durability needs PostgresStore, PsycopgStore or "
                "PsycopgSyncStore",
                _USAGE,
            )
        onceward.store.require_durability()
    _configure_logging()
    if not onceward.jobs.queues:
        raise CommandError(
            f"{app} has no job handlers: import the modules that define them in its module",
            _USAGE,
        )
    metrics = onceward.runtime.job_metrics
    if options.metrics_port is not None:
        metrics = _prometheus(metrics)
        serve_metrics(metrics, options.metrics_port, host=options.metrics_host)
    given: dict[str, Any] = {
        "queues": options.known_queues(onceward.jobs.queues) or None,
        "concurrency": _CONCURRENCY if concurrency is None else concurrency,
        "shutdown_seconds": _DRAIN_SECONDS if drain_seconds is None else drain_seconds,
        "metrics": metrics,
    }
    if options.lease_seconds is not None:
        given["lease_seconds"] = options.lease_seconds
    if nats is not None:
        given["engine"] = broker_engine("nats", nats)
    return asyncio.run(_run_app(onceward, app, metrics, options, given))


async def _run_app(
    onceward: Onceward,
    app: str,
    metrics: JobMetrics | None,
    options: WorkerOptions,
    given: Mapping[str, Any],
) -> int:
    worker = onceward.worker(**given)
    try:
        # Not ``onceward.open()``: a worker serves no requests, so routes and sweep do not matter.
        await onceward.store.open()
    except OncewardError as error:
        raise CommandError(f"{app}: {error}") from error
    depths = None if metrics is None else DepthReporter(onceward.store, onceward.jobs, metrics)
    if depths is not None:
        depths.start()
    onceward.runtime.audit_sealer.start()

    async def close() -> None:
        if depths is not None:
            await depths.stop()
        await onceward.runtime.audit_sealer.stop()
        await onceward.runtime.notifier.close()
        await onceward.store.close()

    return await run_worker(worker, where=app, once=options.once, close=close)


async def run_worker(
    worker: Worker, *, where: str, once: bool, close: Callable[[], Awaitable[None]]
) -> int:
    """Run a worker on an open store until a signal, or with ``once`` until no job is due.

    The first signal finishes running jobs; the second releases them at once. Calls ``close`` at
    the end, and returns the exit code.
    """
    signals = _StopSignals(worker)
    try:
        await worker.start()
    except OncewardError as error:
        await close()
        raise CommandError(f"{where}: {error}") from error
    resume_gc()
    print(
        f"Onceward runs jobs of {', '.join(worker.queues)} on {where} "
        f"(pid {os.getpid()}, {worker.engine.name})",
        flush=True,
    )
    try:
        await _until_stopped(worker, signals, once=once)
    except OncewardError as error:
        raise CommandError(f"{where}: {error}") from error
    finally:
        await worker.stop()
        await close()
    await _leave(signals.exit_code)
    return signals.exit_code


class _StopSignals:
    """SIGINT and SIGTERM: the first requests a stop, the second makes it hurry."""

    def __init__(self, worker: Worker) -> None:
        self.requested = asyncio.Event()
        self.exit_code = 0
        self._worker = worker
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle)

    def _handle(self) -> None:
        if self.requested.is_set():
            self.exit_code = _INTERRUPTED
            self._worker.hurry()
            return
        self.requested.set()
        if running := self._worker.running:
            jobs = "1 running job" if running == 1 else f"{running} running jobs"
            print_error(f"finishing {jobs}; signal again to release what runs and stop at once")


async def _until_stopped(worker: Worker, signals: _StopSignals, *, once: bool) -> None:
    """Wait for a signal, for the end of the parent or, with ``once``, until no job is due."""
    ends: list[Coroutine[Any, Any, Any]] = [signals.requested.wait()]
    if once:
        ends.append(worker.until_idle())
    if PARENT_VARIABLE in os.environ:
        ends.append(_parent_ended(int(os.environ[PARENT_VARIABLE])))
    tasks = [asyncio.create_task(end) for end in ends]
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    for task in done:
        task.result()


def serve_metrics(metrics: Any, port: int | None, *, host: str = METRICS_HOST) -> None:
    """Serve the registry of ``metrics`` at this address, in a thread."""
    if port is None:
        return
    from prometheus_client import start_http_server

    try:
        start_http_server(port, host, metrics.registry)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandError(f"cannot listen on {host} port {port}: {reason}") from error


async def _leave(code: int) -> None:
    """End the process if handlers that ignore their cancellation, or threads, keep it alive."""
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    is_stuck = False
    if others:
        _, stubborn = await asyncio.wait(others, timeout=_EXIT_SECONDS)
        is_stuck = bool(stubborn)
    try:
        async with asyncio.timeout(_EXIT_SECONDS):
            await loop.shutdown_default_executor()
    except TimeoutError:
        is_stuck = True
    if is_stuck:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


async def _parent_ended(parent: int) -> None:
    """Return when the process that restarts this one is gone, e.g. killed."""
    while os.getppid() == parent:  # noqa: ASYNC110 - there is nothing to wait for
        await asyncio.sleep(_PARENT_SECONDS)


def _configure_logging() -> None:
    """Log to stderr, unless the app has configured logging itself."""
    if logging.getLogger().handlers:
        return
    as_json = os.environ.get("ONCEWARD_LOG_JSON", "").lower()
    configure_logging(
        level=os.environ.get("ONCEWARD_LOG_LEVEL", "INFO"),
        json=as_json in ("1", "true", "yes", "on") if as_json else not sys.stderr.isatty(),
    )
    logging.getLogger("asyncio").setLevel(logging.INFO)


def _prometheus(metrics: JobMetrics | None) -> Any:
    from onceward.observability.metrics import PrometheusMetrics

    return metrics if isinstance(metrics, PrometheusMetrics) else PrometheusMetrics()
