"""HTTP routes: submit a request for a route, read its status, and export a finished route."""

from datetime import datetime
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Response

from onceward import Onceward
from onceward.errors import NotFoundError, ServiceError
from onceward.frameworks.starlette import Run
from onceward.jobs.admin import JobAdmin
from onceward.jobs.job import JobState
from onceward_services.auth import CurrentPrincipal
from onceward_services.openapi import errors
from onceward_services.routes.exports import GEOJSON, GPX, route_geojson, route_gpx
from onceward_services.routes.jobs import generation_job_id
from onceward_services.routes.model import Place, RouteAccepted, RouteSubmission, RouteView, Status
from onceward_services.routes.repository import find_request, read_submission
from onceward_services.routes.submission import ENDPOINT, location, route_submissions
from onceward_services.routing import service_router
from onceward_services.settings import Settings

__all__ = ["NOT_FINISHED", "router"]

NOT_FINISHED: Final = "route.not_finished"

# The status by the state of the job, while the row is still queued.
_STATUS_BY_JOB: Final[dict[JobState | None, Status]] = {"running": "running", "dead": "failed"}
_PROBLEM: Final = {
    "application/problem+json": {"schema": {"$ref": "#/components/schemas/OncewardProblem"}}
}


def router(onceward: Onceward, settings: Settings) -> APIRouter:
    """Build the routes service."""
    service = route_submissions(onceward, settings)
    requests = _Requests(onceward)
    api = service_router("routes", prefix="/api/v1/routes")

    @api.post(
        "",
        status_code=202,
        summary="Submit a route request",
        responses={
            202: {
                "description": "Accepted. A replay has the same `request_id`.",
                "headers": {
                    "Location": {
                        "description": "The path of the request's status.",
                        "schema": {"type": "string"},
                    }
                },
            },
            **errors(),
        },
    )
    @onceward.guard(ENDPOINT, policy=settings.policies().routes)
    async def submit(submission: RouteSubmission, run: Run, response: Response) -> RouteAccepted:
        accepted = await service.accept(run, submission)
        response.headers["location"] = location(accepted.request_id)
        return accepted

    @api.get(
        "/{request_id}",
        summary="Read a route request",
        response_model_exclude_none=True,
        responses=errors(401, 404, 503),
    )
    async def read_one(request_id: str, caller: CurrentPrincipal) -> RouteView:
        return await requests.read(request_id, caller.tenant)

    @api.get(
        "/{request_id}/geojson",
        summary="Export a finished route as GeoJSON",
        description="The way in straight legs, the start and the places (RFC 7946).",
        response_class=Response,
        responses=_export(GEOJSON, {"type": "object"}),
    )
    async def geojson(request_id: str, caller: CurrentPrincipal) -> Response:
        start, route, _ = await requests.finished(request_id, caller.tenant)
        body = msgspec.json.encode(route_geojson(start, route))
        return Response(body, headers=_as_file(request_id, "geojson"), media_type=GEOJSON)

    @api.get(
        "/{request_id}/gpx",
        summary="Export a finished route as GPX",
        description="The places as way points, and the way as a route (GPX 1.1).",
        response_class=Response,
        responses=_export(GPX, {"type": "string"}),
    )
    async def gpx(request_id: str, caller: CurrentPrincipal) -> Response:
        start, route, created_at = await requests.finished(request_id, caller.tenant)
        body = route_gpx(request_id, created_at, start, route)
        return Response(body, headers=_as_file(request_id, "gpx"), media_type=GPX)

    return api


class _Requests:
    """Reads route requests of the store."""

    def __init__(self, onceward: Onceward) -> None:
        self._store = onceward.store
        self._job_admin = JobAdmin(onceward.store)

    async def read(self, request_id: str, tenant: str) -> RouteView:
        """Return a request with its current status. Raises ``NotFoundError``."""
        view = await self._find(request_id, tenant)
        if view.status == "queued":
            # The row changes when the route is saved. Until then the job has the newer state.
            state = await self._job_admin.state(
                generation_job_id(tenant, request_id), tenant=tenant
            )
            if state == "done":  # meanwhile
                return await self._find(request_id, tenant)
            view = view.model_copy(update={"status": _STATUS_BY_JOB.get(state, "queued")})
        return view

    async def finished(
        self, request_id: str, tenant: str
    ) -> tuple[Place, dict[str, Any], datetime]:
        """Return start, route and creation time. Raises ``ServiceError`` (409) before its end."""
        view = await self.read(request_id, tenant)
        payload = await read_submission(self._store, tenant=tenant, request_id=request_id)
        if view.route is None or payload is None:
            raise ServiceError(
                409,
                NOT_FINISHED,
                f"the route is not finished: its status is {view.status}",
                details={"status": view.status},
                retry_after_seconds=None if view.status == "failed" else 1,
            )
        submission = RouteSubmission.model_validate_json(payload)
        return submission.start, view.route, view.created_at

    async def _find(self, request_id: str, tenant: str) -> RouteView:
        found = await find_request(self._store, tenant=tenant, request_id=request_id)
        if found is None:
            raise NotFoundError("there is no such route request")
        return found


def _export(media_type: str, schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    return {
        200: {"description": "The route", "content": {media_type: {"schema": schema}}},
        **errors(401, 404, 503),
        409: {"description": f"Not finished: `{NOT_FINISHED}`", "content": _PROBLEM},
    }


def _as_file(request_id: str, extension: str) -> dict[str, str]:
    # The id of a request that was found has only digits, letters and hyphens.
    return {"content-disposition": f'attachment; filename="route-{request_id}.{extension}"'}
