"""A guarded Django view compared with the bare one, over HTTP: gunicorn, one worker, 16 threads."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast_lab.bench.idempotency import create_orders
from holdfast_lab.bench.races import Contender, free_port, race, ratio, wait_until_up


def django(
    database: Callable[[], str], rounds: int, seconds: float, step: Callable[[], None]
) -> dict[str, Any]:
    """Load the same view bare, guarded, and guarded with the key repeated."""
    bare, guarded = database(), database()
    for url in (bare, guarded):
        asyncio.run(create_orders(url))
    contenders = [
        Contender("bare", "0", bare),
        Contender("guarded", "1", guarded),
        Contender("replays from the store", "1", guarded, replay=True),
    ]
    with _served(contenders):
        race(contenders, rounds, seconds, step)
    results = {}
    for contender in contenders:
        middle, least, most = ratio(contender, contenders[0])
        results[contender.name] = {
            "ratio": round(middle, 3),
            "least": round(least, 3),
            "most": round(most, 3),
            "per_second": round(contender.median, 1),
        }
    return results


@contextmanager
def _served(contenders: list[Contender]) -> Iterator[None]:
    """Start one server per contender; all stay up, and one at a time is under load."""
    processes = []
    try:
        for contender in contenders:
            contender.port = free_port()
            command = [sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{contender.port}"]
            command += ["--worker-class", "gthread", "--workers", "1", "--threads", "16"]
            command += ["--keep-alive", "75", "--log-level", "warning"]
            command.append("holdfast_lab.bench.django_app:application")
            environment = {
                **os.environ,
                "BENCH_DATABASE": contender.database,
                "BENCH_GUARDED": contender.app,
            }
            processes.append(subprocess.Popen(command, env=environment))
        for contender in contenders:
            wait_until_up(contender.port)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
