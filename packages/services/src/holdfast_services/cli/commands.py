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
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port.")
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
        typer.Option(
            envvar="HOLDFAST_REDIS_URL", metavar="URL", help="Redis server that caches records."
        ),
    ] = None,
    nats: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_NATS_URL",
            metavar="URL",
            help="NATS server that delivers jobs.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Number of server processes.")] = 1,
    no_jobs: Annotated[
        bool,
        typer.Option(
            "--no-jobs",
            help="Leave jobs to holdfast worker. The hourly sweep of records still runs.",
        ),
    ] = False,
) -> None:
    """Run all services.

    Prints one line with the address when it is ready. Ctrl-C or SIGTERM finishes running requests
    and exits with code 0. Every setting has an environment variable, HOLDFAST_…

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
            envvar="HOLDFAST_NATS_URL",
            metavar="URL",
            help="NATS server that delivers jobs.",
        ),
    ] = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Run jobs of this queue only. May be repeated.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Number of jobs to run at the same time.",
            show_default="HOLDFAST_JOBS_CONCURRENCY or 8",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Serve Prometheus metrics on this loopback port.",
            show_default="off",
        ),
    ] = None,
) -> None:
    """Run the jobs of all services in a process of its own.

    Prints one line when it is ready. Ctrl-C or SIGTERM finishes the running jobs, releases those
    that do not end in time, and exits with code 0.

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
        typer.Option(help="Subject of the token: the walker or user. With --app-check, the app."),
    ] = None,
    org: Annotated[str | None, typer.Option(help="Organization of the subject.")] = None,
    role: Annotated[
        list[str] | None, typer.Option(help="Role of the subject. May be repeated.")
    ] = None,
    app_check: Annotated[
        bool, typer.Option("--app-check", help="Make an App Check token, for reports of steps.")
    ] = False,
    hours: Annotated[
        float | None,
        typer.Option(help="Lifetime in hours.", show_default="24, or 1 with --app-check"),
    ] = None,
) -> None:
    """Make a development token for the server of this directory.

    The token is signed with HOLDFAST_JWT_SECRET or, if that is not set, with the secret that the
    server keeps in .holdfast (HOLDFAST_HOME). An App Check token is signed with the key pair kept
    there. Reports of steps accept an App Check token for five minutes.

    For example:

        holdfast token --sub ada

        curl -H "Authorization: Bearer $(holdfast token --sub ada)" …

        curl -H "X-Firebase-AppCheck: $(holdfast token --app-check)" …
    """
    from holdfast_services.cli.tokens import make_token

    print(make_token(sub=sub, org=org, roles=role or [], app_check=app_check, hours=hours))
