"""Deletes old rows from the job tables, in small batches."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from onceward.jobs.job_store import JobStore

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
        "completions": keep_done_days,
        "dead_letters": keep_dead_days,
        "steps": keep_done_days,
        "failures": keep_dead_days,
        # After the completions: those of a job are kept as long as anything else of it.
        "causes": keep_done_days,
    }
    return {
        what: await delete_in_batches(
            partial(job_store.clean, f"clean_{what}", older_than_seconds=days * _DAY_SECONDS)
        )
        for what, days in ages.items()
    }


async def delete_in_batches(delete: Callable[..., Awaitable[int]]) -> int:
    """Call ``delete(limit=…)`` until it finds fewer rows than the limit; return how many it found.

    Each batch commits alone, and between two of them others can write.
    """
    deleted = 0
    while True:
        batch = await delete(limit=_BATCH)
        deleted += batch
        if batch < _BATCH:
            return deleted
        await asyncio.sleep(_PAUSE_SECONDS)
