"""``holdfast worker``: run jobs in a process of its own."""

import asyncio
import os
import signal
from typing import Final

from prometheus_client import start_http_server

from holdfast import Holdfast
from holdfast.cli.gc import resume_gc
from holdfast.cli.output import CommandError, print_warning, redact_password
from holdfast.errors import HoldfastError
from holdfast.observability.metrics import PrometheusMetrics
from holdfast_services.bootstrap import create_holdfast
from holdfast_services.cli.logs import configure_logging_from_settings
from holdfast_services.jobs import make_worker, report_queue_depths
from holdfast_services.settings import Settings, load_settings, unknown_variables

__all__ = ["run_worker"]

_DEPTH_SECONDS: Final = 15.0


def run_worker(
    *,
    database: str | None,
    nats: str | None,
    queues: list[str],
    concurrency: int | None,
    metrics_port: int | None,
) -> int:
    """Run jobs until SIGTERM or Ctrl-C; returns the exit code."""
    settings = load_settings(database_url=database, nats_url=nats, jobs_concurrency=concurrency)
    for line in unknown_variables():
        print_warning(line)
    configure_logging_from_settings(settings)
    metrics = PrometheusMetrics()
    if metrics_port is not None:
        try:
            start_http_server(metrics_port, "127.0.0.1", metrics.registry)
        except OSError as error:
            raise CommandError(f"cannot listen on port {metrics_port}: {error.strerror}") from error
    return asyncio.run(_run(settings, metrics, queues))


async def _report_depths(holdfast: Holdfast, metrics: PrometheusMetrics) -> None:
    """Update the queue depth metrics regularly. A server updates them on each scrape instead."""
    while True:
        await report_queue_depths(holdfast, metrics)
        await asyncio.sleep(_DEPTH_SECONDS)


async def _run(settings: Settings, metrics: PrometheusMetrics, queues: list[str]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    holdfast = create_holdfast(settings, metrics=metrics)
    unknown = sorted(set(queues) - set(holdfast.jobs.queues))
    if unknown:
        known = ", ".join(holdfast.jobs.queues)
        raise CommandError(f"unknown queue {unknown[0]}: the queues are {known}", 2)
    worker = make_worker(holdfast, settings, metrics, queues=queues)
    try:
        await holdfast.open()
        await worker.start()
    except HoldfastError as error:
        await holdfast.close()
        raise CommandError(f"{redact_password(settings.database_url)}: {error}") from error
    resume_gc()
    print(
        f"Holdfast runs jobs of {', '.join(worker.queues)} "
        f"on {redact_password(settings.database_url)} "
        f"(pid {os.getpid()}, {worker.engine.name})",
        flush=True,
    )
    reporting = asyncio.create_task(_report_depths(holdfast, metrics))
    await stop.wait()
    reporting.cancel()
    await worker.stop()
    await holdfast.close()
    return 0
