"""HTTP routes of planning: aggregates, the audit log, notifications and webhooks."""

from fastapi import APIRouter

from onceward import Onceward
from onceward_services.planning import (
    assignments,
    audit,
    missions,
    notifications,
    projects,
    webhook_api,
)
from onceward_services.planning.aggregates import AggregateService
from onceward_services.planning.read_cache import ReadCache
from onceward_services.planning.roles import RoleRules
from onceward_services.routing import service_router
from onceward_services.settings import Settings

__all__ = ["router"]


def router(onceward: Onceward, settings: Settings) -> APIRouter:
    """Build the planning service."""
    service = AggregateService(
        onceward,
        settings.policies().planning,
        ReadCache(settings.planning_cache_bytes),
        RoleRules(required=settings.planning_roles_required),
    )
    api = service_router("planning", prefix="/v1")
    for part in (projects, missions, assignments, audit):
        part.add_routes(api, service)
    for with_settings in (notifications, webhook_api):
        with_settings.add_routes(api, service, settings)
    return api
