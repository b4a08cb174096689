"""The jobs that send webhooks about reviews and pushes to devices."""

from typing import Any, Final

from onceward import Onceward
from onceward.jobs.context import JobContext
from onceward_services.settings import Settings
from onceward_services.walk.announcements import NOTIFY_REVIEW
from onceward_services.walk.push.delivery import PUSH, push_to_device
from onceward_services.walk.review_webhook import notify_of_review

__all__ = ["register_message_jobs"]

# More than the time-outs of all requests of a job.
_NOTIFY_SECONDS: Final = 120
_PUSH_SECONDS: Final = 3600


def register_message_jobs(onceward: Onceward, settings: Settings, *, queue: str) -> None:
    """Register the handlers. Raises ``ConfigurationError`` for credentials that cannot be read."""
    jobs = onceward.jobs
    sender, push = settings.webhook_sender(), settings.create_push()

    @jobs.handler(PUSH, queue=queue, time_limit_seconds=_PUSH_SECONDS)
    async def push_events(job: JobContext) -> dict[str, Any]:
        if push is None:  # switched off since the job was enqueued
            return {"pushed": 0}
        return await push_to_device(job, onceward.store, push, now=onceward.clock.now())

    @jobs.handler(NOTIFY_REVIEW, queue=queue, time_limit_seconds=_NOTIFY_SECONDS)
    async def notify(job: JobContext) -> Any:
        url, secret = settings.walk_review_webhook_url, settings.walk_review_webhook_secret
        if url is None or secret is None:  # switched off since the job was enqueued
            return None
        now = onceward.clock.now()
        return await notify_of_review(job, onceward.store, sender, url=url, secret=secret, now=now)
