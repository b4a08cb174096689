"""The job that plans the route of a submission."""

import asyncio
from typing import Final

from onceward import Onceward
from onceward.errors import NonRetryableError
from onceward.jobs.context import JobContext
from onceward.jobs.job import job_id, job_key
from onceward_services.routes.catalogue import bundled_places
from onceward_services.routes.geo import Point
from onceward_services.routes.model import RouteSubmission
from onceward_services.routes.planner import plan_route
from onceward_services.routes.repository import read_submission, save_route
from onceward_services.settings import Settings

__all__ = ["GENERATE", "QUEUE", "generation_job_id", "register"]

QUEUE: Final = "routes"
GENERATE: Final = "route.generate"


def generation_job_id(tenant: str, request_id: str) -> str:
    """Return the id of the job that plans this submission's route."""
    return job_id(job_key(tenant, QUEUE, GENERATE, request_id))


def register(onceward: Onceward, _settings: Settings) -> None:
    """Register the job handler."""

    @onceward.jobs.handler(GENERATE, queue=QUEUE, time_limit_seconds=60)
    async def generate(job: JobContext) -> None:
        request_id = str(job.payload["request_id"])
        payload = await read_submission(onceward.store, tenant=job.tenant, request_id=request_id)
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
            now=onceward.clock.now(),
        )
