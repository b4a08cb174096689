"""The job that plans the route of a submission."""

import asyncio
from typing import Final

from holdfast import Holdfast
from holdfast.core.job import job_id, job_key
from holdfast.errors import NonRetryableError
from holdfast.jobs.context import JobContext
from holdfast_services.routes.catalogue import bundled_places
from holdfast_services.routes.geo import Point
from holdfast_services.routes.model import RouteSubmission
from holdfast_services.routes.planner import plan_route
from holdfast_services.routes.repository import read_submission, save_route
from holdfast_services.settings import Settings

__all__ = ["GENERATE", "QUEUE", "generation_job_id", "register"]

QUEUE: Final = "routes"
GENERATE: Final = "route.generate"


def generation_job_id(tenant: str, request_id: str) -> str:
    """Return the id of the job that plans this submission's route."""
    return job_id(job_key(tenant, QUEUE, GENERATE, request_id))


def register(holdfast: Holdfast, _settings: Settings) -> None:
    """Register the job handler."""

    @holdfast.jobs.handler(GENERATE, queue=QUEUE, time_limit_seconds=60)
    async def generate(job: JobContext) -> None:
        request_id = str(job.payload["request_id"])
        payload = await read_submission(holdfast.store, tenant=job.tenant, request_id=request_id)
        if payload is None:
            raise NonRetryableError(f"there is no submission {request_id}")
        submission = RouteSubmission.model_validate_json(payload)
        # About 10 ms of CPU, so not on the event loop.
        route = await asyncio.to_thread(
            plan_route,
            Point(submission.start.lat, submission.start.lon),
            submission.minutes,
            submission.interests,
            bundled_places(),
        )
        await save_route(
            job.transaction,
            tenant=job.tenant,
            request_id=request_id,
            route=route.as_json(),
            now=holdfast.clock.now(),
        )
