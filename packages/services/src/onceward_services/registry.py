"""The list of services. Imports no web framework, so that every command can read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from onceward import ErrorFormat
from onceward.stores.tenant_tables import TenantTable

__all__ = [
    "SERVICES",
    "Service",
    "migration_packages",
    "prefix_of",
    "service_for_path",
    "tenant_tables",
]


@dataclass(frozen=True, slots=True)
class Service:
    """One service: its paths, its error format and the token claim that names its tenant.

    The package has ``api.py`` with ``router(onceward, settings)``, ``migrations/`` and, if it has
    jobs, ``jobs.py`` with ``register(onceward, settings)``.
    """

    name: str
    paths: tuple[str, ...]
    error_format: ErrorFormat
    tenant_claim: str
    # The tables with rows of tenants, which ``onceward tenant`` exports and erases.
    tables: tuple[str, ...]
    # True if bodies have the device's times, which are then in the log lines of requests.
    has_client_times: bool = False

    @property
    def package(self) -> str:
        """The import path of the service."""
        return f"onceward_services.{self.name}"


SERVICES: Final = (
    Service("routes", ("/api/v1/routes",), ErrorFormat.PROBLEM, "sub", ("route_requests",)),
    Service(
        "walk",
        ("/tree", "/quest", "/step", "/walker", "/energy", "/sync", "/admin"),
        ErrorFormat.ENVELOPE,
        "sub",
        (
            "walker_devices",
            "walk_reviews",
            "attestation_logs",
            "step_reports",
            "step_logs",
            "streak_states",
            "walker_events",
            "energy_ledger",
            "energy_holds",
            "tree_refunds",
            "tree_allocations",
            "quest_progress",
            "walkers",
        ),
        has_client_times=True,
    ),
    Service(
        "field",
        ("/api/v1/activities", "/api/v1/contacts", "/api/v1/expenses", "/api/v1/changes"),
        ErrorFormat.PROBLEM,
        "sub",
        ("field_items", "field_branches", "field_counters"),
    ),
    Service(
        "planning",
        ("/v1",),
        ErrorFormat.PROBLEM,
        "org",
        (
            "planning_search",
            # No attempt is added without its delivery.
            "planning_deliveries",
            "planning_delivery_attempts",
            "planning_webhooks",
            "planning_webhook_counts",
            "planning_notifications",
            "planning_inboxes",
            "planning_dashboards",
            "planning_assignments",
            "planning_missions",
            "planning_projects",
        ),
    ),
)


_BY_PATH: Final = {path: service for service in SERVICES for path in service.paths}
# What the paths below each path begin with, and its service.
_BELOW: Final = tuple((f"{path}/", service) for path, service in _BY_PATH.items())


def prefix_of(claim: str) -> str:
    """Return the prefix of a claim's tenants: a user and an organization may share a name."""
    return "" if claim == "sub" else f"{claim}:"


def migration_packages() -> list[tuple[str, str]]:
    """Return the name and the package of each service's migrations, for ``open_store``."""
    return [(service.name, f"{service.package}.migrations") for service in SERVICES]


def tenant_tables() -> Mapping[str, Sequence[TenantTable]]:
    """Return each service's tables by the name of its migrations, for ``onceward tenant``."""
    return {service.name: [TenantTable(name) for name in service.tables] for service in SERVICES}


def service_for_path(path: str) -> Service | None:
    """Return the service that has this path, or None."""
    found = _BY_PATH.get(path)
    if found is None:
        for below, service in _BELOW:
            if path.startswith(below):
                return service
    return found
