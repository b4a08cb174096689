"""HTTP routes: submit a request for a route, and read its status."""

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

# The status by the state of the job, while the row is still queued.
_STATUS_BY_JOB: Final[dict[JobState | None, Status]] = {"running": "running", "dead": "failed"}


def router(holdfast: Holdfast, settings: Settings) -> APIRouter:
    """Build the routes service."""
    job_admin = JobAdmin(holdfast.store)
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
        summary="Read a route request",
        response_model_exclude_none=True,
        responses=errors(401, 404, 503),
    )
    async def read_one(request_id: str, caller: CurrentPrincipal) -> RouteView:
        view = await _find(request_id, caller.tenant)
        if view.status == "queued":
            # The row changes when the route is saved. Until then the job has the newer state.
            state = await job_admin.state(
                generation_job_id(caller.tenant, request_id), tenant=caller.tenant
            )
            if state == "done":  # meanwhile
                return await _find(request_id, caller.tenant)
            view = view.model_copy(update={"status": _STATUS_BY_JOB.get(state, "queued")})
        return view

    async def _find(request_id: str, tenant: str) -> RouteView:
        found = await find_request(holdfast.store, tenant=tenant, request_id=request_id)
        if found is None:
            raise NotFoundError("there is no such route request")
        return found

    return api
