"""``onceward worker --app``: runs jobs, drains on a signal, restarts when the code changes."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest

from onceward import open_store
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job_store import JobStore
from onceward.stores.parts import JOBS
from onceward_protocol.cli import plugins
from packages.onceward.tests.cli.test_app_option import APP, write_module
from packages.onceward.tests.support.serving import free_port
from packages.protocol.tests.cli.harness import Here, environment, one_line

ROOT = Path(__file__).parents[4]

SLEEPY = """
import asyncio
from onceward import Onceward

onceward = Onceward("sqlite:///app.db")

@onceward.jobs.handler("sleep", queue="naps")
async def sleep(job):
    print("started", job.id, flush=True)
    await asyncio.sleep(job.payload)
    return {"version": 1}

@onceward.jobs.handler("other")
async def other(job):
    raise AssertionError("not a job of this queue")
"""
Work = Callable[..., subprocess.Popen[str]]


def enqueue(directory: Path, job_type: str, payload: Any, *, queue: str) -> str:
    """Enqueue a job in the database of the app and return its id."""

    async def run() -> str:
        store = open_store(f"sqlite:///{directory}/app.db")
        store.schema.want(JOBS)
        await store.open()
        job_store = JobStore(store)
        job = new_job(job_type, payload, queue=queue, cause=Cause("ada", "test", "r-1", "c-1"))
        async with job_store.transaction() as tx:
            await job_store.enqueue(tx, job)
        await store.close()
        return job.id

    return asyncio.run(run())


def job(here: Here, job_id: str) -> Any:
    return json.loads(
        here("jobs", "show", job_id, "--database", "sqlite:///app.db", "--json").stdout
    )


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    """Return a function that starts ``onceward worker`` and waits until it is ready."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "onceward.cli", "worker", *arguments],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Onceward runs jobs of ")
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_worker_once_runs_due_jobs_of_the_app_and_exits(here: Here, tmp_path: Path) -> None:
    app = f"{write_module(tmp_path, APP)}:onceward"
    ids = [enqueue(tmp_path, "greet", n, queue="greetings") for n in range(3)]
    done = here("worker", "--app", app, "--once", "--concurrency", "2")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().startswith(f"Onceward runs jobs of greetings on {app} (pid ")
    assert [job(here, job_id)["result"] for job_id in ids] == [{"hello": n} for n in range(3)]


def test_worker_drains_on_a_signal(here: Here, tmp_path: Path, work: Work) -> None:
    app = f"{write_module(tmp_path, SLEEPY)}:onceward"
    other = enqueue(tmp_path, "other", None, queue="default")
    job_id = enqueue(tmp_path, "sleep", 0.5, queue="naps")
    process = work("--app", app, "--queues", "naps")
    assert process.stdout is not None
    assert process.stdout.readline() == f"started {job_id}\n"
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 0
    assert one_line(error.encode()).startswith("onceward: finishing 1 running job; signal again")
    assert (job(here, job_id)["state"], job(here, other)["state"]) == ("done", "waiting")


def test_second_signal_releases_the_running_job_at_once(
    here: Here, tmp_path: Path, work: Work
) -> None:
    app = f"{write_module(tmp_path, SLEEPY)}:onceward"
    job_id = enqueue(tmp_path, "sleep", 60, queue="naps")
    process = work("--app", app)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == f"started {job_id}\n"
    process.send_signal(signal.SIGINT)
    process.stderr.readline()
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert time.monotonic() - started < 5, "it waited for the job"
    found = job(here, job_id)
    assert (found["state"], found["attempts"], found["failures"]) == ("waiting", 0, [])


def test_worker_serves_metrics_that_the_alert_on_sweeps_does_not_match(
    here: Here, tmp_path: Path, work: Work
) -> None:
    """A worker does not sweep."""
    app = f"{write_module(tmp_path, SLEEPY)}:onceward"
    port = free_port()
    job_id = enqueue(tmp_path, "sleep", 60, queue="naps")
    lease = ("--lease-seconds", "600")
    process = work("--app", app, *lease, "--metrics-port", str(port))
    assert process.stdout is not None
    assert process.stdout.readline() == f"started {job_id}\n"
    due = datetime.fromisoformat(job(here, job_id)["due_at"])
    assert 300 < (due - datetime.now(UTC)).total_seconds() <= 600
    assert httpx.get(f"http://127.0.0.1:{port}/metrics").text.count("onceward_commit_failures") > 1
    scraped = set(re.findall(r"^(\w+)", httpx.get(f"http://127.0.0.1:{port}").text, re.MULTILINE))
    rules = (ROOT / "docs/operations/prometheus-alerts.yml").read_text(encoding="utf-8")
    rule = rules.partition("alert: OncewardSweepDoesNotRun\n")[2].partition("alert:")[0]
    named = set(re.findall(r"onceward_\w+", rule))
    assert named
    assert not named & scraped


def test_reload_restarts_the_worker_with_the_new_code(
    here: Here, tmp_path: Path, work: Work
) -> None:
    module = write_module(tmp_path, SLEEPY)
    process = work("--app", f"{module}:onceward", "--reload")
    assert process.stdout is not None
    assert process.stderr is not None
    file = tmp_path / f"{module}.py"
    file.write_text("raise RuntimeError('half written')\n")
    assert f"{module}.py has changed: restarting" in process.stderr.readline()
    assert "RuntimeError: half written" in process.stderr.readline()
    assert "starts again when a file changes" in process.stderr.readline()
    file.write_text(SLEEPY.replace('"version": 1', '"version": 2'))
    assert process.stdout.readline().startswith("Onceward runs jobs of ")
    job_id = enqueue(tmp_path, "sleep", 0, queue="naps")
    while job(here, job_id)["state"] != "done":
        time.sleep(0.02)
    assert job(here, job_id)["result"] == {"version": 2}
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--queue", "naps,nowhere"], "unknown queue nowhere: the queues are default, naps"),
        (["--once", "--reload"], "give --once or --reload, not both"),
        (["--database", "sqlite:///x.db"], "give --app or --database, not both"),
        (["--metrics-port", "0"], "Invalid value for '--metrics-port'"),
        (["--lease-seconds", "0"], "Invalid value for '--lease-seconds'"),
        (["--require-durability", "twice"], "--require-durability should be replicated, not twice"),
        (["--require-durability", "replicated"], "--require-durability needs PostgresStore"),
    ],
)
def test_worker_with_bad_options_is_an_error_in_one_line(
    here: Here, tmp_path: Path, arguments: list[str], line: str
) -> None:
    app = f"{write_module(tmp_path, SLEEPY)}:onceward"
    done = here("worker", "--app", app, *arguments)
    assert done.returncode == 2
    assert line in one_line(done.stderr)


def test_worker_serves_metrics_on_the_given_address(here: Here, tmp_path: Path) -> None:
    app = f"{write_module(tmp_path, SLEEPY)}:onceward"
    # An address for documentation: no machine has it.
    done = here(
        "worker", "--app", app, "--once", "--metrics-port", "9100", "--metrics-host", "192.0.2.1"
    )
    assert done.returncode == 1
    assert one_line(done.stderr).startswith("onceward: cannot listen on 192.0.2.1 port 9100: ")


def test_worker_of_an_app_without_jobs_is_an_error(here: Here, tmp_path: Path) -> None:
    code = "from onceward import Onceward\nonceward = Onceward('sqlite:///app.db')\n"
    done = here("worker", "--app", f"{write_module(tmp_path, code)}:onceward")
    assert (done.returncode, done.stdout) == (2, b"")
    assert "has no job handlers" in one_line(done.stderr)


def test_worker_of_an_unreachable_database_is_an_error(here: Here, tmp_path: Path) -> None:
    code = APP.replace("sqlite:///app.db", "postgresql://127.0.0.1:1/none")
    app = f"{write_module(tmp_path, code)}:onceward"
    done = here("worker", "--app", app)
    assert (done.returncode, done.stdout) == (1, b"")
    assert one_line(done.stderr).startswith(f"onceward: {app}: ")


def test_worker_of_a_database_that_is_not_replicated_as_required_is_an_error(
    here: Here, tmp_path: Path, postgres_url: str
) -> None:
    code = APP.replace("sqlite:///app.db", postgres_url)
    required, other = (f"{write_module(tmp_path, code)}:onceward" for _ in range(2))
    done = here("worker", "--app", required, "--once", "--require-durability", "replicated")
    assert (done.returncode, done.stdout) == (1, b"")
    assert "set synchronous_standby_names" in one_line(done.stderr)
    assert here("worker", "--app", other, "--once").returncode == 0


def test_worker_without_app_names_the_option_where_no_package_has_jobs(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = entry_points(group=plugins.GROUP, name="onceward")
    monkeypatch.setattr(plugins, "_installed", lambda: library)
    done = here("worker")
    assert done.returncode == 2
    assert "onceward worker --app MODULE:NAME" in one_line(done.stderr)
    assert "onceward-services" in one_line(done.stderr)


def test_worker_without_app_is_refused_in_a_django_project(here: Here, tmp_path: Path) -> None:
    done = here("worker", "--once", DJANGO_SETTINGS_MODULE="settings")
    assert (done.returncode, done.stdout) == (2, b"")
    line = one_line(done.stderr)
    assert "DJANGO_SETTINGS_MODULE is set" in line
    assert "onceward worker --app MODULE:NAME" in line
    assert list(tmp_path.iterdir()) == []
