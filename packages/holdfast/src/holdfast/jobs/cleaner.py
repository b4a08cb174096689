"""Daily clean-up of the tables of jobs: what has had its time goes, in small batches."""

import asyncio
from typing import Final

from holdfast.jobs.job_store import JobStore

__all__ = ["clean_up"]

_BATCH: Final = 500
_PAUSE_SECONDS: Final = 0.005
_DAY_SECONDS: Final = 86_400.0


async def clean_up(
    table: JobStore, *, keep_done_days: float, keep_dead_days: float
) -> dict[str, int]:
    """Delete old markers, requeued dead letters, and steps and failures nobody needs any more.

    Dead letters that nobody has requeued stay: they wait for a person.
    """
    ages = {
        "clean_completions": keep_done_days,
        "clean_dead_letters": keep_dead_days,
        "clean_steps": keep_done_days,
        "clean_failures": keep_dead_days,
    }
    gone: dict[str, int] = {}
    for name, days in ages.items():
        what = name.removeprefix("clean_")
        gone[what] = 0
        while True:
            batch = await table.clean(name, older_than_seconds=days * _DAY_SECONDS, limit=_BATCH)
            gone[what] += batch
            if batch < _BATCH:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
    return gone
