"""``onceward worker`` and the worker of ``onceward serve``, as processes."""

import json
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import ONCEWARD, ROUTES, WALK, Cli, Here, Server, environment, one_line, token

KEY = {"Idempotency-Key": "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"}
Serve = Callable[..., Server]


class WorkerProcess:
    def __init__(self, directory: Path, *arguments: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [ONCEWARD, "worker", *arguments],
            cwd=directory,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0], "not ready in time"
        self.line = self.process.stdout.readline().decode().rstrip("\n")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    workers: list[WorkerProcess] = []

    def start(*arguments: str, **variables: Any) -> WorkerProcess:
        workers.append(WorkerProcess(tmp_path, *arguments, **variables))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def finished(client: httpx.Client, location: str) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while True:
        view: dict[str, Any] = client.get(location).json()
        if view["status"] in ("done", "failed"):
            return view
        assert view["status"] in ("queued", "running")
        assert time.monotonic() < deadline, view
        time.sleep(0.02)


def test_server_runs_jobs(cli: Cli, serve: Serve) -> None:
    server = serve()
    with server.client(token(cli)) as client:
        accepted = client.post(ROUTES, json=WALK, headers=KEY)
        view = finished(client, accepted.headers["location"])
        assert view["status"] == "done"
        assert view["route"]["duration_minutes"] <= WALK["minutes"]
        again = client.post(ROUTES, json=WALK, headers=KEY)
        assert again.content == accepted.content
        metrics = client.get("/metrics").text
    assert (
        'onceward_job_seconds_count{outcome="done",queue="routes",type="route.generate"} 1.0'
        in (metrics)
    )
    assert server.stop() == 0
    jobs = json.loads(cli("jobs", "ls", "--queue", "routes", "--json").stdout)
    assert [(job["state"], job["tenant"]) for job in jobs] == [("done", "ada")]


def test_server_with_no_jobs_leaves_jobs_to_a_worker(
    cli: Cli, serve: Serve, work: Callable[..., WorkerProcess]
) -> None:
    server = serve("--no-jobs")
    with server.client(token(cli)) as client:
        accepted = client.post(ROUTES, json=WALK, headers=KEY)
        location = accepted.headers["location"]
        assert client.get(location).json()["status"] == "queued"
        waiting = json.loads(cli("jobs", "ls", "--json").stdout)
        assert [job["state"] for job in waiting] == ["waiting"]

        worker = work("--queue", "routes", "--concurrency", "2")
        assert worker.line.startswith("Onceward runs jobs of routes on sqlite:///onceward.db (pid ")
        assert finished(client, location)["status"] == "done"
        # A notification wakes the worker: this is faster than polling.
        started = time.monotonic()
        other = client.post(ROUTES, json=WALK | {"minutes": 30}).headers["location"]
        assert finished(client, other)["status"] == "done"
        print(f"from the response to the route: {time.monotonic() - started:.3f} s")
    assert worker.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_worker_stops_on_a_signal_with_exit_code_0(
    work: Callable[..., WorkerProcess], number: signal.Signals
) -> None:
    worker = work("--database", "sqlite:///idle.db")
    assert "housekeeping" in worker.line
    assert worker.stop(number) == 0


def test_worker_serves_metrics_on_the_given_port(
    work: Callable[..., WorkerProcess], unused_tcp_port: int
) -> None:
    work("--database", "sqlite:///metrics.db", "--metrics-port", str(unused_tcp_port))
    deadline = time.monotonic() + 30
    while True:
        result = httpx.get(f"http://127.0.0.1:{unused_tcp_port}/metrics").text
        if 'outcome="done",queue="housekeeping"' in result:
            break
        assert time.monotonic() < deadline, result
        time.sleep(0.05)


def test_worker_for_an_unknown_queue_is_an_error(here: Here) -> None:
    result = here("worker", "--queue", "missing")
    assert result.returncode == 2
    assert "unknown queue missing" in one_line(result.stderr)


def test_worker_without_database_is_reported_in_one_line(here: Here) -> None:
    result = here("worker", "--database", "postgresql://127.0.0.1:1/none")
    assert result.returncode == 1
    assert "postgresql://127.0.0.1:1/none" in one_line(result.stderr)


def test_two_server_processes_sweep_once_per_slot(cli: Cli, serve: Serve) -> None:
    server = serve("--workers", "2")
    with server.client(token(cli)) as client:
        accepted = client.post(ROUTES, json=WALK, headers=KEY)
        assert finished(client, accepted.headers["location"])["status"] == "done"
    deadline = time.monotonic() + 30
    while True:
        done = json.loads(cli("jobs", "ls", "--queue", "housekeeping", "--json").stdout)
        if len(done) >= 2 and all(job["state"] == "done" for job in done):
            break
        assert time.monotonic() < deadline, done
        time.sleep(0.1)
    slots = [(job["type"], job["resource_id"]) for job in done]
    assert len(slots) == len(set(slots))
    assert server.stop() == 0
