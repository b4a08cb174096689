"""Guarded views of Flask and Django compared with bare ones, over HTTP, on PostgreSQL."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from onceward_lab.bench.idempotency import create_orders
from onceward_lab.bench.races import Contender, compared, gunicorn


def flask(url: str, rounds: int, seconds: float, step: Callable[[], None]) -> dict[str, Any]:
    """Load the same view bare and guarded, with SQLAlchemy and with psycopg alone."""
    asyncio.run(create_orders(url))
    contenders = []
    for name, app in (("SQLAlchemy", "sqlalchemy"), ("psycopg", "psycopg")):
        bare = Contender(f"{name}, bare", f"bare_{app}", url)
        bare.bare = bare
        contenders += [bare, Contender(f"{name}, guarded", f"guarded_{app}", url, bare=bare)]

    def command(contender: Contender) -> list[str]:
        return gunicorn(f"onceward_lab.bench.flask_apps:{contender.app}()", contender)

    return compared(contenders, rounds, seconds, step, command)


def django(
    database: Callable[[], str], rounds: int, seconds: float, step: Callable[[], None]
) -> dict[str, Any]:
    """Load the same view bare, guarded, and guarded with the key repeated."""
    bare, guarded = database(), database()
    for url in (bare, guarded):
        asyncio.run(create_orders(url))
    contenders = [
        Contender("bare", "bare", bare),
        Contender("guarded", "guarded", guarded),
        Contender("replays from the store", "guarded", guarded, replay=True),
    ]
    command = partial(gunicorn, "onceward_lab.bench.django_app:application")
    return compared(contenders, rounds, seconds, step, command)
