"""``onceward worker`` without ``--app``: run the jobs of all services."""

import asyncio

from onceward.cli.worker import WorkerOptions, run_worker, serve_metrics
from onceward.errors import OncewardError
from onceward.observability.metrics import PrometheusMetrics
from onceward_protocol.cli.output import CommandError, print_warning, redact_password
from onceward_services.bootstrap import create_onceward
from onceward_services.cli.logs import configure_logging_from_settings
from onceward_services.jobs import make_worker
from onceward_services.settings import Settings, load_settings, unknown_variables

__all__ = ["run_services_worker"]


def run_services_worker(options: WorkerOptions) -> int:
    """Run jobs until SIGTERM or Ctrl-C; returns the exit code."""
    settings = load_settings(
        database_url=options.database,
        nats_url=options.nats,
        jobs_concurrency=options.concurrency,
        jobs_lease_seconds=options.lease_seconds,
        shutdown_seconds=options.drain_seconds,
        require_durability=options.require_durability,
    )
    for line in unknown_variables():
        print_warning(line)
    configure_logging_from_settings(settings)
    metrics = PrometheusMetrics()
    serve_metrics(metrics, options)
    return asyncio.run(_run(settings, metrics, options))


async def _run(settings: Settings, metrics: PrometheusMetrics, options: WorkerOptions) -> int:
    onceward = create_onceward(settings, metrics=metrics)
    queues = options.known_queues(onceward.jobs.queues)
    worker = make_worker(onceward, settings, metrics, queues=queues)
    try:
        await onceward.open()
    except OncewardError as error:
        raise CommandError(f"{redact_password(settings.database_url)}: {error}") from error
    return await run_worker(
        worker,
        where=redact_password(settings.database_url),
        once=options.once,
        close=onceward.close,
    )
