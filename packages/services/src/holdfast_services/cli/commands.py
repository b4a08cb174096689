"""The options of ``holdfast serve``, ``worker`` and ``token``."""

from typing import Annotated

import typer

__all__ = ["register"]

_DATABASE = "sqlite:///holdfast.db"


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``holdfast``."""
    for command in (serve, worker, token):
        app.command()(command)


def serve(  # noqa: PLR0917 - typer turns them into options
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_DATABASE_URL",
            metavar="URL",
            help="sqlite:///file.db or postgresql://…",
            show_default=_DATABASE,
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(envvar="HOLDFAST_REDIS_URL", metavar="URL", help="Adds a cache of records."),
    ] = None,
    nats: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_NATS_URL", metavar="URL", help="Brings jobs to workers by JetStream."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes to serve with.")] = 1,
    no_jobs: Annotated[
        bool,
        typer.Option(
            "--no-jobs",
            help="Do not run jobs here: leave them to holdfast worker. The hourly sweep stays.",
        ),
    ] = False,
) -> None:
    """Run all services.

    Prints one line with the address when it is ready. Ctrl-C or SIGTERM finishes what is running
    and ends with exit code 0. Every setting has a variable, HOLDFAST_…

    For example:

        holdfast serve

        holdfast serve --port 0 --database sqlite:///try.db

        holdfast serve --database postgresql://me@localhost/shop --workers 4
    """
    from holdfast_services.cli.serve import run_server

    raise typer.Exit(
        run_server(
            host=host,
            port=port,
            workers=workers,
            database=database,
            redis=redis,
            nats=nats,
            no_jobs=no_jobs,
        )
    )


def worker(
    database: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_DATABASE_URL",
            metavar="URL",
            help="sqlite:///file.db or postgresql://…",
            show_default=_DATABASE,
        ),
    ] = None,
    nats: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_NATS_URL", metavar="URL", help="Brings jobs to workers by JetStream."
        ),
    ] = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Only this queue. May be repeated.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Jobs at a time.",
            show_default="HOLDFAST_JOBS_CONCURRENCY or 8",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Tell Prometheus here, on loopback.", show_default="no"
        ),
    ] = None,
) -> None:
    """Run the jobs of all services, beside holdfast serve or instead of its own worker.

    Prints one line when it is ready. Ctrl-C or SIGTERM finishes the jobs that are running, gives
    back those that do not end in time, and ends with exit code 0.

    For example:

        holdfast worker --database postgresql://me@localhost/shop

        holdfast worker --queue routes --concurrency 4
    """
    from holdfast_services.cli.worker import run_worker

    raise typer.Exit(
        run_worker(
            database=database,
            nats=nats,
            queues=queue or [],
            concurrency=concurrency,
            metrics_port=metrics_port,
        )
    )


def token(
    sub: Annotated[
        str | None,
        typer.Option(help="Who signs in: the walker or user. With --app-check, the app."),
    ] = None,
    org: Annotated[str | None, typer.Option(help="Their organization.")] = None,
    role: Annotated[list[str] | None, typer.Option(help="A role. May be repeated.")] = None,
    app_check: Annotated[
        bool, typer.Option("--app-check", help="An App Check token instead, for reports of steps.")
    ] = False,
    hours: Annotated[
        float | None, typer.Option(help="How long it holds.", show_default="24, or 1 of App Check")
    ] = None,
) -> None:
    """Make a development token for the server of this directory.

    It is signed with HOLDFAST_JWT_SECRET or, without one, with the secret the server keeps in
    .holdfast (HOLDFAST_HOME). An App Check token is signed with the key pair kept there, and a
    report of steps takes it for five minutes.

    For example:

        holdfast token --sub ada

        curl -H "Authorization: Bearer $(holdfast token --sub ada)" …

        curl -H "X-Firebase-AppCheck: $(holdfast token --app-check)" …
    """
    from holdfast_services.cli.tokens import make_token

    print(make_token(sub=sub, org=org, roles=role or [], app_check=app_check, hours=hours))
