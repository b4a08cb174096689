"""HTTP routes of planning: aggregates, the audit log, notifications and webhooks."""

from fastapi import APIRouter

from holdfast import Holdfast
from holdfast_services.planning import (
    assignments,
    audit,
    missions,
    notifications,
    projects,
    webhook_api,
)
from holdfast_services.planning.aggregates import AggregateService
from holdfast_services.planning.read_cache import ReadCache
from holdfast_services.planning.roles import RoleRules
from holdfast_services.routing import service_router
from holdfast_services.settings import Settings

__all__ = ["router"]


def router(holdfast: Holdfast, settings: Settings) -> APIRouter:
    """Build the planning service."""
    service = AggregateService(
        holdfast,
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
