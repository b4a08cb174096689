"""The options of ``serve`` and ``token``, and the services' part of other commands."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from onceward.cli.worker import WorkerOptions
    from onceward.maintenance.retention import Retention
    from onceward.stores.tenant_tables import TenantTable

__all__ = ["default_worker", "register", "retention", "tenant_tables"]

_DATABASE = "sqlite:///onceward.db"


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``onceward``."""
    for command in (serve, token):
        app.command()(command)


def tenant_tables() -> "Mapping[str, Sequence[TenantTable]]":
    """Return the services' tables with rows of tenants, for ``onceward tenant``."""
    from onceward_services.registry import tenant_tables as of_services

    return of_services()


def retention() -> "Mapping[str, Sequence[Retention]]":
    """Return how long rows are kept, for ``onceward sweep``. All services share one database."""
    from onceward_services.settings import load_settings

    return {"walk": load_settings().retention()}


def serve(  # noqa: PLR0917 - typer turns them into options
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port.")
    ] = 8000,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_DATABASE_URL",
            metavar="URL",
            help="sqlite:///file.db or postgresql://…",
            show_default=_DATABASE,
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_REDIS_URL", metavar="URL", help="Redis server that caches records."
        ),
    ] = None,
    nats: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_NATS_URL",
            metavar="URL",
            help="NATS server that delivers jobs.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Number of server processes.")] = 1,
    no_jobs: Annotated[
        bool,
        typer.Option(
            "--no-jobs",
            help="Leave jobs to onceward worker. The hourly sweep of records still runs.",
        ),
    ] = False,
    require_durability: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_REQUIRE_DURABILITY",
            metavar="replicated",
            help="Refuse a database that does not wait for a synchronous standby.",
        ),
    ] = None,
) -> None:
    """Run all services.

    Prints one line with the address when it is ready. Ctrl-C or SIGTERM finishes running requests
    and exits with code 0. Every setting has an environment variable, ONCEWARD_…

    Examples:
        onceward serve

        onceward serve --port 0 --database sqlite:///try.db

        onceward serve --database postgresql://me@localhost/shop --workers 4

    """
    from onceward_services.cli.serve import run_server

    raise typer.Exit(
        run_server(
            host=host,
            port=port,
            workers=workers,
            database=database,
            redis=redis,
            nats=nats,
            no_jobs=no_jobs,
            require_durability=require_durability,
        )
    )


def default_worker(options: "WorkerOptions") -> int:
    """Run the jobs of all services: ``onceward worker`` without ``--app``."""
    from onceward_services.cli.worker import run_services_worker

    return run_services_worker(options)


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

    The token is signed with ONCEWARD_JWT_SECRET or, if that is not set, with the secret that the
    server keeps in .onceward (ONCEWARD_HOME). An App Check token is signed with the key pair kept
    there. Reports of steps accept an App Check token for five minutes.

    Examples:
        onceward token --sub ada

        curl -H "Authorization: Bearer $(onceward token --sub ada)" …

        curl -H "X-Firebase-AppCheck: $(onceward token --app-check)" …

    """
    from onceward_services.cli.tokens import make_token

    print(make_token(sub=sub, org=org, roles=role or [], app_check=app_check, hours=hours))
