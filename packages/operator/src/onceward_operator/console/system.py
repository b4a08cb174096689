"""The page about the server itself: versions, settings, migrations, database."""

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Final

from onceward.app import Onceward
from onceward.ports import Store
from onceward_operator.console.access import Role
from onceward_operator.console.page import Page, PageRequest, Shown

__all__ = ["ReadSettings", "system_page"]

# Returns the settings of the app: by heading, the values by name. Secrets are left out by the app.
ReadSettings = Callable[[], Mapping[str, Mapping[str, str]]]

_DATABASE: Final = {
    "sqlite": "SELECT 'SQLite ' || sqlite_version() AS name",
    "postgresql": "SELECT 'PostgreSQL ' || current_setting('server_version') AS name",
}
_DURABILITY: Final = {
    "sqlite": (),
    "postgresql": (
        "fsync",
        "full_page_writes",
        "synchronous_commit",
        "synchronous_standby_names",
    ),
}


def system_page(onceward: Onceward[Any], settings: ReadSettings | None) -> Page:
    """Return the page, which is for administrators of all tenants."""

    async def show(request: PageRequest) -> Shown:
        store = request.store
        return Shown(
            "system.html",
            {
                "versions": [
                    ("Onceward", version("onceward")),
                    ("Python", platform.python_version()),
                    ("Database", (await store.read(_DATABASE[store.name]))[0]["name"]),
                ],
                "durability": await _durability(store),
                "migrations": await _migrations(store),
                "settings": settings() if settings is not None else {},
                "breaker": onceward.runtime.idempotency.breaker.state.value,
            },
        )

    return Page(
        "system",
        show,
        title="System",
        group="Server",
        role=Role.ADMIN,
        needs_all_tenants=True,
    )


async def _durability(store: Store) -> list[tuple[str, str]]:
    if store.name == "sqlite":
        return [("synchronous", "full: every commit is on the disk before it is acknowledged")]
    found = []
    for name in _DURABILITY[store.name]:
        rows = await store.read("SELECT current_setting(:name) AS value", {"name": name})
        found.append((name, rows[0]["value"] or "none"))
    standbys = await store.read(
        "SELECT coalesce(application_name, '') AS name, coalesce(state, '') AS state,"
        " coalesce(sync_state, '') AS sync FROM pg_stat_replication"
    )
    found += [(f"standby {row['name']}", f"{row['state']}, {row['sync']}") for row in standbys]
    return found


async def _migrations(store: Store) -> list[tuple[str, int]]:
    table = store.table_names.table("migrations")
    rows = await store.read(
        f"SELECT namespace, max(number) AS number FROM {table}"  # noqa: S608 - a checked name
        " GROUP BY namespace ORDER BY namespace"
    )
    return [(row["namespace"], row["number"]) for row in rows]
