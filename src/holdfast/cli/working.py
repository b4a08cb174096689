"""Running jobs in a process of their own: connect, work, and end well."""

import asyncio
import os
import signal
from typing import Final

from prometheus_client import start_http_server

from holdfast import Holdfast
from holdfast.cli.collector import release_collector
from holdfast.cli.logs import log_as_set
from holdfast.cli.output import Failure, warn, without_password
from holdfast.errors import HoldfastError
from holdfast.observe.metrics import PrometheusWatcher
from holdfast.services.jobs import look_at_jobs, make_worker
from holdfast.services.settings import Settings, load_settings, strange_variables
from holdfast.services.without_http import create_holdfast

__all__ = ["run_worker"]

_COUNT_SECONDS: Final = 15.0


def run_worker(
    *,
    database: str | None,
    nats: str | None,
    queues: list[str],
    concurrency: int | None,
    metrics_port: int | None,
) -> int:
    """Work until told to stop; returns the exit code."""
    settings = load_settings(database_url=database, nats_url=nats, jobs_concurrency=concurrency)
    for line in strange_variables():
        warn(line)
    log_as_set(settings)
    watcher = PrometheusWatcher()
    if metrics_port is not None:
        try:
            start_http_server(metrics_port, "127.0.0.1", watcher.registry)
        except OSError as error:
            raise Failure(f"cannot listen on port {metrics_port}: {error.strerror}") from error
    return asyncio.run(_work(settings, watcher, queues))


async def _count(holdfast: Holdfast, watcher: PrometheusWatcher) -> None:
    """Count what waits now and then: nobody asks a worker to, as a server is asked."""
    while True:
        await look_at_jobs(holdfast, watcher)
        await asyncio.sleep(_COUNT_SECONDS)


async def _work(settings: Settings, watcher: PrometheusWatcher, queues: list[str]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    holdfast = create_holdfast(settings, watcher=watcher)
    unknown = sorted(set(queues) - set(holdfast.jobs.queues))
    if unknown:
        known = ", ".join(holdfast.jobs.queues)
        raise Failure(f"no service has jobs in queue {unknown[0]}: there are {known}", 2)
    worker = make_worker(holdfast, settings, watcher, queues=queues)
    try:
        await holdfast.open()
        await worker.start()
    except HoldfastError as error:
        await holdfast.close()
        raise Failure(f"{without_password(settings.database_url)}: {error}") from error
    release_collector()
    print(
        f"Holdfast works {', '.join(worker.queues)} of {without_password(settings.database_url)} "
        f"(pid {os.getpid()}, {worker.engine.name})",
        flush=True,
    )
    counting = asyncio.create_task(_count(holdfast, watcher))
    await stop.wait()
    counting.cancel()
    await worker.stop()
    await holdfast.close()
    return 0
