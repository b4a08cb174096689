"""``onceward serve`` as a process: requests, restart, kill, several processes, startup errors."""

import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from onceward.sign_in.jwt_keys import SAMPLE_SECRETS
from onceward_protocol.cli.output import CommandError
from onceward_services.cli.serve import _bind
from onceward_services.settings import load_settings

from .conftest import ONCEWARD, ROUTES, WALK, Cli, Here, Server, environment, one_line, token

KEY = {"Idempotency-Key": "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"}
Serve = Callable[..., Server]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_record_survives_restart_and_kill(cli: Cli, serve: Serve) -> None:
    first = serve()
    assert first.line == f"Onceward is ready on {first.url} (sqlite:///onceward.db)"
    assert "no ONCEWARD_JWT_SECRET is set" in first.stderr()
    assert (cli.directory / ".onceward" / "jwt-secret").stat().st_mode & 0o777 == 0o600
    signature = cli("token", "--sub", "ada").stdout.decode().strip()
    with first.client(signature) as client:
        accepted = client.post(ROUTES, json=WALK, headers=KEY)
        assert accepted.status_code == 202
        assert "server" not in accepted.headers
        again = client.post(ROUTES, json=WALK, headers=KEY)
        assert again.content == accepted.content
        assert again.headers["idempotency-replayed"] == "true"
        conflict = client.post(ROUTES, json=WALK | {"minutes": 5}, headers=KEY)
        assert conflict.json()["code"] == "idempotency.payload_mismatch"
        assert client.get(accepted.headers["location"]).status_code == 200
        first.process.kill()
    first.process.wait()

    second = serve()
    with second.client(signature) as client:
        replay = client.post(ROUTES, json=WALK, headers=KEY)
        assert replay.content == accepted.content
        assert replay.headers["idempotency-replayed"] == "true"
    assert second.stop() == 0
    assert second.rest_of_output() == ""
    listed = json.loads(cli("keys", "ls", "--tenant", "ada", "--json").stdout)
    assert [record["key"] for record in listed] == [KEY["Idempotency-Key"]]


def test_terminal_gets_console_docs_and_token_command_and_one_warning(cli: Cli) -> None:
    ours, terminal = os.openpty()
    process = subprocess.Popen(
        [ONCEWARD, "serve", "--port", "0"],
        cwd=cli.directory,
        env=environment(TERM="dumb"),
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        shown = b""
        while b"onceward token" not in shown:
            assert select.select([ours], [], [], 30)[0], shown
            shown += os.read(ours, 10_000)
    finally:
        process.terminate()
        process.wait(20)
        os.close(ours)
    text = shown.decode()
    url = text.partition("ready on ")[2].split()[0]
    assert f"console  {url}/console/\r\n" in text
    assert f"docs     {url}/docs\r\n" in text
    assert "token    onceward token --sub ada" in text
    assert text.count("ONCEWARD_JWT_SECRET") == 1


def test_running_request_is_finished_before_shutdown(cli: Cli, serve: Serve) -> None:
    server = serve()
    body = json.dumps(WALK).encode()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as wire:
        wire.sendall(
            f"POST {ROUTES} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token(cli)}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body[:5]
        )
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.process.poll() is None
        wire.sendall(body[5:])
        assert wire.recv(1000).startswith(b"HTTP/1.1 202")
    assert server.process.wait(20) == 0


def test_expired_record_is_ignored_and_swept(cli: Cli, serve: Serve) -> None:
    server = serve(ROUTES_IDEMPOTENCY_TTL_HOURS="0.0001")
    with server.client(token(cli)) as client:
        first = client.post(ROUTES, json=WALK, headers=KEY).json()
        time.sleep(0.4)
        again = client.post(ROUTES, json=WALK, headers=KEY)
        assert "idempotency-replayed" not in again.headers
        assert again.json()["request_id"] != first["request_id"]
        time.sleep(0.4)
        assert json.loads(cli("sweep", "--json").stdout)["deleted"] == 1
    assert server.stop() == 0


def living_children(parent: psutil.Process) -> set[int]:
    living = set()
    for child in parent.children():
        with suppress(psutil.NoSuchProcess):  # ended after it was listed
            if child.status() != psutil.STATUS_ZOMBIE:
                living.add(child.pid)
    return living


def test_server_processes_share_port_keys_and_metrics(cli: Cli, serve: Serve) -> None:
    server = serve("--workers", "2")
    parent = psutil.Process(server.process.pid)
    signature = token(cli)
    first_two = {child.pid for child in parent.children()}
    assert len(first_two) == 2

    responses: list[httpx.Response] = []

    def send() -> None:
        with server.client(signature) as client:
            responses.append(client.post(ROUTES, json=WALK, headers=KEY))

    threads = [threading.Thread(target=send) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {response.status_code for response in responses} == {202}
    assert len({response.content for response in responses}) == 1

    def count() -> str:
        return httpx.get(f"{server.url}/metrics").text

    requests = 'onceward_requests_total{endpoint="POST /api/v1/routes",outcome='
    # What the requests have left to do, such as a job, may change a metric meanwhile.
    until(
        lambda: len({count() for _ in range(6)}) == 1,
        "the metrics depend on the process that responds",
    )
    assert f'{requests}"replayed"}} 15.0' in count()

    psutil.Process(next(iter(first_two))).kill()
    until(
        lambda: len(living_children(parent) - first_two) == 1,
        "no worker took the place of the one that was killed",
    )
    with server.client(signature) as client:
        assert client.post(ROUTES, json=WALK, headers=KEY).status_code == 202
    workers = parent.children()
    assert server.stop() == 0
    assert server.rest_of_output() == ""
    assert not any(worker.is_running() for worker in workers)


def test_server_processes_share_a_rate_limit(cli: Cli, serve: Serve) -> None:
    server = serve("--workers", "3", "--no-jobs", ONCEWARD_ROUTES_RATE_LIMIT="10/hour")
    signature = token(cli)

    def send() -> int:
        with server.client(signature) as client:  # a connection each, so any worker may get it
            return client.post(ROUTES, json=WALK).status_code

    with ThreadPoolExecutor(8) as pool:
        statuses = [sent.result() for sent in [pool.submit(send) for _ in range(40)]]
    assert (statuses.count(202), statuses.count(429)) == (10, 30)


def test_server_processes_end_when_the_supervisor_is_killed(serve: Serve) -> None:
    server = serve("--workers", "2")
    workers = psutil.Process(server.process.pid).children()
    server.process.kill()
    server.process.wait()
    assert len(workers) == 2
    until(lambda: not any(w.is_running() for w in workers), "workers were left behind")


def test_port_in_use_is_reported_in_one_line(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = cli("serve", "--port", str(taken.getsockname()[1]))
    assert (done.returncode, done.stdout) == (1, b"")
    assert "choose another --port" in one_line(done.stderr)


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "message"),
    [
        (["--host", "0.0.0.0"], {}, 2, "ONCEWARD_JWT_SECRET"),
        (["--host", "0.0.0.0"], {"ONCEWARD_JWT_SECRET": min(SAMPLE_SECRETS)}, 2, "sample secret"),
        ([], {"ONCEWARD_ENVIRONMENT": "production"}, 2, "production never runs on"),
        ([], {"ONCEWARD_JWKS_URL": "https://id/keys"}, 2, "ONCEWARD_JWT_ISSUER=https://"),
        ([], {"ONCEWARD_OPS_HOST": "nowhere.invalid", "ONCEWARD_OPS_PORT": "0"}, 2, "nowhere"),
        (["--host", "nowhere.invalid"], {}, 2, "nowhere.invalid"),
        (["--database", "mysql://x"], {}, 2, "mysql"),
        (["--database", "postgresql://[bad"], {}, 2, "PostgreSQL URL is malformed"),
        (["--database", "postgresql://127.0.0.1:99999/x"], {}, 2, "PostgreSQL URL is malformed"),
        (["--nats", "nats://[bad"], {}, 2, "NATS URL is malformed"),
        (["--workers", "2", "--nats", "nats://127.0.0.1:abc"], {}, 2, "NATS URL is malformed"),
        (["--database", "postgresql://me:hunter2@127.0.0.1:1/x"], {}, 1, "me:***@127.0.0.1"),
        (["--database", "sqlite:////nowhere/x.db"], {}, 1, "/nowhere/x.db"),
        ([], {"ONCEWARD_WAIT_SECONDS": "soon"}, 2, "ONCEWARD_WAIT_SECONDS"),
    ],
)
def test_startup_error_is_reported_in_one_line(
    here: Here, arguments: list[str], variables: dict[str, str], code: int, message: str
) -> None:
    done = here("serve", "--port", "0", *arguments, **variables)
    assert (done.returncode, done.stdout) == (code, b"")
    assert message in one_line(done.stderr)


def test_startup_error_of_several_processes_is_reported_once(cli: Cli) -> None:
    arguments = ("serve", "--port", "0", "--workers", "2")
    done = cli(
        *arguments,
        ONCEWARD_JWKS_FILE="nowhere.json",
        ONCEWARD_JWT_ISSUER="https://id.example",
        ONCEWARD_JWT_AUDIENCE="onceward",
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert "nowhere.json" in one_line(done.stderr)


def test_unknown_setting_is_a_warning(serve: Serve) -> None:
    secret = "x" * 32
    server = serve("--no-jobs", ONCEWARD_HOEM="y", ONCEWARD_JWT_SECRET=secret)
    assert server.stop() == 0
    warnings = [line for line in server.stderr().splitlines() if "warning" in line.lower()]
    assert len(warnings) == 1
    assert "ONCEWARD_HOEM is not a setting" in warnings[0]
    assert secret not in server.stderr()


def test_risky_setting_is_a_warning(serve: Serve) -> None:
    ttl = {"ONCEWARD_WALK_SUCCESS_TTL_HOURS": "0.0005", "ONCEWARD_JWT_SECRET": "x" * 32}
    server = serve("--no-jobs", "--workers", "2", **ttl)
    assert server.stop() == 0
    warnings = [line for line in server.stderr().splitlines() if "warning" in line.lower()]
    assert len([line for line in warnings if "WALK_SUCCESS_TTL_HOURS=0.0005" in line]) == 1


def test_development_secret_binds_to_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONCEWARD_JWT_SECRET", raising=False)
    development, real = load_settings(), load_settings(jwt_secret="x" * 32)
    for host in ("127.0.0.1", "127.8.8.8", "localhost"):
        _bind(host, 0, development).close()
    with pytest.raises(CommandError, match="refusing to listen"):
        _bind("0.0.0.0", 0, development)
    with pytest.raises(CommandError):
        _bind("::", 0, development)
    _bind("0.0.0.0", 0, real).close()


def test_sample_secret_binds_to_loopback_only() -> None:
    for sample in SAMPLE_SECRETS:
        for secret in (sample, f"{'n' * 32},{sample}"):
            if "," in sample and secret != sample:
                continue  # it cannot be one of several
            settings = load_settings(jwt_secret=secret)
            _bind("127.0.0.1", 0, settings).close()
            for host in ("0.0.0.0", "::"):
                with pytest.raises(CommandError, match="a sample secret from the documentation"):
                    _bind(host, 0, settings)


def test_ops_port_has_metrics_and_docs_and_the_other_port_has_not(cli: Cli, serve: Serve) -> None:
    server = serve("--no-jobs", "--workers", "2", ONCEWARD_OPS_PORT="0")
    ops = server.line.split()[-1]
    assert server.line.endswith(f"(sqlite:///onceward.db), metrics and docs on {ops}")
    pages = ("/metrics", "/docs", "/docs/start.js", "/openapi.json")
    with httpx.Client(base_url=server.url) as api, httpx.Client(base_url=ops) as other:
        for path in pages:
            assert (api.get(path).status_code, other.get(path).status_code) == (404, 200), path
        for path in ("/", "/healthz", "/readyz"):
            assert (api.get(path).status_code, other.get(path).status_code) == (200, 200), path
        # A header cannot choose the port.
        forged = {"Host": ops.removeprefix("http://"), "X-Forwarded-Port": ops.rpartition(":")[2]}
        assert api.get("/metrics", headers=forged).status_code == 404
        assert api.get("/metrics/").status_code == api.get("/%6detrics").status_code == 404
        signed_in = {"Authorization": f"Bearer {token(cli)}"}
        assert api.post(ROUTES, json=WALK, headers=signed_in).status_code == 202
        refused = other.post(ROUTES, json=WALK, headers=signed_in)
        assert (refused.status_code, refused.json()["code"]) == (404, "resource.not_found")
        assert "docs" not in api.get("/", headers={"Accept": "application/json"}).json()["links"]
        assert "docs" in other.get("/", headers={"Accept": "application/json"}).json()["links"]
    assert server.stop() == 0
