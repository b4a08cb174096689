"""Deletes old rows from the job tables, in small batches."""

import asyncio
from typing import Final

from onceward.jobs.job_store import JobStore

__all__ = ["clean_up"]

_BATCH: Final = 500
_PAUSE_SECONDS: Final = 0.005
_DAY_SECONDS: Final = 86_400.0


async def clean_up(
    job_store: JobStore, *, keep_done_days: float, keep_dead_days: float
) -> dict[str, int]:
    """Delete old completions, requeued dead letters, steps, failures and causes; return the counts.

    Dead letters that were not requeued stay until an operator decides about them.
    """
    ages = {
        "clean_completions": keep_done_days,
        "clean_dead_letters": keep_dead_days,
        "clean_steps": keep_done_days,
        "clean_failures": keep_dead_days,
        # After the completions: those of a job are kept as long as anything else of it.
        "clean_causes": keep_done_days,
    }
    deleted: dict[str, int] = {}
    for name, days in ages.items():
        what = name.removeprefix("clean_")
        deleted[what] = 0
        while True:
            batch = await job_store.clean(
                name, older_than_seconds=days * _DAY_SECONDS, limit=_BATCH
            )
            deleted[what] += batch
            if batch < _BATCH:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
    return deleted
