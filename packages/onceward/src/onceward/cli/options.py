"""Options that several commands have."""

from typing import Annotated, Final

import typer

__all__ = [
    "DEFAULT_DATABASE",
    "App",
    "Database",
    "Environment",
    "Json",
    "Limit",
    "RedisUrl",
    "Tenant",
]

DEFAULT_DATABASE: Final = "sqlite:///onceward.db"

Database = Annotated[
    str,
    typer.Option(
        envvar="ONCEWARD_DATABASE_URL",
        metavar="URL",
        help="The server's database: sqlite:///file.db or postgresql://user@host/name.",
    ),
]
App = Annotated[
    str | None,
    typer.Option(
        "--app",
        envvar="ONCEWARD_APP",
        metavar="MODULE:NAME",
        help="Your app, such as shop.main:onceward: its database and tables instead of --database.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of text.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis",
        envvar="ONCEWARD_REDIS_URL",
        metavar="URL",
        help="The Redis server that caches records.",
    ),
]
Environment = Annotated[
    str,
    typer.Option(
        "--environment",
        envvar="ONCEWARD_ENVIRONMENT",
        help="The environment in the names of Redis keys.",
    ),
]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant. Default: all tenants.")]
Limit = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="The largest number of rows to show.")
]
