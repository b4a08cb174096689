"""The HTTP face of routes: ``POST /api/v1/routes`` and a look at what became of it."""

from typing import Final
from uuid import uuid4

from fastapi import APIRouter, Response

from holdfast import Holdfast
from holdfast.core.job import JobState
from holdfast.errors import NotFoundError
from holdfast.jobs.admin import JobAdmin
from holdfast.server.starlette import Caller, Run, Tx
from holdfast_services.auth import CurrentPrincipal
from holdfast_services.openapi import errors
from holdfast_services.routes.jobs import GENERATE, QUEUE, generation_job_id
from holdfast_services.routes.model import RouteAccepted, RouteSubmission, RouteView, Status
from holdfast_services.routes.repository import add_request, find_request
from holdfast_services.routing import service_router
from holdfast_services.settings import Settings

__all__ = ["router"]

# How the job that makes a route stands, as long as the row still says queued.
_STATUS_OF: Final[dict[JobState | None, Status]] = {"running": "running", "dead": "failed"}


def router(holdfast: Holdfast, settings: Settings) -> APIRouter:
    """Build the routes service."""
    desk = JobAdmin(holdfast.store)
    api = service_router("routes", prefix="/api/v1/routes")

    @api.post(
        "",
        status_code=202,
        summary="Ask for a route",
        responses={
            202: {
                "description": "Accepted. A replay is the same answer with the same `request_id`.",
                "headers": {
                    "Location": {
                        "description": "Where to look for the route.",
                        "schema": {"type": "string"},
                    }
                },
            },
            **errors(),
        },
    )
    @holdfast.guard("POST /api/v1/routes", policy=settings.policies().routes)
    async def submit(
        submission: RouteSubmission, tx: Tx, caller: Caller, run: Run, response: Response
    ) -> RouteAccepted:
        request_id = str(uuid4())
        await add_request(
            tx,
            tenant=caller.tenant,
            request_id=request_id,
            submission=submission,
            now=holdfast.clock.now(),
        )
        await holdfast.enqueue(
            GENERATE, {"request_id": request_id}, queue=QUEUE, resource_id=request_id
        )
        run.describe(resource=f"route:{request_id}")
        response.headers["location"] = f"/api/v1/routes/{request_id}"
        return RouteAccepted(request_id=request_id)

    @api.get(
        "/{request_id}",
        summary="See what became of it",
        response_model_exclude_none=True,
        responses=errors(401, 404, 503),
    )
    async def look(request_id: str, caller: CurrentPrincipal) -> RouteView:
        view = await _look(request_id, caller.tenant)
        if view.status == "queued":
            # The row changes when the route is made; until then the job knows more.
            state = await desk.state(
                generation_job_id(caller.tenant, request_id), tenant=caller.tenant
            )
            if state == "done":  # since we looked
                return await _look(request_id, caller.tenant)
            view = view.model_copy(update={"status": _STATUS_OF.get(state, "queued")})
        return view

    async def _look(request_id: str, tenant: str) -> RouteView:
        found = await find_request(holdfast.store, tenant=tenant, request_id=request_id)
        if found is None:
            raise NotFoundError("there is no such route request")
        return found

    return api
