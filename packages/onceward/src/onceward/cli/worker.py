"""``onceward worker``: run the jobs of an app until a signal, or until none is due."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from onceward import Onceward
from onceward.cli.options import (
    DEFAULT_DATABASE,
    USAGE,
    AppTarget,
    choose_target,
    command,
    new_app,
)
from onceward.cli.reload import run_with_reload
from onceward.errors import OncewardError
from onceward.jobs.depth_reporter import DepthReporter
from onceward.jobs.engines import broker_engine
from onceward.jobs.worker import Worker
from onceward.observability.logs import configure_logging
from onceward.ports import JobMetrics
from onceward_protocol.cli.gc import resume_gc
from onceward_protocol.cli.output import CommandError, print_error
from onceward_protocol.cli.plugins import default_worker

_INTERRUPTED: Final = 130
_CONCURRENCY: Final = 16
_DRAIN_SECONDS: Final = 30.0
# Someone waits for the new code.
_RELOAD_DRAIN_SECONDS: Final = "2"
_EXIT_SECONDS: Final = 1.0
_PARENT_SECONDS: Final = 1.0
# Set by ``--reload``: the process that restarts this one.
_PARENT_VARIABLE: Final = "_ONCEWARD_RELOAD_PARENT"

app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of ``onceward worker``. None is the default of the worker or of the services."""

    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            envvar="ONCEWARD_APP",
            metavar="MODULE:NAME",
            help="The app whose jobs to run, such as shop.main:onceward. "
            "Default: the jobs of the installed services.",
        ),
    ] = None
    database: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_DATABASE_URL",
            metavar="URL",
            help="The database of the services; an app has its own.",
            show_default=DEFAULT_DATABASE,
        ),
    ] = None
    nats: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_NATS_URL", metavar="URL", help="NATS server that delivers jobs."
        ),
    ] = None
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            "--queues",
            metavar="QUEUE",
            help="Run jobs of these queues only. May be repeated, or separated by commas.",
            show_default="all",
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Number of jobs to run at the same time.",
            show_default="16; for the services ONCEWARD_JOBS_CONCURRENCY or 8",
        ),
    ] = None
    drain_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=86_400,
            help="How long to wait for running jobs after the first signal.",
            show_default="30, with --reload 2",
        ),
    ] = None
    lease_seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=86_400,
            help="How long a job stays claimed if this process dies; leases are renewed.",
            show_default="30; for the services ONCEWARD_JOBS_LEASE_SECONDS or 30",
        ),
    ] = None
    once: Annotated[bool, typer.Option("--once", help="Run the jobs that are due, then exit.")] = (
        False
    )
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Restart when a .py or .sql file below this directory changes. For development.",
        ),
    ] = False
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Serve Prometheus metrics on this port.",
            show_default="off",
        ),
    ] = None
    metrics_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="The address for --metrics-port; 0.0.0.0 for all. There is no sign-in.",
        ),
    ] = "127.0.0.1"
    require_durability: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_REQUIRE_DURABILITY",
            metavar="replicated",
            help="Refuse a database that does not wait for a synchronous standby.",
        ),
    ] = None

    def known_queues(self, known: Iterable[str]) -> list[str]:
        """Return the chosen queues. Raises ``CommandError`` for one that has no handler."""
        known = sorted(known)
        chosen = [name.strip() for given in self.queues or () for name in given.split(",")]
        queues = [name for name in chosen if name]
        for queue in queues:
            if queue not in known:
                names = ", ".join(known) or "none: the app has no job handlers"
                raise CommandError(f"unknown queue {queue}: the queues are {names}", USAGE)
        return queues


@command(app, "worker")
def worker(context: typer.Context, options: WorkerOptions) -> None:
    """Run jobs: those of your app, or those of the installed services.

    Prints one line when it is ready. Ctrl-C or SIGTERM finishes the running jobs, releases those
    that do not end in time, and exits with code 0; a second signal releases them at once.

    Examples:
        onceward worker --app shop.main:onceward

        onceward worker --app shop.main:onceward --queue mail --concurrency 4

        onceward worker --app shop.main:onceward --reload

        onceward worker --database postgresql://me@localhost/shop

    """
    target = choose_target(context, app=options.app, database=options.database or "")
    if options.reload:
        code = _reload(options)
    elif isinstance(target, AppTarget):
        code = _run_app_worker(target, options)
    else:
        code = _run_default_worker(options)
    raise typer.Exit(code)


def _reload(options: WorkerOptions) -> int:
    """Run this command line in a child process, without ``--reload``."""
    if options.once:
        raise CommandError("give --once or --reload, not both", USAGE)
    arguments = [argument for argument in sys.argv[1:] if argument != "--reload"]
    if options.drain_seconds is None:
        arguments += ["--drain-seconds", _RELOAD_DRAIN_SECONDS]
    resume_gc()
    return run_with_reload(arguments, os.environ | {_PARENT_VARIABLE: str(os.getpid())})


def _run_default_worker(options: WorkerOptions) -> int:
    """Run the jobs of an installed package. Raises ``CommandError`` if none has any.

    Also in a Django project, unless a database is given: the jobs of the project were meant.
    """
    if options.database is None and "DJANGO_SETTINGS_MODULE" in os.environ:
        raise CommandError(
            "DJANGO_SETTINGS_MODULE is set, but no app is given: write onceward worker --app "
            "MODULE:NAME with the Onceward of your project, for example --app shop.jobs:onceward "
            "(for the jobs of the bundled services give --database URL)",
            USAGE,
        )
    run = default_worker()
    if run is None:
        raise CommandError(
            "onceward worker needs the app whose jobs it runs: onceward worker --app MODULE:NAME, "
            "for example --app shop.main:onceward (the jobs of the bundled services need "
            "the package onceward-services)",
            USAGE,
        )
    return run(options)


def _run_app_worker(target: AppTarget, options: WorkerOptions) -> int:
    required = options.require_durability
    if required not in (None, "replicated"):
        raise CommandError(f"--require-durability should be replicated, not {required}", USAGE)
    onceward = target.load()
    if required is not None:
        if not onceward.store.knows_durability:
            raise CommandError(
                f"{target.name}: --require-durability needs PostgresStore, PsycopgStore or "
                "PsycopgSyncStore",
                USAGE,
            )
        onceward.store.require_durability()
    _configure_logging()
    if not onceward.jobs.queues:
        raise CommandError(
            f"{target.name} has no job handlers: import the modules that define them in its module",
            USAGE,
        )
    metrics = onceward.runtime.job_metrics
    if options.metrics_port is not None:
        metrics = _prometheus(metrics)
        serve_metrics(metrics, options)
    given: dict[str, Any] = {
        "queues": options.known_queues(onceward.jobs.queues) or None,
        "concurrency": _CONCURRENCY if options.concurrency is None else options.concurrency,
        "shutdown_seconds": _DRAIN_SECONDS
        if options.drain_seconds is None
        else options.drain_seconds,
        "metrics": metrics,
    }
    if options.lease_seconds is not None:
        given["lease_seconds"] = options.lease_seconds
    if options.nats is not None:
        given["engine"] = broker_engine("nats", options.nats)
    return asyncio.run(_run_app(onceward, target.name, given, once=options.once))


async def _run_app(onceward: Onceward, name: str, options: dict[str, Any], *, once: bool) -> int:
    worker = onceward.worker(**options)
    try:
        # Not ``onceward.open()``: a worker serves no requests, so routes and sweep do not matter.
        await onceward.store.open()
    except OncewardError as error:
        raise CommandError(f"{name}: {error}") from error
    metrics: JobMetrics | None = options["metrics"]
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

    return await run_worker(worker, where=name, once=once, close=close)


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
    if _PARENT_VARIABLE in os.environ:
        ends.append(_parent_ended(int(os.environ[_PARENT_VARIABLE])))
    tasks = [asyncio.create_task(end) for end in ends]
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    for task in done:
        task.result()


def serve_metrics(metrics: Any, options: WorkerOptions) -> None:
    """Serve the registry of ``metrics`` in a thread, if there is a port."""
    if options.metrics_port is None:
        return
    from prometheus_client import start_http_server

    host, port = options.metrics_host, options.metrics_port
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
